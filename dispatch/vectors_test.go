package dispatch

import (
	"cmp"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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

// answer is what the test worker answers when it is called with part, or with nil for no data.
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

// outcome is what happened in one case.
type outcome struct {
	plan   *Plan
	parts  []any
	data   []int
	result any
}

func (v vector) run() (outcome, error) {
	mesh, err := v.Mesh.Resolve(v.World)
	if err != nil {
		return outcome{}, err
	}
	mode, err := ParseMode(v.Mode)
	if err != nil {
		return outcome{}, err
	}
	plan, err := NewPlan(mode, mesh)
	if err != nil {
		return outcome{}, err
	}
	shards, err := plan.Cut([]any{v.Input}, Options{})
	if err != nil {
		return outcome{}, err
	}
	o := outcome{plan: shards.Plan, parts: make([]any, v.World)}
	for _, part := range shards.Plan.Parts {
		for _, rank := range part.Ranks {
			o.parts[rank] = shards.Args(part)[0]
		}
	}
	for rank, part := range o.parts {
		if part != nil {
			o.data = append(o.data, rank)
		}
	}
	var answers []any
	for _, rank := range shards.Plan.Collect {
		answers = append(answers, v.answer(mesh, rank, o.parts[rank]))
	}
	o.result, err = shards.Merge(answers)
	return o, err
}

func TestPlanVectors(t *testing.T) {
	for _, v := range readVectors(t) {
		t.Run(v.Name, func(t *testing.T) {
			got, err := v.run()
			if v.Error != "" {
				assert.ErrorContains(t, err, v.Error)
				assert.ErrorIs(t, err, bus.ErrInvalid)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, v.Parts, got.parts)
			assert.Equal(t, v.Result, plain(t, got.result))
			if v.DataRanks != nil {
				assert.Equal(t, v.DataRanks, got.data)
			}
			if v.CollectRanks != nil {
				assert.Equal(t, v.CollectRanks, got.plan.Collect)
			}
		})
	}
}

// plain is a value as JSON would read it.
func plain(t *testing.T, v any) any {
	text, err := json.Marshal(v)
	require.NoError(t, err)
	var out any
	require.NoError(t, json.Unmarshal(text, &out))
	return out
}
