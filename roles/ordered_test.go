package roles_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/roles"
)

// collective is workers whose calls wait for each other on all ranks: ranks that receive calls in different orders
// deadlock.
type collective struct {
	mu       sync.Mutex
	meetings map[string]*meeting
}

type meeting struct {
	singers int
	allCh   chan struct{}
}

type member struct {
	collective *collective
	world      int
}

func (s *member) Meet(ctx context.Context, name string) (actors.None, error) {
	s.collective.mu.Lock()
	one := s.collective.meetings[name]
	if one == nil {
		one = &meeting{allCh: make(chan struct{})}
		s.collective.meetings[name] = one
	}
	if one.singers++; one.singers == s.world {
		close(one.allCh)
	}
	s.collective.mu.Unlock()
	select {
	case <-one.allCh:
		return actors.None{}, nil
	case <-ctx.Done():
		return actors.None{}, ctx.Err()
	}
}

func TestOrderedRoleDoesNotDeadlockBetweenDrivers(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	all := &collective{meetings: map[string]*meeting{}}
	class := actors.NewClass("member", func(_ context.Context, s actors.Setup) (*member, error) { return &member{all, s.World}, nil })
	actors.Method(class, "meet", (*member).Meet)
	rt := open(t, roles.Config{BusConfig: bus.Config{InProcess: srv}, Classes: []*actors.Class{class.Class}})
	create(t, rt, roles.Spec{Name: "collective", Class: "member", World: 6, Ordered: true, OwnConnections: true})
	var group sync.WaitGroup
	for d := range 3 {
		driver := open(t, roles.Config{BusConfig: bus.Config{InProcess: srv}})
		c := attach(t, driver, "collective")
		group.Go(func() {
			for i := range 30 {
				if _, err := c.ExecuteAll(patient(t), "meet", fmt.Sprint(d, "-", i)); err != nil {
					t.Errorf("driver %d, meeting %d: %v", d, i, err)
					return
				}
			}
		})
	}
	group.Wait()
	require.Len(t, all.meetings, 90)
}
