package planner

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata")

// TestScripts runs the commands of testdata/*.txt and compares their output. A script consists of blocks: a command, a
// line "----" and the output, separated by empty lines.
func TestScripts(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	for _, path := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			got := runScript(t, string(text))
			if *update {
				require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
				return
			}
			require.Equal(t, string(text), got)
		})
	}
}

func runScript(t *testing.T, text string) string {
	s := &script{now: testNow}
	var out bytes.Buffer
	for i, block := range strings.Split(strings.TrimSpace(text), "\n\n") {
		if i > 0 {
			out.WriteString("\n")
		}
		head, _, _ := strings.Cut(block+"\n", "----\n")
		out.WriteString(head)
		if command := lastLine(head); !strings.HasPrefix(command, "#") {
			fmt.Fprintf(&out, "----\n%s", s.run(t, strings.Fields(command)))
		}
	}
	return out.String()
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

// script is the planner, the queue and the clock of a script.
type script struct {
	planner *Planner
	now     time.Time
	queue   []Queued
}

func (s *script) run(t *testing.T, words []string) string {
	if s.planner != nil {
		s.planner.Now = s.now
	}
	verb, args := words[0], words[1:]
	switch verb {
	case "nodes":
		return s.nodes(t, args)
	case "node":
		return s.node(t, args)
	case "remove":
		s.planner.RemoveNode(args[0])
		return s.show()
	case "wait":
		d, err := time.ParseDuration(args[0])
		require.NoError(t, err)
		s.now = s.now.Add(d)
		return s.now.Format(time.TimeOnly) + "\n"
	case "reserve", "explain":
		return s.plan(t, verb == "reserve", args)
	case "release":
		_, ok := s.planner.Release(args[0])
		return fmt.Sprintf("%v\n%s", ok, s.show())
	case "leaving":
		r, _ := s.planner.Release(args[0])
		r.Leaving = true
		require.NoError(t, s.planner.Grant(r))
		return "ok\n"
	case "queue":
		s.queue = append(s.queue, Queued{Request: parseRequest(t, args), Since: s.now})
		return fmt.Sprintf("%d waiting\n", len(s.queue))
	case "schedule":
		return s.schedule(t, args)
	case "show":
		return s.show()
	}
	t.Fatalf("unknown command %q", verb)
	return ""
}

// nodes NxD [numa=N] [islands=N] [cpus=N] [racks=N] makes a planner with equal nodes.
func (s *script) nodes(t *testing.T, args []string) string {
	var n, d int
	_, err := fmt.Sscanf(args[0], "%dx%d", &n, &d)
	require.NoError(t, err)
	options := map[string]int{"numa": 1, "islands": 1, "cpus": 8, "racks": 1}
	for _, arg := range args[1:] {
		key, value, _ := strings.Cut(arg, "=")
		options[key], err = strconv.Atoi(value)
		require.NoError(t, err)
	}
	nodes := simNodes(n, d)
	for i := range nodes {
		nodes[i].CPUs = Wholes(options["cpus"])
		nodes[i].Memory = 1 << 30
		nodes[i].Labels = map[string]string{"rack": fmt.Sprintf("r%d", i*options["racks"]/n)}
		for j := range nodes[i].Devices {
			nodes[i].Devices[j].NUMA = j * options["numa"] / d
			nodes[i].Devices[j].Island = j * options["islands"] / d
		}
	}
	s.planner, err = New(Snapshot{Now: s.now, Nodes: nodes})
	require.NoError(t, err)
	return s.show()
}

// node ID ready|lost|unproven|cordoned|cordoned=INDEX|unfit=INDEX|fit=INDEX [why…] changes a node.
func (s *script) node(t *testing.T, args []string) string {
	node := *s.planner.byID[args[0]].info
	node.Devices = slices.Clone(node.Devices)
	why := strings.Join(args[2:], " ")
	what, index, _ := strings.Cut(args[1], "=")
	switch what {
	case "ready":
		node.State, node.Cordoned, node.Why = NodeReady, "", ""
	case "lost", "unproven":
		node.State, node.Why, node.Since = NodeState(what), why, s.now
	case "cordoned":
		cordon := "by anna since " + s.now.Format("2006-01-02 15:04 MST")
		if why != "" {
			cordon += ": " + why
		}
		if index == "" {
			node.Cordoned = cordon
			break
		}
		i, err := strconv.Atoi(index)
		require.NoError(t, err)
		pos := slices.IndexFunc(node.Devices, func(d Device) bool { return d.Index == i })
		node.Devices[pos].Cordoned = cordon
	case "unfit", "fit":
		i, err := strconv.Atoi(index)
		require.NoError(t, err)
		pos := slices.IndexFunc(node.Devices, func(d Device) bool { return d.Index == i })
		node.Devices[pos].Unfit = why
	default:
		t.Fatalf("unknown change %q", args[1])
	}
	require.NoError(t, s.planner.SetNode(node))
	return s.show()
}

func (s *script) plan(t *testing.T, keep bool, args []string) string {
	r := parseRequest(t, args)
	plan, err := s.planner.Plan(r)
	if err != nil {
		return fmt.Sprintf("error: %v\n", err)
	}
	if !plan.Granted {
		return planText(plan)
	}
	if keep {
		require.NoError(t, s.planner.Grant(plan.Reservation(r, s.now)))
	}
	return planText(plan)
}

func planText(p Plan) string {
	var b strings.Builder
	switch {
	case p.Granted:
		fmt.Fprintf(&b, "granted%s\n%s", prefixed(", but ", p.Unmet), workersText(p.Workers))
	case p.Never:
		b.WriteString("never\n")
	default:
		b.WriteString("must wait\n")
	}
	for _, r := range p.Reasons {
		fmt.Fprintf(&b, "  %s [%s] %s\n", prefixed("", r.Node+":"), r.Code, r.Text)
	}
	for _, o := range p.WaitsFor {
		fmt.Fprintf(&b, "  waits for %s\n", o)
	}
	return b.String()
}

func prefixed(prefix, text string) string {
	if text == "" || text == ":" {
		return ""
	}
	return prefix + text
}

// workersText returns one line for each worker.
func workersText(workers []Worker) string {
	var b strings.Builder
	for _, w := range workers {
		fmt.Fprintf(&b, "  %s on %s", w.Name("w"), w.Node)
		for _, slot := range w.Slots {
			if slot.Node != w.Node {
				fmt.Fprintf(&b, " %s:%d", slot.Node, slot.Index)
			}
			if slot.Share != Whole {
				fmt.Fprintf(&b, " %s", slot.Share)
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}

// schedule [preempt] [quota=NAMESPACE:N] [depth=N] runs one pass over the queue and adds the grants.
func (s *script) schedule(t *testing.T, args []string) string {
	var policy Policy
	for _, arg := range args {
		key, value, _ := strings.Cut(arg, "=")
		switch key {
		case "preempt":
			policy.Preempt = true
		case "depth":
			policy.BackfillDepth, _ = strconv.Atoi(value)
		case "quota":
			namespace, n, _ := strings.Cut(value, ":")
			quota, err := ParseShare(n)
			require.NoError(t, err)
			policy.Quotas = map[string]Share{namespace: quota}
		}
	}
	return s.enter(t, s.planner.Schedule(s.queue, policy))
}

func (s *script) enter(t *testing.T, d Decision) string {
	var b strings.Builder
	for _, g := range d.Grants {
		require.NoError(t, s.planner.Grant(g.Reservation))
		fmt.Fprintf(&b, "%s granted%s\n%s", g.Reservation.ID, prefixed(", past ", g.BackfilledPast), workersText(g.Reservation.Workers))
	}
	for _, p := range d.Preemptions {
		fmt.Fprintf(&b, "%s sends away %s\n", p.For, strings.Join(p.Victims, ", "))
	}
	var left []string
	for _, w := range d.Waits {
		fmt.Fprintf(&b, "%s waits [%s] %s\n", w.ID, w.Code, w.Text)
		for _, o := range w.WaitsFor {
			fmt.Fprintf(&b, "  for %s\n", o)
		}
		left = append(left, w.ID)
	}
	for _, r := range d.Refusals {
		fmt.Fprintf(&b, "%s refused: %v\n", r.ID, r.Err)
	}
	s.queue = slices.DeleteFunc(s.queue, func(q Queued) bool { return !slices.Contains(left, q.Request.ID) })
	return b.String()
}

// show returns one line for each node: its devices, free (.), unfit (!), or the last letter of their holder.
func (s *script) show() string {
	var b strings.Builder
	for _, node := range s.planner.nodes {
		fmt.Fprintf(&b, "%s ", node.info.ID)
		for pos := range node.info.Devices {
			switch holders := node.holders(pos); {
			case len(holders) > 1:
				b.WriteString("*")
			case len(holders) == 1:
				b.WriteString(holders[0].ID[len(holders[0].ID)-1:])
			case !node.grantable.has(pos):
				b.WriteString("!")
			default:
				b.WriteString(".")
			}
		}
		if !node.open {
			fmt.Fprintf(&b, " %s", node.info.describeState())
		}
		b.WriteString("\n")
	}
	return b.String()
}

// parseRequest parses ID key=value…, with "+" before a further kind of bundle.
func parseRequest(t *testing.T, args []string) Request {
	r := Request{ID: args[0], Holder: "role_" + args[0]}
	count, bundle := 0, Bundle{}
	flush := func() {
		r.Bundles = append(r.Bundles, Repeat(count, bundle)...)
		count, bundle = 0, Bundle{}
	}
	for _, arg := range args[1:] {
		key, value, _ := strings.Cut(arg, "=")
		number, _ := strconv.Atoi(value)
		switch key {
		case "+":
			flush()
		case "bundles":
			count = number
		case "devices":
			bundle.Devices = parseTestShare(t, value)
		case "cpus":
			bundle.CPUs = parseTestShare(t, value)
		case "memory":
			bundle.Memory = int64(number)
		case "label":
			name, want, _ := strings.Cut(value, ":")
			bundle.Labels = map[string]string{name: want}
		case "node":
			bundle.Node = value
		case "spans":
			bundle.Spans = true
		default:
			r.parseOption(t, key, value, number)
		}
	}
	flush()
	return r
}

func (r *Request) parseOption(t *testing.T, key, value string, number int) {
	switch key {
	case "strategy":
		r.Strategy = Strategy(value)
	case "within":
		r.Topology.Within = Within(value)
	case "same":
		r.Topology.Label = value
	case "required":
		r.Topology.Required = true
	case "over":
		r.Colocate = value
	case "namespace":
		r.Namespace = value
	case "priority":
		r.Priority = number
	case "instances":
		r.PerInstance = number
	case "await":
		r.AwaitNodes = true
	case "world":
		r.mapping().World = number
	case "mapping":
		ids, err := ParseMapping(value)
		require.NoError(t, err)
		r.mapping().Devices = ids
	default:
		t.Fatalf("unknown option %q", key)
	}
}

func (r *Request) mapping() *Mapping {
	if r.Mapping == nil {
		r.Mapping = &Mapping{}
	}
	return r.Mapping
}

func parseTestShare(t *testing.T, text string) Share {
	if strings.HasPrefix(text, "-") {
		return -parseTestShare(t, text[1:])
	}
	s, err := ParseShare(text)
	require.NoError(t, err)
	return s
}
