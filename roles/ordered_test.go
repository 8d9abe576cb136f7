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
type choir struct {
	mu    sync.Mutex
	songs map[string]*song
}

type song struct {
	singers int
	allCh   chan struct{}
}

type singer struct {
	choir *choir
	world int
}

func (s *singer) Sing(ctx context.Context, name string) (actors.None, error) {
	s.choir.mu.Lock()
	one := s.choir.songs[name]
	if one == nil {
		one = &song{allCh: make(chan struct{})}
		s.choir.songs[name] = one
	}
	if one.singers++; one.singers == s.world {
		close(one.allCh)
	}
	s.choir.mu.Unlock()
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
	all := &choir{songs: map[string]*song{}}
	class := actors.NewClass("singer", func(_ context.Context, s actors.Setup) (*singer, error) { return &singer{all, s.World}, nil })
	actors.Method(class, "sing", (*singer).Sing)
	rt := open(t, roles.Config{BusConfig: bus.Config{InProcess: srv}, Classes: []*actors.Class{class.Class}})
	create(t, rt, roles.Spec{Name: "choir", Class: "singer", World: 6, Ordered: true, OwnConnections: true})
	var group sync.WaitGroup
	for d := range 3 {
		driver := open(t, roles.Config{BusConfig: bus.Config{InProcess: srv}})
		c := attach(t, driver, "choir")
		group.Go(func() {
			for i := range 30 {
				if _, err := c.ExecuteAll(patient(t), "sing", fmt.Sprint(d, "-", i)); err != nil {
					t.Errorf("driver %d, song %d: %v", d, i, err)
					return
				}
			}
		})
	}
	group.Wait()
	require.Len(t, all.songs, 90)
}
