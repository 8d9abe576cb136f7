package benchmarks

import (
	"cmp"
	"context"
	"fmt"
	"hash/crc32"
	"slices"
	"time"

	"troupe/actors"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/placement"
	"troupe/roles"
)

// holderClass is the name of the class of the workers of Between.
const holderClass = "bench-holder"

// HolderClass is the class of the workers of Between, which the agents' own program hosts.
func HolderClass() *actors.Class {
	class := actors.NewClass(holderClass, func(context.Context, actors.Setup) (*holder, error) { return &holder{}, nil })
	actors.Method(class, "had", (*holder).Had)
	actors.Method(class, "size", (*holder).Size)
	actors.Method(class, "sum", (*holder).Sum)
	return class.Class
}

// holder has a value, and takes others.
type holder struct{ body []byte }

// Had is a value of that many bytes.
func (h *holder) Had(_ context.Context, n int) ([]byte, error) {
	if len(h.body) != n {
		h.body = patterned(n)
	}
	return h.body, nil
}

func patterned(n int) []byte {
	body := make([]byte, n)
	for i := range body {
		body[i] = byte(i) ^ byte(i>>11)
	}
	return body
}

func (h *holder) Size(_ context.Context, body []byte) (uint64, error) { return uint64(len(body)), nil }

func (h *holder) Sum(_ context.Context, body []byte) (uint64, error) {
	return uint64(crc32.ChecksumIEEE(body)), nil
}

// BetweenConfig configures Between.
type BetweenConfig struct {
	Nodes  []string // two or more, by name
	Bytes  []int    // sizes of the values; none: 64 MiB
	Rounds int      // of each row; zero: 10
}

// BetweenResult is one row: how long it takes until the last receiver has the values and the caller knows.
type BetweenResult struct {
	Row    string  `json:"row"`
	Bytes  int     `json:"bytes"` // of each value
	Rounds int     `json:"rounds"`
	Median float64 `json:"p50_ms"`
	Worst  float64 `json:"worst_ms"`
	MBps   float64 `json:"mb_s"` // of all values together, by the median
	// HeadMiB is what crosses the head's link in one round; negative: not measured.
	HeadMiB float64 `json:"head_link_mib"`
}

const (
	holders    = 4                // workers of each node
	settleFree = time.Millisecond // between two rounds: values of the last one are freed
)

// Between measures large values between this process and nodes, and between the nodes. It begins each row with a round that is not counted, in which the
// receivers compare checksums.
func Between(ctx context.Context, rt *roles.Runtime, cfg BetweenConfig, report func(BetweenResult) error) (err error) {
	b := between{rounds: cmp.Or(cfg.Rounds, 10), report: report}
	defer func() {
		for _, c := range b.nodes {
			_ = c.Destroy(context.WithoutCancel(ctx)) // it ends with this process anyway
		}
	}()
	for i, node := range cfg.Nodes {
		c, err := rt.Create(ctx, roles.Spec{
			Name: fmt.Sprintf("bench-holder-%d", i), Class: holderClass, World: holders, Replace: true,
			Process: &roles.Process{Needs: placement.Request{Bundles: []placement.Bundle{{Node: node}}}},
		})
		if err != nil {
			return fmt.Errorf("start workers on node %s: %w", node, err)
		}
		b.nodes = append(b.nodes, c)
	}
	sizes := cfg.Bytes
	if len(sizes) == 0 {
		sizes = []int{64 << 20}
	}
	for _, n := range sizes {
		if err := b.rows(ctx, n, cfg.Nodes); err != nil {
			return err
		}
	}
	return nil
}

// between is a run of Between.
type between struct {
	nodes  []*roles.Cluster
	rounds int
	report func(BetweenResult) error
}

func (b *between) rows(ctx context.Context, n int, names []string) error {
	body := patterned(n)
	from, to := b.nodes[0], b.nodes[1]
	made := func(rank int) (*dispatch.Future, error) {
		return from.Go(ctx, dispatch.Call{Method: "had", Ranks: []int{rank}, Args: []any{n}, Keep: true})
	}
	for _, row := range []struct {
		name  string
		total int // values
		do    func(method string) ([]*dispatch.Future, error)
	}{
		{"driver → " + names[0], 1, func(method string) ([]*dispatch.Future, error) {
			return futures(from.Go(ctx, dispatch.Call{Method: method, Ranks: []int{0}, Args: []any{body}}))
		}},
		{names[0] + " → driver", 1, nil},
		{names[0] + " → " + names[1] + ", by reference", 1, func(method string) ([]*dispatch.Future, error) {
			made, err := made(0)
			if err != nil {
				return nil, err
			}
			return futures(to.Go(ctx, dispatch.Call{Method: method, Ranks: []int{0}, Args: []any{made}}))
		}},
		{fmt.Sprintf("%d × %s → %s", holders, names[0], names[1]), holders, func(method string) ([]*dispatch.Future, error) {
			var all []*dispatch.Future
			for rank := range holders {
				made, err := made(rank)
				if err != nil {
					return nil, err
				}
				f, err := to.Go(ctx, dispatch.Call{Method: method, Ranks: []int{rank}, Args: []any{made}})
				if err != nil {
					return nil, err
				}
				all = append(all, f)
			}
			return all, nil
		}},
		{fmt.Sprintf("driver → %d nodes, one value", len(b.nodes)), len(b.nodes), func(method string) ([]*dispatch.Future, error) {
			return b.toAll(ctx, method, body)
		}},
	} {
		do := func(method string) error { return b.await(ctx, method, body, row.do) }
		if row.do == nil {
			do = func(string) error { return b.fetch(ctx, made, body) }
		}
		if err := b.measure(row.name, n, row.total, do); err != nil {
			return fmt.Errorf("%s: %w", row.name, err)
		}
	}
	return nil
}

func futures(f *dispatch.Future, err error) ([]*dispatch.Future, error) {
	return []*dispatch.Future{f}, err
}

// toAll has one worker of each node take a value of this process.
func (b *between) toAll(ctx context.Context, method string, body []byte) ([]*dispatch.Future, error) {
	encoded, err := wire.Marshal(body)
	if err != nil {
		return nil, err
	}
	refs := b.nodes[0].References()
	ref, err := refs.Put(encoded, nil, nil)
	if err != nil {
		return nil, err
	}
	defer refs.Release(ref) // the calls have it too
	var all []*dispatch.Future
	for _, c := range b.nodes {
		f, err := c.Go(ctx, dispatch.Call{Method: method, Ranks: []int{0}, Args: []any{ref}})
		if err != nil {
			return nil, err
		}
		all = append(all, f)
	}
	return all, nil
}

// await waits for the receivers, whose answers must be right.
func (b *between) await(ctx context.Context, method string, body []byte, do func(method string) ([]*dispatch.Future, error)) error {
	want := uint64(len(body))
	if method == "sum" {
		want = uint64(crc32.ChecksumIEEE(body))
	}
	all, err := do(method)
	if err != nil {
		return err
	}
	for _, f := range all {
		got, err := dispatch.Await[uint64](ctx, f)
		if err != nil {
			return err
		}
		if got != want {
			return fmt.Errorf("a receiver answers %d instead of %d", got, want)
		}
	}
	return nil
}

// fetch gets a worker's value.
func (b *between) fetch(ctx context.Context, made func(rank int) (*dispatch.Future, error), body []byte) error {
	f, err := made(0)
	if err != nil {
		return err
	}
	got, err := dispatch.Await[[]byte](ctx, f)
	if err == nil && len(got) != len(body) {
		err = fmt.Errorf("%d bytes instead of %d", len(got), len(body))
	}
	return err
}

func (b *between) measure(row string, n, total int, do func(method string) error) error {
	if err := do("sum"); err != nil {
		return err
	}
	var took []float64
	for range b.rounds {
		at := time.Now()
		if err := do("size"); err != nil {
			return err
		}
		took = append(took, float64(time.Since(at).Microseconds())/1e3)
		time.Sleep(settleFree)
	}
	p50 := median(took)
	return b.report(BetweenResult{
		Row: row, Bytes: n, Rounds: b.rounds, Median: p50, Worst: slices.Max(took), MBps: float64(n*total) / 1e3 / p50, HeadMiB: -1,
	})
}
