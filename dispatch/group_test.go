package dispatch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
)

// echo returns [rank, first argument].
func echo(_ context.Context, rank int, args actors.Args) (any, error) {
	v, err := first(args)
	return []any{rank, v}, err
}

// rowsBack returns the rows of its call.
func rowsBack(_ context.Context, _ int, args actors.Args) (any, error) { return first(args) }

// describe returns the arguments as text: the positional ones in order, then the named ones by name.
func describe(_ context.Context, _ int, args actors.Args) (any, error) {
	var words []string
	add := func(prefix string, raw wire.Raw) error {
		var v any
		err := wire.Unmarshal(raw, &v)
		words = append(words, prefix+fmt.Sprint(v))
		return err
	}
	for _, raw := range args.Positional {
		if err := add("", raw); err != nil {
			return nil, err
		}
	}
	for _, name := range []string{"a", "b", "rows"} {
		if raw, ok := args.Named[name]; ok {
			if err := add(name+"=", raw); err != nil {
				return nil, err
			}
		}
	}
	return strings.Join(words, " "), nil
}

func TestGroupCalls(t *testing.T) {
	g := newGroup(t, dp(3), methods{"echo": echo})
	f, err := g.Go(patient(t), Call{Method: "echo", Args: []any{"x"}})
	require.NoError(t, err)
	<-f.Done()
	value, err := f.Value(patient(t))
	require.NoError(t, err)
	want := []any{[]any{int64(0), "x"}, []any{int64(1), "x"}, []any{int64(2), "x"}}
	require.Equal(t, want, value)
	again, err := f.Value(patient(t))
	require.NoError(t, err)
	require.Equal(t, want, again, "a future can be awaited twice")
	require.NoError(t, f.Wait(patient(t)))
	require.Zero(t, g.Endpoint.Pending())
}

func TestGroupTakesNamedArguments(t *testing.T) {
	g := newGroup(t, dp(2), methods{"describe": describe})
	f, err := g.Go(patient(t), Call{
		Method: "describe", Mode: DPMPCompute, Args: []any{1}, Named: map[string]any{"b": true, "rows": []int{1, 2, 3}, "a": Broadcast([]int{7})},
	})
	require.NoError(t, err)
	got, err := AwaitEach[string](patient(t), f)
	require.NoError(t, err)
	require.Equal(t, []string{"1 a=[7] b=true rows=[1 2]", "1 a=[7] b=true rows=[3]"}, got)
}

func TestGroupRefusesBeforeItSends(t *testing.T) {
	g := newGroup(t, dp(4), methods{"echo": func(context.Context, int, actors.Args) (any, error) {
		t.Error("a bad call was sent")
		return nil, nil
	}})
	sent := g.Endpoint.Bus().Conn().Stats().OutMsgs
	broken, stop := context.WithCancel(t.Context())
	stop()
	for words, call := range map[string]Call{
		`there is no dispatch mode "ALL": the modes are RANK_ZERO`:                         {Mode: "ALL"},
		"fewer rows than data-parallel ranks: argument 2 has 3 rows":                       {Mode: DPMPCompute, Args: []any{0, []int{1, 2, 3}}},
		`fewer rows than data-parallel ranks: argument "rows" has 1 rows`:                  {Mode: DPMPCompute, Named: map[string]any{"a": 1, "rows": []int{1}}},
		`the same number of rows: argument 1 has 4, argument "b" has 5`:                    {Mode: DPMPCompute, Args: []any{make([]int, 4)}, Named: map[string]any{"b": make([]int, 5)}},
		`argument "a": the list must have one element a rank: it has 2, and there are 4`:   {Mode: AllToAll, Named: map[string]any{"a": []int{1, 2}}},
		`argument "a": the list must have one element a rank: it is no list but of type i`: {Mode: AllToAll, Named: map[string]any{"a": 1}},
		`argument "a" is marked split, but ONE_TO_ALL gives every rank`:                    {Named: map[string]any{"a": Split([]int{1})}},
		"argument 1: encode dispatch.rankObject: dis":                                      {Args: []any{rankObject{}}},
		`argument "f": encode func(): func() can`:                                          {Named: map[string]any{"f": func() {}}},
		"there is no rank 4: the ranks are 0 to 3":                                         {Ranks: []int{4}},
		"a part must go to one rank at least":                                              {Ranks: []int{}},
		"Mode DP_MP_COMPUTE and Ranks":                                                     {Mode: DPMPCompute, Ranks: []int{1}},
		"Need 5: the call goes to 4 ranks":                                                 {Need: 5},
		"Need -1":                                                                          {Need: -1},
		"Need and CollectAll":                                                              {Need: 2, CollectAll: true},
		"Need 1: ONE_TO_ALL_ONE calls 4 ranks and collects only 1":                         {Mode: OneToAllOne, Need: 1},
		"Timeout -1ns":    {Timeout: -1},
		"HALVES: too odd": {Custom: &Custom{Name: "HALVES", SplitFunc: func(Mesh, []any) ([]Piece, error) { return nil, errOdd }}},
		"argument 1 is marked split, but HALVES cuts its arguments itself": {Args: []any{Split(1)}, Custom: &Custom{Name: "HALVES", SplitFunc: func(Mesh, []any) ([]Piece, error) { return nil, nil }}},
	} {
		call.Method = "echo"
		_, err := g.Go(patient(t), call)
		assert.ErrorContains(t, err, words)
		assert.ErrorContains(t, err, "role echo: ", "the error says which call it is about")
		assert.ErrorIs(t, err, bus.ErrInvalid)
		if strings.Contains(words, "odd") {
			assert.ErrorIs(t, err, errOdd)
		}
	}
	_, err := g.Go(broken, Call{Method: "echo"})
	assert.ErrorIs(t, err, context.Canceled)
	require.Equal(t, sent, g.Endpoint.Bus().Conn().Stats().OutMsgs, "nothing was sent")
}

var errOdd = errors.New("too odd")

func TestGroupCallsSomeRanks(t *testing.T) {
	g := newGroup(t, dp(4), methods{"echo": echo})
	f, err := g.Go(patient(t), Call{Method: "echo", Args: []any{1}, Ranks: []int{3, 1}})
	require.NoError(t, err)
	value, err := f.Value(patient(t))
	require.NoError(t, err)
	require.Equal(t, []any{[]any{int64(3), int64(1)}, []any{int64(1), int64(1)}}, value, "in the order in which they are named")
}

func TestCustomMode(t *testing.T) {
	g := newGroup(t, dp(4), methods{"echo": echo})
	mode := &Custom{
		Name: "PAIRS",
		SplitFunc: func(m Mesh, args []any) ([]Piece, error) {
			return []Piece{{Ranks: []int{0, 2}, Args: args[:1]}, {Ranks: []int{3}, Args: args[1:]}}, nil
		},
		CollectFunc: func(Mesh) []int { return []int{3, 2} },
		MergeFunc:   func(_ Mesh, answers []any) (any, error) { return fmt.Sprint(answers), nil },
	}
	f, err := g.Go(patient(t), Call{Method: "echo", Args: []any{"a", "b"}, Custom: mode, Named: map[string]any{"beside": 1}})
	require.NoError(t, err)
	merged, err := Await[string](patient(t), f)
	require.NoError(t, err)
	require.Equal(t, "[[3 b] [2 a]]", merged)
	_, err = Await[int](patient(t), f)
	require.ErrorContains(t, err, "the result of PAIRS is of type string, not int")
	each, err := AwaitEach[[]any](patient(t), f)
	require.NoError(t, err)
	require.Equal(t, [][]any{{int64(3), "b"}, {int64(2), "a"}}, each)
}

func TestGroupSendsBatches(t *testing.T) {
	g := newGroup(t, Mesh{DP: 2, TP: 2, PP: 1, CP: 1}, methods{"echo": rowsBack})
	batch := Batch{Arrays: map[string]wire.Tensor{"ids": tensor(1, 2, 3)}, Meta: map[string]any{"step": int64(7)}}
	for _, mode := range []Mode{DPMPCompute, DPMPDispatchFirst} {
		f, err := g.Go(patient(t), Call{Method: "echo", Args: []any{batch}, Mode: mode})
		require.NoError(t, err)
		value, err := f.Value(patient(t))
		require.NoError(t, err)
		require.Equal(t, batch, value, "a batch comes back as one, whatever it is read into")
		typed, err := Await[Batch](patient(t), f)
		require.NoError(t, err)
		require.Equal(t, batch, typed)
	}
}

func TestGroupTrimsPadding(t *testing.T) {
	var mu sync.Mutex
	received := map[int]int{}
	g := newGroup(t, dp(4), methods{"double": func(_ context.Context, rank int, args actors.Args) (any, error) {
		var rows []int
		if err := wire.Unmarshal(args.Positional[0], &rows); err != nil {
			return nil, err
		}
		mu.Lock()
		received[rank] = len(rows)
		mu.Unlock()
		for i := range rows {
			rows[i] *= 2
		}
		return rows, nil
	}})
	f, err := g.Go(patient(t), Call{Method: "double", Mode: DPMPCompute, Args: []any{[]int{1, 2, 3, 4, 5}}, Options: Options{Pad: true}})
	require.NoError(t, err)
	rows, err := Await[[]int](patient(t), f)
	require.NoError(t, err)
	require.Equal(t, []int{2, 4, 6, 8, 10}, rows)
	require.Equal(t, map[int]int{0: 2, 1: 2, 2: 2, 3: 2}, received, "every replica has as many")
}

// TestUncollectedRanksAnswerWithoutABody: a rank that is not collected does not send its result.
func TestUncollectedRanksAnswerWithoutABody(t *testing.T) {
	var ran atomic.Int32
	mesh := Mesh{DP: 2, TP: 2, PP: 2, CP: 1}
	g := newGroup(t, mesh, methods{"step": func(context.Context, int, actors.Args) (any, error) {
		ran.Add(1)
		return strings.Repeat("x", 100_000), nil
	}})
	in := func() uint64 { return g.Endpoint.Bus().Conn().Stats().InBytes }
	for _, c := range []struct {
		call   Call
		bodies []int
		below  uint64
	}{
		{Call{Mode: DPMPCompute}, []int{4, 6}, 250_000},
		{Call{Mode: OneToAllOne}, []int{0}, 150_000},
		{Call{Mode: OneToAll, NoCollect: true}, nil, 10_000},
		{Call{Mode: DPMPCompute, NoCollect: true, Args: []any{[]int{1, 2, 3}}}, nil, 10_000},
	} {
		ran.Store(0)
		before := in()
		c.call.Method = "step"
		f, err := g.Go(patient(t), c.call)
		require.NoError(t, err)
		require.NoError(t, f.Wait(patient(t)))
		var bodies []int
		for _, a := range f.Answers() {
			if a.Body != nil {
				bodies = append(bodies, a.Rank)
			}
		}
		slices.Sort(bodies)
		assert.Equal(t, c.bodies, bodies)
		assert.EqualValues(t, mesh.World(), ran.Load(), "every rank computes")
		assert.Less(t, in()-before, c.below)
		if c.call.NoCollect {
			value, err := f.Value(patient(t))
			require.NoError(t, err)
			require.Nil(t, value)
			outcomes, err := AwaitOutcomes[string](patient(t), f)
			require.NoError(t, err)
			require.Empty(t, outcomes)
		}
	}
}

func TestConcurrentCallsOfTwoGroups(t *testing.T) {
	busFixture := newBusFixture(t)
	class := methods{"echo": echo}.class(actors.Serial)
	train, infer := busFixture.startRole(Mesh{DP: 2, TP: 2, PP: 1, CP: 1}, class), busFixture.startRole(dp(3), class)
	infer.Endpoint = train.Endpoint // both groups share one driver
	var group sync.WaitGroup
	for i := range 16 {
		group.Go(func() {
			for k := range 20 {
				arg := i*100 + k
				a, err1 := train.Go(patient(t), Call{Method: "echo", Args: []any{arg}})
				b, err2 := infer.Go(patient(t), Call{Method: "echo", Args: []any{arg}})
				if !assert.NoError(t, errors.Join(err1, err2)) {
					return
				}
				for rank, got := range awaitEach[[]int](t, b) { // the later call first
					assert.Equal(t, []int{rank, arg}, got)
				}
				assert.Len(t, awaitEach[[]int](t, a), 4)
			}
		})
	}
	group.Wait()
	require.Zero(t, train.Endpoint.Pending())
}

func awaitEach[R any](t *testing.T, f *Future) []R {
	got, err := AwaitEach[R](patient(t), f)
	assert.NoError(t, err)
	return got
}

// counted is an argument that counts its encodings.
type counted struct {
	values  []int
	encoded *atomic.Int32
}

func (c *counted) Len() int           { return len(c.values) }
func (c *counted) Slice(i, j int) any { return &counted{c.values[i:j], c.encoded} }
func (c *counted) MarshalMsgpack() ([]byte, error) {
	c.encoded.Add(1)
	return wire.Marshal(c.values)
}
func (c *counted) UnmarshalMsgpack(raw []byte) error { return wire.Unmarshal(raw, &c.values) }

// TestGroupEncodesEachPartOnce: a shard is encoded once and not for each of its ranks.
func TestGroupEncodesEachPartOnce(t *testing.T) {
	g := newGroup(t, Mesh{DP: 2, TP: 4, PP: 2, CP: 1}, methods{"rows": rowsBack})
	for _, c := range []struct {
		mode Mode
		mark func(any) any
		want int32
	}{
		{OneToAll, Broadcast, 1},
		{DPMPCompute, Split, 2},
		{DPMPDispatchFirst, Split, 2},
		{DPMPCompute, Broadcast, 1},
	} {
		var n atomic.Int32
		arg := &counted{[]int{1, 2, 3, 4}, &n}
		f, err := g.Go(patient(t), Call{Method: "rows", Mode: c.mode, Args: []any{c.mark(arg), []int{1, 2, 3, 4}}})
		require.NoError(t, err)
		require.NoError(t, f.Wait(patient(t)))
		assert.Equal(t, c.want, n.Load(), c.mode)
	}
}
