// Command goworkers plays the workers of the dispatch vectors in Go, for the Python tests: it makes a role for each of
// VECTORS_ROLES at the head of VECTORS_URL, says "ready", and ends with its standard input.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles"
)

type role struct {
	Name  string        `json:"name" msgpack:"name"`
	Mode  string        `json:"mode" msgpack:"mode"`
	Mesh  dispatch.Mesh `json:"mesh" msgpack:"mesh"`
	World int           `json:"world" msgpack:"world"`
}

// vector answers as the vectors say.
type vector struct {
	role role
	rank int

	mu   sync.Mutex
	seen []any
}

func (v *vector) step(ctx context.Context, args actors.Args) (any, error) {
	var part any
	if len(args.Positional) > 0 {
		if err := wire.Unmarshal(args.Positional[0], &part); err != nil {
			return nil, err
		}
	}
	call, _ := actors.Current(ctx)
	v.mu.Lock()
	v.seen = append(v.seen, []any{part, !call.NoData})
	v.mu.Unlock()
	at := v.role.Mesh.Coord(v.rank)
	switch dispatch.Mode(v.role.Mode) {
	case dispatch.RankZero, dispatch.OneToAll, dispatch.OneToAllOne:
		return v.rank, nil
	case dispatch.AllToAll:
		return []any{v.rank, part}, nil
	}
	rows, ok := part.([]any)
	if !ok {
		rows = []any{part}
	}
	out := make([]any, len(rows))
	for i, row := range rows {
		out[i] = []any{at.DP, at.TP, at.PP, at.CP, row}
	}
	return out, nil
}

func (v *vector) calls(context.Context, actors.None) ([]any, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	seen := append([]any{}, v.seen...)
	v.seen = nil
	return seen, nil
}

// classOf is a class whose method has the mode of the vector.
func classOf(r role) *actors.Class {
	c := actors.NewClass("vector-"+r.Name, func(_ context.Context, s actors.Setup) (*vector, error) { return &vector{role: r, rank: s.Rank}, nil })
	actors.Method(c, "step", (*vector).step, actors.MethodOptions{Mode: r.Mode})
	actors.Method(c, "calls", (*vector).calls)
	return c.Class
}

func run(ctx context.Context) error {
	var all []role
	if err := json.Unmarshal([]byte(os.Getenv("VECTORS_ROLES")), &all); err != nil {
		return err
	}
	var classes []*actors.Class
	for _, r := range all {
		classes = append(classes, classOf(r))
	}
	rt, err := roles.Open(ctx, roles.Config{
		BusConfig: bus.Config{URLs: []string{os.Getenv("VECTORS_URL")}, TokenFile: os.Getenv("VECTORS_TOKEN_FILE")}, Classes: classes,
	})
	if err != nil {
		return err
	}
	for _, r := range all {
		if _, err := rt.Create(ctx, roles.Spec{Name: "go-" + r.Name, Class: "vector-" + r.Name, World: r.World, Mesh: r.Mesh}); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin) // any end is the end
	return rt.Close(ctx)
}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "goworkers:", err)
		os.Exit(1)
	}
}
