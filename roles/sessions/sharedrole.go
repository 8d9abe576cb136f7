package sessions

import (
	"context"
	"time"

	"troupe/roles"
)

// exitSeen is how long the end of a process may take to be seen after its last answer.
const exitSeen = 500 * time.Millisecond

// sharedRole is the running role of several actors. A rank that dies leaves the others running; the role ends with the last.
type sharedRole struct {
	cluster *roles.Cluster
	deadCh  []chan struct{} // by rank, closed at its end
	how     []string        // by rank; read after the end
}

// share makes the role of several actors of a cluster, and watches it.
func (s *service) share(cl *roles.Cluster) *sharedRole {
	r := &sharedRole{cluster: cl, deadCh: make([]chan struct{}, cl.WorldSize()), how: make([]string, cl.WorldSize())}
	for rank := range r.deadCh {
		r.deadCh[rank] = make(chan struct{})
	}
	s.spawn(func() {
		if !r.awaitAll(s.ctx) {
			return
		}
		ctx, cancel := context.WithTimeout(s.ctx, destroyLimit)
		defer cancel()
		if err := cl.Destroy(ctx); err != nil && s.ctx.Err() == nil {
			s.log.Debug("sessions: destroying a role without processes failed", "role", cl.Name(), "error", err)
		}
	})
	return r
}

// awaitAll returns when every rank has ended; false: the service has.
func (r *sharedRole) awaitAll(ctx context.Context) bool {
	for seen, left := 0, len(r.deadCh); left > 0; {
		deaths, all, _, err := r.cluster.Deaths(ctx, seen)
		if err != nil || ctx.Err() != nil || len(deaths) == 0 {
			return false
		}
		seen = all
		for _, d := range deaths {
			for rank := range r.deadCh {
				if (d.Rank < 0 || d.Rank == rank) && !r.isDead(rank) {
					r.how[rank] = describe(d)
					close(r.deadCh[rank])
					left--
				}
			}
		}
	}
	return true
}

func (r *sharedRole) isDead(rank int) bool {
	select {
	case <-r.deadCh[rank]:
		return true
	default:
		return false
	}
}

func (r *sharedRole) process(rank int) *process {
	return &process{cluster: r.cluster, rank: rank, shared: r}
}

// died waits for the end of a rank, and describes it.
func (r *sharedRole) died(ctx context.Context, rank int) string {
	select {
	case <-r.deadCh[rank]:
		return r.how[rank]
	case <-ctx.Done():
		return ""
	}
}

// endRank ends a rank that was asked to exit: by SIGKILL if it has not.
func (r *sharedRole) endRank(ctx context.Context, rank int) error {
	seen := time.NewTimer(exitSeen)
	defer seen.Stop()
	select {
	case <-r.deadCh[rank]:
		return nil
	case <-seen.C:
	case <-ctx.Done():
	}
	err := r.cluster.KillRanks(ctx, rank)
	if r.isDead(rank) {
		return nil
	}
	return err
}
