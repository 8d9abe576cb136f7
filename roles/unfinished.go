package roles

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Unfinished describes what Close waits for, a line for each worker process of this runtime's roles that has not ended.
func (rt *Runtime) Unfinished() []string {
	var lines []string
	for _, c := range rt.ending() {
		for rank, b := range c.Health() {
			worker := fmt.Sprintf("%s[%d]", c.Name(), rank)
			switch {
			case b.State.Over():
			case b.State == "":
				lines = append(lines, worker+" starts")
			case b.Calls > 0:
				lines = append(lines, fmt.Sprintf("%s runs %s for %v", worker, b.Method, b.Busy.Round(100*time.Millisecond)))
			default:
				lines = append(lines, worker+" stops")
			}
		}
	}
	return lines
}

// KillUnfinished kills the workers that Close waits for.
func (rt *Runtime) KillUnfinished(ctx context.Context) error {
	var errs []error
	for _, c := range rt.ending() {
		if rec := c.Record(); len(rec.Placements) > 0 {
			errs = append(errs, c.workforce.killProcesses(ctx, rec.PlacedRanks(), rec, 0))
		}
	}
	return errors.Join(errs...)
}

// ending is the roles of worker processes that end with this runtime and have not ended, by name.
func (rt *Runtime) ending() []*Cluster {
	var all []*Cluster
	rt.mu.Lock()
	for c := range rt.clusters {
		all = append(all, c)
	}
	rt.mu.Unlock()
	all = slices.DeleteFunc(all, func(c *Cluster) bool {
		rec := c.Record()
		return c.origin != created || rec.Detached || !rec.Process
	})
	slices.SortFunc(all, func(a, b *Cluster) int { return cmp.Compare(a.Name(), b.Name()) })
	return all
}
