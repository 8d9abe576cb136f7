package spec

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
)

func testClasses() []*actors.Class {
	type none struct{}
	k := actors.NewClass("scorer", func(context.Context, actors.Setup) (*none, error) { return &none{}, nil })
	actors.Method(k, "score", func(*none, context.Context, int) (int, error) { return 0, nil })
	return []*actors.Class{k.Class}
}

const goodFile = `name: rl
namespace: run
roles:
  reward: {class: scorer, world: 4, mesh: {tp: 2}, resources: {gpus: 0.5, cpus: 2, memory: 4GiB}, env: {A: b=c}, policy: restart_rank}
  learner:
    command: [python, learner.py]
streams:
  prompts: {items: 100, bytes: 64MiB, age: 10m, full: drop_oldest, priorities: 2}
  scored:
  done: {sink: true}
stages:
  reward: {role: reward, method: score, in: prompts, out: scored, in_flight: 4, order: key, sticky: true, stamp: true}
  train:
    role: learner
    method: train
    in: [scored]
    out: [done]
    group: {count: 16, every: 5s}
    stale: {bound: 1.5, then: requeue, to: prompts}
    advance: 0.25
    rounds: 3
`

func TestAFileIsRead(t *testing.T) {
	f, err := ParseFile([]byte(goodFile), testClasses())
	require.NoError(t, err)
	require.Equal(t, "run", f.Namespace)
	require.Equal(t, 4<<30, int(f.Roles[0].Resources.Memory))
	require.Equal(t, "b=c", f.Roles[0].Env["A"])
	require.Equal(t, []string{"python", "learner.py"}, f.Roles[1].Command)
	require.Equal(t, StreamSpec{Name: "prompts", Items: 100, Bytes: 64 << 20, Age: 10 * time.Minute, Full: DropOldest, Priorities: 2}, f.Spec.Streams[0])
	require.True(t, f.Spec.Stages[0].Ordered)
	require.Equal(t, VersionOf(1.5), f.Spec.Stages[1].Stale.Bound)
	require.Equal(t, &GroupSpec{Count: 16, Every: 5 * time.Second}, f.Spec.Stages[1].Group)
}

// Every mistake is reported with its line and a remedy, and none hides another.
func TestMistakesInAFile(t *testing.T) {
	for name, c := range map[string]struct{ old, new, want string }{
		"unknown field":           {"items: 100,", "itmes: 100,", `line 8: streams.prompts.itmes: unknown field "itmes"; it can have age, bytes, full, items, priorities, sink (did you mean items?)`},
		"bound of zero":           {"items: 100,", "items: 0,", "line 8: streams.prompts.items: a bound of zero admits nothing; leave it out for 10000 items"},
		"bytes of zero":           {"bytes: 64MiB", "bytes: 0", "line 8: streams.prompts.bytes: a bound of zero admits nothing; leave it out for 256MiB"},
		"age of zero":             {"age: 10m", "age: 0s", "line 8: streams.prompts.age: a bound of zero admits nothing; leave it out for none"},
		"not a number":            {"items: 100,", "items: many,", `line 8: streams.prompts.items: expected a whole number, got "many"; write a number such as 100`},
		"time without unit":       {"age: 10m", "age: 10", `line 8: streams.prompts.age: expected a duration, got "10"; write a number with its unit`},
		"a stage with no role":    {"    role: learner\n", "", "line 13: stages.train.role: the stage has no role; name the role that handles the items"},
		"an unknown role":         {"role: learner", "role: lerner", `line 14: stages.train.role: there is no role "lerner"; declare it under roles, before the stages (did you mean learner?)`},
		"an unknown stream":       {"out: scored,", "out: scores,", `line 12: stages.reward.out: there is no stream "scores"; declare it under streams (did you mean scored?)`},
		"a stream no stage reads": {"done: {sink: true}", "done:", "line 10: streams.done: no stage reads the stream; name it in a stage's in, or mark it as sink: true"},
		"a cycle without bound":   {"    rounds: 3\n", "", "line 12: stages.reward: a cycle without a bound: reward → train → reward; give one of them rounds"},
		"rounds of zero":          {"rounds: 3", "rounds: 0", "line 21: stages.train.rounds: a bound of zero"},
		"an unknown class":        {"class: scorer", "class: scorrer", `line 4: roles.reward.class: there is no class "scorrer"; this program has scorer (did you mean scorer?)`},
		"an unknown method":       {"method: score,", "method: scroe,", `line 12: stages.reward.method: class scorer has no method "scroe"; it has score (did you mean score?)`},
		"no class, no command":    {"    command: [python, learner.py]\n", "", "line 5: roles.learner: role learner has neither a class nor a command; give class, python, function or command"},
		"two classes":             {"    command: [python, learner.py]\n", "    class: a\n    python: m.Learner\n", "roles.learner.python: role learner has a class a and a Python class m.Learner; keep one of them"},
		"no Python class":         {"    command: [python, learner.py]\n", "    python: Learner\n", "line 6: roles.learner.python: \"Learner\" is not the path of a Python class; write it as package.module.Class"},
		"a mesh that is wrong":    {"mesh: {tp: 2}", "mesh: {tp: 3}", "line 4: roles.reward.mesh:"},
		"an unknown policy":       {"restart_rank", "restart", `line 4: roles.reward.policy: "restart" is none of them; give fail, restart_rank, restart_role, ignore`},
		"an unknown rule":         {"drop_oldest", "drop_olest", `(did you mean drop_oldest?)`},
		"given twice":             {"  scored:\n", "  scored:\n  prompts:\n", "line 10: streams.prompts: given twice, first in line 8; keep one"},
		"no name":                 {"name: rl\n", "", "line 1: name: the pipeline has no name"},
		"stale without a bound":   {"bound: 1.5, ", "", "line 19: stages.train.stale: the staleness rule has no bound"},
		"broken yaml":             {"stages:\n", "stages: [\n", "line "},
		"a group without rule":    {"{count: 16, every: 5s}", "{late: done}", "line 18: stages.train.group: the group has no rule; give first, count or every"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Contains(t, goodFile, c.old)
			_, err := ParseFile([]byte(strings.Replace(goodFile, c.old, c.new, 1)), testClasses())
			require.Error(t, err)
			require.ErrorIs(t, err, bus.ErrInvalid)
			require.ErrorContains(t, err, c.want)
			var spec *SpecError
			require.True(t, errors.As(err, &spec))
			for _, p := range spec.Problems {
				require.Positive(t, p.Line, p)
			}
		})
	}
	bad := strings.NewReplacer("items: 100", "items: 0", "class: scorer", "class: nobody", "method: train", "methd: train").Replace(goodFile)
	_, err := ParseFile([]byte(bad), testClasses())
	require.ErrorContains(t, err, "4 mistakes", "an unknown class, a bound of zero, an unknown field, and no method")
}

// A role may be a function: its stages need no method, and its items can be aborted.
func TestFileFunctions(t *testing.T) {
	t.Parallel()
	f, err := ParseFile([]byte(`
name: f
roles:
  double: {function: lines.double, world: 2}
streams: {in: {}, mid: {}, last: {}}
stages:
  value: {role: double, in: in, out: mid}
  item: {role: double, style: item, in: mid, out: last}
  last: {role: double, in: last}
`), nil)
	require.NoError(t, err)
	require.Equal(t, []string{"python3", "-m", "troupe.worker"}, f.Roles[0].Command)
	var methods []string
	for _, s := range f.Spec.Stages {
		methods = append(methods, s.Method)
		require.Equal(t, Items, s.Style)
		require.Equal(t, "abort", s.AbortMethod)
	}
	require.Equal(t, []string{"call", "call_item", "call_last"}, methods)
}

func TestFileFunctionMistakes(t *testing.T) {
	t.Parallel()
	_, err := ParseFile([]byte(`
name: f
roles:
  a: {function: double}
  b: {function: lines.double, python: lines.Double}
  c: {function: lines.double, config: {by: 3}}
  d: {function: lines.double}
streams: {in: {}}
stages:
  value: {role: d, method: double, in: in}
`), nil)
	for _, want := range []string{
		`line 4: roles.a.function: "double" is not the path of a Python function; write it as package.module.function`,
		`line 5: roles.b.function: role b has a class lines.Double and a function lines.double; keep one of them`,
		`line 6: roles.c.config: role c is a function, which has no configuration`,
		`line 10: stages.value.method: role d is a function, which has no methods; leave it out`,
	} {
		require.ErrorContains(t, err, want)
	}
}
