package spec

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
)

// File is a run declared in YAML: roles, streams and stages.
type File struct {
	Namespace string
	Roles     []RoleSpec
	Spec      Spec
}

// RoleSpec declares a role in a file.
type RoleSpec struct {
	Name      string
	Class     string   // a class of this program, or of the command; zero: the role's name
	Python    string   // instead of Class: path of a Python class, such as package.module.Class
	Function  string   // instead of Class: path of a Python function, such as package.module.function
	Command   []string // program of the workers; zero: goroutines, or the agent's own program if they need resources
	World     int
	Mesh      dispatch.Mesh
	Resources Resources
	Env       map[string]string
	Policy    string // fail, restart_rank, restart_role or ignore; zero: fail
	Config    any
}

// Resources is what one worker needs.
type Resources struct {
	GPUs   float64
	CPUs   float64
	Memory int64
}

var policies = []string{"fail", "restart_rank", "restart_role", "ignore"}

// ParseFile parses and checks a file. classes are the classes of the program. The error is a *SpecError with all
// mistakes and their lines.
func ParseFile(text []byte, classes []*actors.Class) (File, error) {
	d := &decoder{lines: map[string]int{}, classes: classes}
	var root yaml.Node
	if err := yaml.Unmarshal(text, &root); err != nil {
		return File{}, syntaxError(err)
	}
	if len(root.Content) == 0 {
		return File{}, &SpecError{[]Problem{{Where: "file", Line: 1, What: "the file is empty", Try: "declare name, roles, streams and stages"}}}
	}
	d.file(root.Content[0])
	d.check()
	if len(d.problems) > 0 {
		slices.SortStableFunc(d.problems, func(a, b Problem) int { return a.Line - b.Line })
		return File{}, &SpecError{d.problems}
	}
	return d.out, nil
}

var yamlLine = regexp.MustCompile(`line (\d+): (.*)`)

func syntaxError(err error) error {
	p := Problem{Where: "file", Line: 1, What: strings.TrimPrefix(err.Error(), "yaml: "), Try: "check the indentation and the quotes there"}
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		p.Line, _ = strconv.Atoi(m[1])
		p.What = m[2]
	}
	return &SpecError{[]Problem{p}}
}

// decoder decodes a file node by node, so that every mistake is reported with its line and none hides another.
type decoder struct {
	out      File
	lines    map[string]int // line of every path that was decoded
	problems []Problem
	classes  []*actors.Class
}

func (d *decoder) bad(n *yaml.Node, at, try, format string, args ...any) {
	d.problems = append(d.problems, Problem{Where: at, Line: n.Line, What: fmt.Sprintf(format, args...), Try: try})
}

// fields maps the name of a field to its decoder.
type fields map[string]func(at string, n *yaml.Node)

// mapping decodes the fields of n; an unknown field is a mistake.
func (d *decoder) mapping(at string, n *yaml.Node, known fields) {
	d.each(at, n, func(name, at string, key, value *yaml.Node) {
		read, ok := known[name]
		if !ok {
			names := slices.Sorted(maps.Keys(known))
			d.bad(key, at, "it can have "+strings.Join(names, ", ")+Suggest(name, names...), "unknown field %q", name)
			return
		}
		read(at, value)
	})
}

// each visits the pairs of a mapping.
func (d *decoder) each(at string, n *yaml.Node, do func(name, at string, key, value *yaml.Node)) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return
	}
	if n.Kind != yaml.MappingNode {
		d.bad(n, at, "write it as name: value lines", "expected fields, got %s", kindOf(n))
		return
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		where := join(at, key.Value)
		if line, twice := seen[key.Value]; twice {
			d.bad(key, where, "keep one", "given twice, first in line %d", line)
			continue
		}
		seen[key.Value] = key.Line
		d.lines[where] = key.Line
		do(key.Value, where, key, value)
	}
}

func join(at, name string) string {
	if at == "" {
		return name
	}
	return at + "." + name
}

func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.SequenceNode:
		return "a list"
	case yaml.MappingNode:
		return "fields"
	}
	return fmt.Sprintf("%q", n.Value)
}

func (d *decoder) file(n *yaml.Node) {
	d.mapping("", n, fields{
		"name":      d.text(&d.out.Spec.Name),
		"namespace": d.text(&d.out.Namespace),
		"replicas":  d.count(&d.out.Spec.Replicas),
		"roles":     d.roles,
		"streams":   d.streams,
		"stages":    d.stages,
	})
	if d.out.Spec.Name == "" {
		d.bad(n, "name", "add a line such as name: rl", "the pipeline has no name")
	}
}

func (d *decoder) roles(at string, n *yaml.Node) {
	d.each(at, n, func(name, at string, _, value *yaml.Node) {
		r := RoleSpec{Name: name, World: 1, Policy: "fail"}
		d.mapping(at, value, fields{
			"class": d.text(&r.Class), "python": d.text(&r.Python), "function": d.text(&r.Function), "command": d.words(&r.Command), "world": d.count(&r.World),
			"mesh": func(at string, n *yaml.Node) {
				d.mapping(at, n, fields{"dp": d.count(&r.Mesh.DP), "tp": d.count(&r.Mesh.TP), "pp": d.count(&r.Mesh.PP), "cp": d.count(&r.Mesh.CP)})
			},
			"resources": func(at string, n *yaml.Node) {
				d.mapping(at, n, fields{"gpus": d.number(&r.Resources.GPUs), "cpus": d.number(&r.Resources.CPUs), "memory": d.bytes(&r.Resources.Memory)})
			},
			"env": func(at string, n *yaml.Node) {
				r.Env = map[string]string{}
				d.each(at, n, func(name, at string, _, value *yaml.Node) {
					var text string
					d.text(&text)(at, value)
					r.Env[name] = text
				})
			},
			"policy": d.oneOf(&r.Policy, policies...),
			"config": func(at string, n *yaml.Node) {
				if err := n.Decode(&r.Config); err != nil {
					d.bad(n, at, "give plain values", "%v", err)
				}
			},
		})
		if r.Python+r.Function != "" && len(r.Command) == 0 {
			r.Command = []string{"python3", "-m", "troupe.worker"}
		}
		d.role(value, at, r)
		d.out.Roles = append(d.out.Roles, r)
	})
}

var pythonPath = regexp.MustCompile(`^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$`)

// role checks the fields of one role together.
func (d *decoder) role(n *yaml.Node, at string, r RoleSpec) {
	if err := bus.CheckRoleName(r.Name); err != nil {
		d.bad(n, at, "", "%v", err)
	}
	switch {
	case r.Class == "" && len(r.Command) == 0:
		d.bad(n, at, "give class, python, function or command", "role %s has neither a class nor a command", r.Name)
	case r.Python != "" && r.Class != "":
		d.at(at+".python", n, "keep one of them", "role %s has a class %s and a Python class %s", r.Name, r.Class, r.Python)
	case r.Function != "" && r.Class+r.Python != "":
		d.at(at+".function", n, "keep one of them", "role %s has a class %s and a function %s", r.Name, r.Class+r.Python, r.Function)
	case r.Function != "" && !pythonPath.MatchString(r.Function):
		d.at(at+".function", n, "write it as package.module.function", "%q is not the path of a Python function", r.Function)
	case r.Function != "" && r.Config != nil:
		d.at(at+".config", n, "write a class with a method, or read env", "role %s is a function, which has no configuration", r.Name)
	case r.Python != "" && !pythonPath.MatchString(r.Python):
		d.at(at+".python", n, "write it as package.module.Class", "%q is not the path of a Python class", r.Python)
	case len(r.Command) == 0 && d.class(r.Class) == nil:
		var names []string
		for _, c := range d.classes {
			names = append(names, c.Name)
		}
		d.at(at+".class", n, "this program has "+strings.Join(names, ", ")+Suggest(r.Class, names...), "there is no class %q", r.Class)
	}
	if _, err := r.Mesh.Resolve(r.World); err != nil && r.World > 0 {
		d.at(at+".mesh", n, "the axes must divide the world", "%v", err)
	}
}

// at reports a mistake at the line of a field, or of its parent.
func (d *decoder) at(where string, n *yaml.Node, try, format string, args ...any) {
	line := n.Line
	if l := d.lines[where]; l > 0 {
		line = l
	}
	d.problems = append(d.problems, Problem{Where: where, Line: line, What: fmt.Sprintf(format, args...), Try: try})
}

func (d *decoder) class(name string) *actors.Class {
	for _, c := range d.classes {
		if c.Name == name {
			return c
		}
	}
	return nil
}

func (d *decoder) streams(at string, n *yaml.Node) {
	d.each(at, n, func(name, at string, _, value *yaml.Node) {
		s := StreamSpec{Name: name}
		full := ""
		d.mapping(at, value, fields{
			"items": d.bound(&s.Items, "10000 items"), "bytes": d.boundBytes(&s.Bytes), "age": d.duration(&s.Age), "priorities": d.count(&s.Priorities),
			"full": d.oneOf(&full, string(Block), string(Refuse), string(DropOldest)), "sink": d.flag(&s.Sink),
		})
		s.Full = FullPolicy(full)
		d.out.Spec.Streams = append(d.out.Spec.Streams, s)
	})
}

func (d *decoder) stages(at string, n *yaml.Node) {
	d.each(at, n, func(name, at string, _, value *yaml.Node) {
		s := StageSpec{Name: name}
		style, order := "", ""
		d.mapping(at, value, fields{
			"in": d.words(&s.In), "out": d.words(&s.Out), "role": d.text(&s.Role), "method": d.text(&s.Method), "abort": d.text(&s.AbortMethod),
			"style": d.oneOf(&style, string(Bodies), string(Items)), "workers": d.count(&s.Workers), "in_flight": d.count(&s.InFlight),
			"timeout": d.duration(&s.Timeout), "order": d.oneOf(&order, "key", "none"), "sticky": d.flag(&s.Sticky), "stamp": d.flag(&s.Stamp),
			"advance": d.version(&s.Advance), "failures": d.count(&s.Failures), "losses": d.count(&s.Losses), "backoff": d.duration(&s.Backoff),
			"rounds": d.bound(&s.Rounds, "none"),
			"group":  func(at string, n *yaml.Node) { s.Group = d.group(at, n) },
			"stale":  func(at string, n *yaml.Node) { s.Stale = d.stale(at, n) },
		})
		s.Style, s.Ordered = Style(style), order == "key"
		d.stage(value, at, &s)
		d.out.Spec.Stages = append(d.out.Spec.Stages, s)
	})
}

func (d *decoder) group(at string, n *yaml.Node) *GroupSpec {
	g := &GroupSpec{}
	d.mapping(at, n, fields{
		"first": d.bound(&g.First, "none"), "count": d.bound(&g.Count, "none"), "every": d.duration(&g.Every), "late": d.text(&g.Late), "remember": d.duration(&g.Remember),
	})
	return g
}

func (d *decoder) stale(at string, n *yaml.Node) *StaleSpec {
	s := &StaleSpec{}
	then := ""
	d.mapping(at, n, fields{"bound": d.version(&s.Bound), "then": d.oneOf(&then, string(Drop), string(Requeue), string(HandOver)), "to": d.text(&s.To)})
	s.Then = StalePolicy(then)
	if d.lines[at+".bound"] == 0 {
		d.bad(n, at, "add bound: how far behind the current version an item may be", "the staleness rule has no bound")
	}
	return s
}

// stage checks a stage against the roles.
func (d *decoder) stage(n *yaml.Node, at string, s *StageSpec) {
	if s.Role == "" {
		return // reported by checker
	}
	i := slices.IndexFunc(d.out.Roles, func(r RoleSpec) bool { return r.Name == s.Role })
	if i < 0 {
		var names []string
		for _, r := range d.out.Roles {
			names = append(names, r.Name)
		}
		d.at(at+".role", n, "declare it under roles, before the stages"+Suggest(s.Role, names...), "there is no role %q", s.Role)
		return
	}
	if d.out.Roles[i].Function != "" {
		d.function(n, at, s)
	}
	if len(d.out.Roles[i].Command) > 0 {
		return // its methods are known when it runs
	}
	c := d.class(d.out.Roles[i].Class)
	for field, method := range map[string]string{"method": s.Method, "abort": s.AbortMethod} {
		if c == nil || c.Open || method == "" {
			continue
		}
		var names []string
		for _, m := range c.Methods {
			names = append(names, m.Name)
		}
		if !slices.Contains(names, method) {
			d.at(at+"."+field, n, "it has "+strings.Join(names, ", ")+Suggest(method, names...), "class %s has no method %q", c.Name, method)
		}
	}
}

// Methods of a role that is a function, as troupe.worker implements them. All of them take items, so that an item can
// be aborted by its id.
const (
	functionItem  = "call_item" // the function takes and returns items
	functionValue = "call"      // the function takes and returns values
	functionLast  = "call_last" // as call, for a stage without outputs: the returned value is dropped
	functionAbort = "abort"
)

// function makes a stage call a role that is a function.
func (d *decoder) function(n *yaml.Node, at string, s *StageSpec) {
	for field, method := range map[string]string{"method": s.Method, "abort": s.AbortMethod} {
		if method != "" {
			d.at(at+"."+field, n, "leave it out", "role %s is a function, which has no methods", s.Role)
		}
	}
	s.Method, s.AbortMethod = functionValue, functionAbort
	switch {
	case s.Style == Items:
		s.Method = functionItem
	case len(s.Out) == 0:
		s.Method = functionLast
	}
	s.Style = Items
}

// check runs the checks of the whole declaration and adds the line of each mistake.
func (d *decoder) check() {
	c := &checker{spec: d.out.Spec, declared: true}
	c.all()
	for _, p := range c.problems {
		if p.Where == "name" && d.out.Spec.Name == "" {
			continue // reported before
		}
		for at := p.Where; p.Line == 0 && at != ""; {
			p.Line = d.lines[at]
			cut := strings.LastIndexByte(at, '.')
			at = at[:max(cut, 0)]
		}
		p.Line = max(p.Line, 1)
		d.problems = append(d.problems, p)
	}
}

// Decoders of scalars.

func (d *decoder) text(to *string) func(string, *yaml.Node) {
	return func(at string, n *yaml.Node) {
		if n.Kind != yaml.ScalarNode {
			d.bad(n, at, "write one word", "expected a text, got %s", kindOf(n))
			return
		}
		*to = n.Value
	}
}

func (d *decoder) words(to *[]string) func(string, *yaml.Node) {
	return func(at string, n *yaml.Node) {
		if n.Kind == yaml.ScalarNode {
			*to = []string{n.Value}
			return
		}
		if err := n.Decode(to); err != nil {
			d.bad(n, at, "write one word, or [several, of, them]", "expected a list of words, got %s", kindOf(n))
		}
	}
}

func (d *decoder) flag(to *bool) func(string, *yaml.Node) {
	return func(at string, n *yaml.Node) {
		if err := n.Decode(to); err != nil {
			d.bad(n, at, "write true or false", "%s is neither true nor false", kindOf(n))
		}
	}
}

// count decodes a whole number from 1.
func (d *decoder) count(to *int) func(string, *yaml.Node) { return d.bound(to, "the default") }

func (d *decoder) bound(to *int, without string) func(string, *yaml.Node) {
	return func(at string, n *yaml.Node) {
		v, err := strconv.Atoi(n.Value)
		switch {
		case n.Kind != yaml.ScalarNode || err != nil:
			d.bad(n, at, "write a number such as 100", "expected a whole number, got %s", kindOf(n))
		case v == 0:
			d.bad(n, at, "leave it out for "+without, "a bound of zero admits nothing")
		case v < 0:
			d.bad(n, at, "leave it out for "+without, "%d is negative", v)
		default:
			*to = v
		}
	}
}

func (d *decoder) number(to *float64) func(string, *yaml.Node) {
	return func(at string, n *yaml.Node) {
		v, err := strconv.ParseFloat(n.Value, 64)
		if n.Kind != yaml.ScalarNode || err != nil || v < 0 {
			d.bad(n, at, "write a number such as 1 or 0.5", "expected a number, got %s", kindOf(n))
			return
		}
		*to = v
	}
}

func (d *decoder) version(to *Version) func(string, *yaml.Node) {
	return func(at string, n *yaml.Node) {
		var v float64
		d.number(&v)(at, n)
		*to = VersionOf(v)
	}
}

func (d *decoder) duration(to *time.Duration) func(string, *yaml.Node) {
	return func(at string, n *yaml.Node) {
		v, err := time.ParseDuration(n.Value)
		switch {
		case n.Kind != yaml.ScalarNode || err != nil:
			d.bad(n, at, "write a number with its unit, such as 500ms, 30s or 10m", "expected a duration, got %s", kindOf(n))
		case v <= 0:
			d.bad(n, at, "leave it out for none", "a bound of zero admits nothing")
		default:
			*to = v
		}
	}
}

func (d *decoder) bytes(to *int64) func(string, *yaml.Node) {
	return func(at string, n *yaml.Node) {
		v, err := parseBytes(n.Value)
		if n.Kind != yaml.ScalarNode || err != nil {
			d.bad(n, at, "write a number of bytes, or one with KiB, MiB or GiB", "expected a size, got %s", kindOf(n))
			return
		}
		*to = v
	}
}

func (d *decoder) boundBytes(to *int64) func(string, *yaml.Node) {
	return func(at string, n *yaml.Node) {
		before := len(d.problems)
		d.bytes(to)(at, n)
		if len(d.problems) == before && *to <= 0 {
			d.bad(n, at, "leave it out for 256MiB", "a bound of zero admits nothing")
		}
	}
}

func (d *decoder) oneOf(to *string, words ...string) func(string, *yaml.Node) {
	return func(at string, n *yaml.Node) {
		if n.Kind != yaml.ScalarNode || !slices.Contains(words, n.Value) {
			d.bad(n, at, "give "+strings.Join(words, ", ")+Suggest(n.Value, words...), "%s is none of them", kindOf(n))
			return
		}
		*to = n.Value
	}
}

var errBytes = errors.New("no size")

func parseBytes(text string) (int64, error) {
	units := []struct {
		name string
		n    float64
	}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"B", 1}, {"", 1}}
	for _, u := range units {
		number, ok := strings.CutSuffix(strings.TrimSpace(text), u.name)
		if !ok {
			continue
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		if err != nil || v < 0 || v*u.n > 1<<60 {
			return 0, errBytes
		}
		return int64(v * u.n), nil
	}
	return 0, errBytes
}
