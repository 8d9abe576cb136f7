package inspect

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/cmd/troupe/cli"
	"troupe/weights"
	"troupe/weights/versions"
)

func newWeights(c command) *cobra.Command {
	cmd := &cobra.Command{Use: "weights", Short: "Show the weights of models: their versions, and who has which", Example: "  troupe weights status\n  troupe weights status policy"}
	cmd.AddCommand(newWeightsStatus(c))
	return cmd
}

func newWeightsStatus(c command) *cobra.Command {
	var watch cli.WatchFlags
	cmd := &cobra.Command{
		Use:   "status [NAME]",
		Short: "Show the versions of weights, and which processes have committed which",
		Long: `Status prints a line for each name of all namespaces, or with --namespace of one. With NAME it prints the versions of that name that are
kept, and each process that publishes or takes them.`,
		Example: "  troupe weights status\n  troupe weights status policy --watch\n  troupe weights status policy --json | jq .lag",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, pos []string) error {
			return c.Repeat(cmd.Context(), watch, func(ctx context.Context) error {
				return c.WithBus(ctx, func(b *bus.Bus, s cli.Server) error {
					if len(pos) == 0 {
						return c.weights(ctx, b, s)
					}
					return c.weightsOf(ctx, b, s, pos[0])
				})
			})
		},
	}
	watch.Add(cmd)
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON array, or with NAME one object")
	return cmd
}

// weights shows all names.
func (c command) weights(ctx context.Context, b *bus.Bus, s cli.Server) error {
	all, err := weights.Overviews(ctx, b)
	if err != nil {
		return err
	}
	if s.Named {
		all = slices.DeleteFunc(all, func(o weights.Overview) bool { return o.Namespace != s.Namespace })
	}
	if c.JSON {
		return c.PrintJSON(all)
	}
	rows := make([][]string, len(all))
	for i, o := range all {
		rows[i] = []string{o.Namespace, o.Name, orNone(o.Publisher), newest(o.Status), fmt.Sprintf("%d of %d", o.Current, o.Receivers), strconv.Itoa(o.Lag), took(o.Publish), took(o.Stage), took(o.Pause)}
	}
	return c.TableOr("no process has bound weights", "NAMESPACE NAME PUBLISHER NEWEST CURRENT LAG PUBLISH STAGE PAUSE", rows)
}

// weightsOf shows one name.
func (c command) weightsOf(ctx context.Context, b *bus.Bus, s cli.Server, name string) error {
	if err := bus.CheckName("weights", name); err != nil {
		return cli.Usagef("%w", err)
	}
	s, err := findWeights(ctx, s, b, name)
	if err != nil {
		return err
	}
	st, err := weightsStatus(ctx, b, s.Namespace, name)
	if err != nil {
		return err
	}
	if c.JSON {
		return c.PrintJSON(st)
	}
	if len(st.Members) == 0 {
		c.Printf("no process of namespace %s has bound weights %q\n", s.Namespace, name)
		return nil
	}
	c.Printf("%s: %d tensors, published by %s; %d of %d receivers have the newest version\n\n", st.Name, st.Tensors, orNone(st.Publisher), st.Current, st.Receivers)
	rows := make([][]string, len(st.Versions))
	for i, v := range st.Versions {
		rows[i] = []string{versionText(v.Version), versionState(v), took(v.Age), size(v.Bytes), size(v.Deltas), took(v.Publish), strconv.Itoa(v.Takers), strconv.Itoa(v.Has)}
	}
	if err := c.TableOr("no version was published", "VERSION STATE AGE BYTES DELTAS PUBLISH TAKERS COMMITTED", rows); err != nil {
		return err
	}
	c.Printf("\n")
	rows = make([][]string, len(st.Members))
	for i, m := range st.Members {
		rows[i] = []string{memberText(m), doing(m), versionText(m.Committed), strconv.Itoa(m.Lag), took(m.Publish), took(m.Stage), took(m.Pause), ways(m.Bytes), orNone(m.Failed)}
	}
	return c.Table("MEMBER DOES COMMITTED LAG PUBLISH STAGE PAUSE TAKEN FAILED", rows)
}

// weightsStatus asks the service with a session of its own, because a long answer is a value.
func weightsStatus(ctx context.Context, b *bus.Bus, namespace, name string) (out versions.Status, err error) {
	session, err := b.NewSession(namespace)
	if err != nil {
		return out, err
	}
	store := values.New(session)
	if err := session.Start(store); err != nil {
		return out, err
	}
	defer session.Close()
	client, err := weights.NewClient(weights.ClientConfig{Bus: b, Namespace: namespace, Session: session.Name(), References: store.References()})
	if err != nil {
		return out, err
	}
	defer client.Close()
	return client.Status(ctx, name)
}

// findWeights makes the namespace of a name the target if no namespace was given: "default" if that has it, else the only one that has it.
func findWeights(ctx context.Context, s cli.Server, b *bus.Bus, name string) (cli.Server, error) {
	if s.Named {
		return s, nil
	}
	all, err := weights.Overviews(ctx, b)
	if err != nil {
		return s, err
	}
	var having []string
	for _, o := range all {
		if o.Name == name {
			having = append(having, o.Namespace)
		}
	}
	switch {
	case len(having) == 0 || slices.Contains(having, s.Namespace):
	case len(having) == 1:
		s.Namespace = having[0]
	default:
		return s, cli.Usagef("weights %s are in %d namespaces; choose one with --namespace: %s", name, len(having), strings.Join(having, ", "))
	}
	return s, nil
}

func newest(st versions.Status) string {
	for _, v := range slices.Backward(st.Versions) {
		if v.State == "complete" {
			return versionText(v.Version)
		}
	}
	return "–"
}

func versionText(v versions.Version) string {
	if v.IsZero() {
		return "–"
	}
	return fmt.Sprintf("%d.%d", v.Epoch, v.Step)
}

func versionState(v versions.VersionStatus) string {
	switch {
	case v.Lost != "":
		return "lost: " + v.Lost
	case len(v.Missing) > 0:
		return fmt.Sprintf("%s: waits for rank %s", v.State, cli.Indices(v.Missing))
	}
	return v.State
}

func memberText(m versions.MemberStatus) string {
	who := fmt.Sprintf("%s[%d]", m.Role, m.Rank)
	if m.Role == "" {
		who = "session " + m.Session
	}
	return who
}

func doing(m versions.MemberStatus) string {
	if m.Publishes {
		return "publishes"
	}
	return "takes"
}

func orNone(text string) string {
	if text == "" {
		return "–"
	}
	return text
}

// took is a duration in seconds; zero: it was not measured.
func took(seconds float64) string {
	if seconds == 0 {
		return "–"
	}
	d := time.Duration(seconds * float64(time.Second))
	if d > time.Second {
		return d.Round(10 * time.Millisecond).String()
	}
	return d.Round(10 * time.Microsecond).String()
}

// ways is the bytes that were taken, by way.
func ways(bytes map[string]int64) string {
	var parts []string
	for _, way := range slices.Sorted(maps.Keys(bytes)) {
		parts = append(parts, way+" "+size(bytes[way]))
	}
	return orNone(strings.Join(parts, ", "))
}

// size is a number of bytes; zero: there are none.
func size(bytes int64) string {
	if bytes == 0 {
		return "–"
	}
	value, unit := float64(bytes), "B"
	for _, next := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if value < 1024 {
			break
		}
		value, unit = value/1024, next
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", value), ".0") + " " + unit
}
