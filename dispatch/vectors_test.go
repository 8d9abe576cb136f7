package dispatch

import (
	"cmp"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"troupe/dispatch/plan"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
)

// vector is one case of dispatch.json.
type vector struct {
	Name         string `json:"name"`
	Mode         string `json:"mode"`
	Mesh         Mesh   `json:"mesh"`
	World        int    `json:"world"`
	Input        any    `json:"input"`
	Parts        []any  `json:"parts"`
	DataRanks    []int  `json:"data_ranks"`
	CollectRanks []int  `json:"collect_ranks"`
	Result       any    `json:"result"`
	Error        string `json:"error"`
}

func readVectors(t *testing.T) []vector {
	path := filepath.Join(cmp.Or(os.Getenv("TROUPE_VECTORS"), "testdata/vectors"), "dispatch.json")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var vectors []vector
	require.NoError(t, json.Unmarshal(text, &vectors))
	require.NotEmpty(t, vectors)
	return vectors
}

// answer is the test worker's answer to its part, nil for no data.
func (v vector) answer(mesh Mesh, rank int, part any) any {
	at := mesh.Coord(rank)
	switch Mode(v.Mode) {
	case RankZero, OneToAll, OneToAllOne:
		return rank
	case AllToAll:
		return []any{rank, part}
	}
	received, ok := part.([]any)
	if !ok {
		received = []any{part}
	}
	rows := make([]any, len(received))
	for i, row := range received {
		rows[i] = []any{at.DP, at.TP, at.PP, at.CP, row}
	}
	return rows
}

// outcome is the observed result of one case.
type outcome struct {
	parts   []any // by rank; nil for a rank without data, or that was not called
	called  []int
	data    []int // ranks that got data
	collect []int
	result  any
}

// check compares the outcome with the case.
func (v vector) check(t *testing.T, got outcome, err error) {
	if v.Error != "" {
		assert.ErrorContains(t, err, v.Error)
		assert.ErrorIs(t, err, bus.ErrInvalid)
		assert.Empty(t, got.called, "the call must be refused before anything is sent")
		return
	}
	require.NoError(t, err)
	want := append(v.Parts, make([]any, max(0, v.World-len(v.Parts)))...)
	assert.Equal(t, want, plain(t, got.parts))
	assert.Equal(t, v.Result, plain(t, got.result))
	if v.DataRanks != nil {
		assert.Equal(t, v.DataRanks, got.data)
	}
	if v.CollectRanks != nil {
		assert.Equal(t, v.CollectRanks, got.collect)
	}
	if Mode(v.Mode) == RankZero {
		assert.Equal(t, []int{0}, got.called)
	} else {
		assert.Len(t, got.called, v.World, "every rank is called, with data or without")
	}
}

// TestVectors runs each case over a server, with a worker for each rank.
func TestVectors(t *testing.T) {
	for _, v := range readVectors(t) {
		t.Run(v.Name, func(t *testing.T) {
			t.Parallel()
			got, err := v.run(t)
			v.check(t, got, err)
		})
	}
}

func (v vector) run(t *testing.T) (outcome, error) {
	mesh, err := v.Mesh.Resolve(v.World)
	if err != nil {
		return outcome{}, err
	}
	role := &vectorRole{vector: v, mesh: mesh, parts: make([]any, v.World)}
	group := newGroup(t, mesh, methods{"step": role.step})
	f, err := group.Go(patient(t), Call{Method: "step", Args: []any{v.Input}, Mode: Mode(v.Mode)})
	if err != nil {
		return role.outcome(), err
	}
	result, err := f.Value(patient(t))
	got := role.outcome()
	got.result = result
	for _, a := range f.Answers() {
		if a.Body != nil {
			got.collect = append(got.collect, a.Rank)
		}
	}
	slices.Sort(got.collect)
	return got, err
}

// vectorRole records the calls of one case.
type vectorRole struct {
	vector
	mesh Mesh

	mu     sync.Mutex
	parts  []any
	called []int
	data   []int
}

func (r *vectorRole) step(ctx context.Context, rank int, args actors.Args) (any, error) {
	part, err := first(args)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.parts[rank] = part
	r.called = append(r.called, rank)
	if call, _ := actors.Current(ctx); !call.NoData {
		r.data = append(r.data, rank)
	}
	return r.answer(r.mesh, rank, part), nil
}

func (r *vectorRole) outcome() outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.Sort(r.called)
	slices.Sort(r.data)
	return outcome{parts: r.parts, called: r.called, data: r.data}
}

// TestPlanVectors evaluates each case with package plan alone.
func TestPlanVectors(t *testing.T) {
	for _, v := range readVectors(t) {
		t.Run(v.Name, func(t *testing.T) {
			got, err := v.plan()
			v.check(t, got, err)
		})
	}
}

func (v vector) plan() (outcome, error) {
	mesh, err := v.Mesh.Resolve(v.World)
	if err != nil {
		return outcome{}, err
	}
	p, err := plan.NewPlan(Mode(v.Mode), mesh)
	if err != nil {
		return outcome{}, err
	}
	shards, err := p.Cut([]any{v.Input}, Options{})
	if err != nil {
		return outcome{}, err
	}
	o := outcome{parts: make([]any, v.World), collect: shards.Plan.Collect}
	for _, part := range shards.Plan.Parts {
		for _, rank := range part.Ranks {
			o.parts[rank] = shards.Args(part)[0]
			o.called = append(o.called, rank)
			if part.Shard != plan.NoData {
				o.data = append(o.data, rank)
			}
		}
	}
	slices.Sort(o.data)
	var answers []any
	for _, rank := range shards.Plan.Collect {
		answers = append(answers, v.answer(mesh, rank, o.parts[rank]))
	}
	o.result, err = shards.Merge(answers)
	return o, err
}

// plain converts a value to what JSON decodes.
func plain[T any](t *testing.T, v T) T {
	text, err := json.Marshal(v)
	require.NoError(t, err)
	var out T
	require.NoError(t, json.Unmarshal(text, &out))
	return out
}
