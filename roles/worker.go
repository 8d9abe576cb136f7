package roles

import (
	"context"
	"slices"

	"troupe/bus"
	"troupe/dispatch"
)

// Worker is a handle on one rank of a role. It is a value, and can be an argument of a call: the method receives its
// Handle.
type Worker struct {
	cluster *Cluster
	rank    int
}

// Worker is the handle of one rank.
func (c *Cluster) Worker(rank int) (Worker, error) {
	if _, err := c.RankInfo(rank); err != nil {
		return Worker{}, err
	}
	return Worker{cluster: c, rank: rank}, nil
}

// Rank is the worker's rank, and Cluster its role.
func (w Worker) Rank() int         { return w.rank }
func (w Worker) Cluster() *Cluster { return w.cluster }

// Go calls the worker and returns at once.
func (w Worker) Go(ctx context.Context, call dispatch.Call) (*dispatch.Future, error) {
	call.Ranks = []int{w.rank}
	return w.cluster.Go(ctx, call)
}

// Call calls a method of the worker and returns its answer.
func (w Worker) Call(ctx context.Context, method string, args ...any) (any, error) {
	f, err := w.Go(ctx, dispatch.Call{Method: method, Args: args})
	if err != nil {
		return nil, err
	}
	answers, err := dispatch.AwaitEach[any](ctx, f)
	if err != nil {
		return nil, err
	}
	return answers[0], nil
}

// Group is workers of one or several roles that are called together with the same arguments.
type Group []Worker

// Ranks is the group of some ranks of the role.
func (c *Cluster) Ranks(ranks ...int) (Group, error) {
	g := make(Group, len(ranks))
	for i, r := range ranks {
		w, err := c.Worker(r)
		if err != nil {
			return nil, err
		}
		g[i] = w
	}
	return g, nil
}

// Slice is the group of one data-parallel replica.
func (c *Cluster) Slice(dp int) (Group, error) {
	return selected(c, dispatch.Where(dispatch.DP, dp))
}

// Where is the group of the ranks with these coordinates, as in "tp=0" or "dp=1,pp=0".
func (c *Cluster) Where(coordinates string) (Group, error) {
	s, err := dispatch.ParseSelector(coordinates)
	if err != nil {
		return nil, err
	}
	return selected(c, s)
}

func selected(c *Cluster, s dispatch.Selector) (Group, error) {
	ranks, err := c.Mesh().Select(s)
	if err != nil {
		return nil, err
	}
	return c.Ranks(ranks...)
}

// Call calls every worker of the group with the same arguments, with one message per role, and returns the answers in
// the group's order. The first failure cancels the others, in all roles.
func (g Group) Call(ctx context.Context, method string, args ...any) ([]any, error) {
	return g.Await(ctx, dispatch.Call{Method: method, Args: args})
}

// Await is Call with the options of a dispatch.Call.
func (g Group) Await(ctx context.Context, call dispatch.Call) ([]any, error) {
	if len(g) == 0 {
		return nil, bus.Errorf(bus.CodeInvalid, "call %s: the group has no workers", call.Method)
	}
	var clusters []*Cluster
	ranks := map[*Cluster][]int{}
	for _, w := range g {
		if !slices.Contains(clusters, w.cluster) {
			clusters = append(clusters, w.cluster)
		}
		ranks[w.cluster] = append(ranks[w.cluster], w.rank)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	answers := make([][]any, len(clusters))
	errCh := make(chan error, len(clusters))
	for i, c := range clusters {
		one := call
		one.Ranks = ranks[c]
		f, err := c.Go(ctx, one)
		if err != nil {
			return nil, err
		}
		bus.Go(func() {
			values, err := dispatch.AwaitEach[any](ctx, f)
			answers[i] = values
			errCh <- err
		})
	}
	var first error
	for range clusters {
		if err := <-errCh; err != nil && first == nil {
			first = err
			cancel(err)
		}
	}
	if first != nil {
		return nil, first
	}
	out := make([]any, len(g))
	taken := map[*Cluster]int{}
	for i, w := range g {
		at := slices.Index(clusters, w.cluster)
		out[i] = answers[at][taken[w.cluster]]
		taken[w.cluster]++
	}
	return out, nil
}
