package inspect

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/pipeline"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/registry"
)

func newNamespaces(c command) *cobra.Command {
	var watch cli.WatchFlags
	cmd := &cobra.Command{
		Use:   "namespaces",
		Short: "List the namespaces with roles, reservations or pipelines",
		Long: `Namespaces lists the namespaces with drivers, roles, reservations or pipelines. An empty namespace is not listed and need not be
removed.`,
		Example: "  troupe namespaces\n  troupe namespaces --json | jq '.[].name'\n  troupe namespaces rm old-run",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return c.Repeat(cmd.Context(), watch, c.namespaces) },
	}
	watch.Add(cmd)
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON array")
	cmd.AddCommand(newNamespacesRemove(c))
	return cmd
}

// namespaceView is a namespace and its contents.
type namespaceView struct {
	registry.Namespace
	Pipelines []string `json:"pipelines"`
}

func (c command) namespaces(ctx context.Context) error {
	return c.WithBus(ctx, func(b *bus.Bus, _ cli.Server) error {
		all, err := listNamespaces(ctx, b)
		if err != nil {
			return err
		}
		if c.JSON {
			return c.PrintJSON(all)
		}
		rows := make([][]string, len(all))
		for i, n := range all {
			used := "–"
			if !n.Used.IsZero() {
				used = time.Since(n.Used).Round(time.Second).String() + " ago"
			}
			rows[i] = []string{n.Name, strconv.Itoa(len(n.Drivers)), strconv.Itoa(len(n.Roles)), strconv.Itoa(len(n.Reservations)), strconv.Itoa(len(n.Pipelines)), used}
		}
		return c.TableOr("no namespace has anything", "NAMESPACE DRIVERS ROLES RESERVATIONS PIPELINES WRITTEN", rows)
	})
}

// listNamespaces joins the registry, the ledger and the list of pipelines.
func listNamespaces(ctx context.Context, b *bus.Bus) ([]namespaceView, error) {
	known, err := registry.Namespaces(ctx, b)
	if err != nil {
		return nil, err
	}
	client, err := placement.NewClient(b, "")
	if err != nil {
		return nil, err
	}
	defer client.Close()
	list, err := client.List(ctx)
	if err != nil {
		return nil, err
	}
	views := map[string]*namespaceView{}
	view := func(name string) *namespaceView {
		if views[name] == nil {
			views[name] = &namespaceView{Namespace: registry.Namespace{Name: name, Drivers: []string{}, Roles: []string{}}}
		}
		return views[name]
	}
	for _, n := range known {
		view(n.Name).Namespace = n
	}
	for _, v := range views {
		v.Reservations = nil // the ledger, read below, has all of them
	}
	for _, r := range list.Records {
		if r.Namespace != "" { // an operator's reservation has no namespace
			view(r.Namespace).Reservations = append(view(r.Namespace).Reservations, r.ID)
		}
	}
	stored, err := pipeline.ListAll(ctx, b)
	if err != nil {
		return nil, err
	}
	for namespace, names := range stored {
		view(namespace).Pipelines = names
	}
	out := []namespaceView{}
	for _, name := range slices.Sorted(maps.Keys(views)) {
		v := *views[name]
		v.Reservations, v.Pipelines = append([]string{}, v.Reservations...), append([]string{}, v.Pipelines...) // never null in JSON
		out = append(out, v)
	}
	return out, nil
}

func newNamespacesRemove(c command) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "rm NAMESPACE",
		Short: "End everything in a namespace and remove it",
		Long: `Rm ends the roles of a namespace, releases its reservations, and removes its pipelines with their items. It refuses while drivers
are connected, unless --force is given. Shut running pipelines down first.`,
		Example: "  troupe namespaces rm old-run",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := bus.CheckName("namespace", args[0]); err != nil {
				return cli.Usagef("%w", err)
			}
			return c.removeNamespace(cmd.Context(), args[0], force)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "also if drivers are connected")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print what was removed as one JSON object")
	return cmd
}

func (c command) removeNamespace(ctx context.Context, name string, force bool) error {
	return c.WithBus(ctx, func(b *bus.Bus, _ cli.Server) error {
		all, err := listNamespaces(ctx, b)
		if err != nil {
			return err
		}
		var found *namespaceView
		for i := range all {
			if all[i].Name == name {
				found = &all[i]
			}
		}
		if found == nil {
			return bus.Errorf(bus.CodeNotFound, "namespace %s is empty; `troupe namespaces` lists those that are not", name)
		}
		if len(found.Drivers) > 0 && !force {
			return bus.Errorf(bus.CodeRefused, "%d drivers use namespace %s (%s); end them first, or give --force", len(found.Drivers), name, strings.Join(found.Drivers, ", "))
		}
		if err := emptyNamespace(ctx, b, *found); err != nil {
			return err
		}
		if c.JSON {
			return c.PrintJSON(found)
		}
		c.Printf("namespace %s is empty: %s, %s and %s are gone\n", name, cli.Counted(len(found.Roles), "role"), cli.Counted(len(found.Reservations), "reservation"), cli.Counted(len(found.Pipelines), "pipeline"))
		return nil
	})
}

func emptyNamespace(ctx context.Context, b *bus.Bus, n namespaceView) (err error) {
	rt, err := roles.Open(ctx, roles.Config{Bus: b, Namespace: n.Name})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close(ctx)) }()
	if err := rt.DestroyAll(ctx); err != nil {
		return err
	}
	client, err := placement.NewClient(b, n.Name)
	if err != nil {
		return err
	}
	defer client.Close()
	list, err := client.List(ctx)
	if err != nil {
		return err
	}
	for _, r := range list.Records {
		if err := client.Release(ctx, r.ID, r.Token); err != nil {
			return err
		}
	}
	for _, name := range n.Pipelines {
		p, err := pipeline.Connect(b, n.Name, name)
		if err == nil {
			err = p.Remove(ctx)
		}
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			return err
		}
	}
	return nil
}
