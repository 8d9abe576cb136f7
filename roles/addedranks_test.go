package roles_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/dispatch"
	"troupe/placement"
	"troupe/roles"
)

// initialized is what each rank was initialised with: the number of calls, and the last argument.
func initialized(t *testing.T, c *roles.Cluster) []string {
	t.Helper()
	said, err := roles.CallEach[string](patient(t), c, "initialized")
	require.NoError(t, err)
	return said
}

func initialize(t *testing.T, c *roles.Cluster, model string) {
	t.Helper()
	_, err := c.Call(patient(t), "initialize", model)
	require.NoError(t, err)
}

// A rank that is added has been called with the last arguments of every replayed method before it takes calls, whatever
// the role's policy, and by whichever driver the call was made.
func TestAddedRanksAreReplayed(t *testing.T) {
	t.Parallel()
	for _, policy := range []roles.Policy{roles.FailRole, roles.RestartRank} {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			tr := startHead(t, false)
			rt := tr.driver(t, roles.Config{})
			c := create(t, rt, restartable("infer", 2, policy, 10*time.Millisecond))
			other := attach(t, tr.driver(t, roles.Config{}), "infer")
			require.NoError(t, c.Grow(patient(t), 2), "nothing to replay")
			require.NoError(t, c.Shrink(patient(t), 2))

			initialize(t, c, "seven")
			require.NoError(t, c.Grow(patient(t), 2))
			require.Equal(t, []string{"1 seven 5", "1 seven 5", "1 seven 5", "1 seven 5"}, initialized(t, c))
			if policy == roles.RestartRank {
				kill(t, c, 3)
				require.Equal(t, "1 seven 5", initialized(t, c)[3], "an added rank is restarted as the others are")
			}

			eventually(t, "the other driver sees the size", func() bool { return other.WorldSize() == 4 })
			initialize(t, other, "eight")
			require.NoError(t, c.Shrink(patient(t), 2))
			initialize(t, c, "nine")
			require.NoError(t, c.Grow(patient(t), 2))
			require.Equal(t, []string{"1 nine 4", "1 nine 4"}, initialized(t, c)[2:], "ranks of the same numbers were initialised before")

			large := strings.Repeat("weights-", 200<<10)
			initialize(t, c, large)
			require.NoError(t, c.Grow(patient(t), 2))
			require.Equal(t, fmt.Sprintf("1 weights- %d", len(large)), initialized(t, c)[5])
		})
	}
}

// This must not happen: a rank is added although nobody knows what it has to be called with, or one on which that fails
// takes calls or ends the role.
func TestRanksThatCannotBeReplayedAreNotAdded(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	c := create(t, tr.driver(t, roles.Config{}), workerSpec("infer", 2, placement.Wholes(0)))
	refused := func(why string) {
		t.Helper()
		require.ErrorContains(t, c.Grow(patient(t), 2), why)
		require.Equal(t, 2, c.WorldSize())
		require.Len(t, initialized(t, c), 2)
	}
	one, err := c.Go(patient(t), dispatch.Call{Method: "initialize", Args: []any{"own"}, Ranks: []int{0}})
	require.NoError(t, err)
	require.NoError(t, one.Wait(patient(t)))
	refused("its last calls did not reach every rank")
	initialize(t, c, "all")
	one, err = c.Go(patient(t), dispatch.Call{Method: "initialize", Args: []any{"own"}, Ranks: []int{1}})
	require.NoError(t, err)
	require.NoError(t, one.Wait(patient(t)))
	refused("its last call gave ranks different arguments")
	initialize(t, c, "fails on rank 3")
	refused("replay of initialize")
	initialize(t, c, "exits on rank 2")
	refused("exit")
	initialize(t, c, "all")
	require.NoError(t, c.Grow(patient(t), 2))
	require.Equal(t, "1 all 3", initialized(t, c)[3])
}

// Calls that are made while the role grows reach the new ranks too, in the end.
func TestCallsDuringGrowth(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	c := create(t, tr.driver(t, roles.Config{}), workerSpec("infer", 1, placement.Wholes(0)))
	initialize(t, c, "0")
	grownCh := make(chan error, 1)
	go func() { grownCh <- c.Grow(patient(t), 2) }()
	last := ""
	for n := 1; ; n++ {
		last = fmt.Sprint(n)
		initialize(t, c, last)
		select {
		case err := <-grownCh:
			require.NoError(t, err)
			eventually(t, "the new ranks have the last arguments", func() bool {
				for _, said := range initialized(t, c) {
					if !strings.HasSuffix(said, fmt.Sprintf(" %s %d", last, len(last))) {
						return false
					}
				}
				return true
			})
			require.Len(t, initialized(t, c), 3)
			return
		default:
		}
	}
}

// A worker that was given a role's handle before the role grew calls all of its ranks afterwards.
func TestAHandleLearnsTheNewSize(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	asker := create(t, rt, workerSpec("asker", 1, placement.Wholes(0)))
	c := create(t, rt, workerSpec("infer", 2, placement.Wholes(0)))
	old := c.Handle()
	ask := func() int {
		said, err := roles.Call[[]any](patient(t), asker, "ask", old)
		require.NoError(t, err)
		return len(said)
	}
	require.Equal(t, 2, ask())
	require.NoError(t, c.Grow(patient(t), 1))
	eventually(t, "the worker calls all ranks", func() bool { return ask() == 3 })
	require.NoError(t, c.Shrink(patient(t), 2))
	eventually(t, "the worker calls the rank that is left", func() bool {
		said, err := roles.Call[[]any](patient(t), asker, "ask", old)
		return err == nil && len(said) == 1
	})
	require.ErrorIs(t, c.Shrink(patient(t), 1), bus.ErrInvalid)
}
