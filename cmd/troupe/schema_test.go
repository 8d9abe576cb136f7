package main

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/pipeline/spec"
)

// The JSON schema and the parser have the same fields.
func TestSchemaMatchesParser(t *testing.T) {
	text, err := os.ReadFile("../../docs/pipeline.schema.json")
	require.NoError(t, err)
	type object struct {
		Properties map[string]json.RawMessage `json:"properties"`
	}
	var schema struct {
		object
		Defs map[string]object `json:"$defs"`
	}
	require.NoError(t, json.Unmarshal(text, &schema))
	_, err = spec.ParseFile([]byte("nonsense: 1\nroles: {r: {nonsense: 1}}\nstreams: {s: {nonsense: 1}}\nstages: {g: {nonsense: 1}}\n"), nil)
	require.Error(t, err)
	for where, props := range map[string]map[string]json.RawMessage{
		"nonsense": schema.Properties, "roles.r.nonsense": schema.Defs["role"].Properties,
		"streams.s.nonsense": schema.Defs["stream"].Properties, "stages.g.nonsense": schema.Defs["stage"].Properties,
	} {
		var names []string
		for name := range props {
			names = append(names, name)
		}
		slices.Sort(names)
		require.Contains(t, err.Error(), where+": unknown field \"nonsense\"; it can have "+strings.Join(names, ", "))
	}
}

// The example file is valid.
func TestExampleFileIsValid(t *testing.T) {
	u := newShell(t)
	require.Contains(t, u.output("run", "../../examples/pipelines/words.yaml", "--check"), "no mistakes")
}
