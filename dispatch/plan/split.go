package plan

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"troupe/bus/wire"
)

// Splitter is an argument that DP modes cut along its rows. Slice returns rows i to j, with 0 ≤ i ≤ j ≤ Len; it may
// share memory with the whole.
type Splitter interface {
	Len() int
	Slice(i, j int) any
}

// Headed is a Splitter with metadata for ranks that get no rows: they get Head in its place. For other cut values they
// get nil.
type Headed interface {
	Head() any
}

// Split marks an argument to be cut along its first axis: a list, a tensor, a Batch or a Splitter.
func Split(v any) any { return marked{split, v} }

// Broadcast marks an argument that every called rank gets whole.
func Broadcast(v any) any { return marked{broadcast, v} }

// Scatter marks a list with one element for each shard: for each rank in AllToAll, for each data-parallel rank in the
// DP modes. Each receiver gets its element.
func Scatter(list any) any { return marked{scatter, list} }

// MapArg replaces the value of an argument and keeps its mark.
func MapArg(v any, f func(any) (any, error)) (any, error) {
	m, ok := v.(marked)
	if !ok {
		return f(v)
	}
	value, err := f(m.value)
	return marked{m.mark, value}, err
}

type marked struct {
	mark  mark
	value any
}

type mark string

const (
	unmarked  mark = ""
	broadcast mark = "broadcast"
	split     mark = "split"
	scatter   mark = "scatter"
)

// defaultMark is the mark of an unmarked argument. It depends on the type, never on the length.
func (s splitKind) defaultMark(hasRows bool) mark {
	switch {
	case s == splitByRank:
		return scatter
	case s == splitByDP && hasRows:
		return split
	}
	return broadcast
}

// Options are optional settings of one call.
type Options struct {
	// Pad repeats rows, from the first on, until they divide evenly; the answers are trimmed again. Without it the
	// first replicas have one row more. The cost is the work on the added rows.
	Pad bool
	// Meta is how the metadata of several batches is merged. Zero: FirstWins.
	Meta MetaPolicy
}

// Shards are the arguments of one call, cut for its plan.
type Shards struct {
	// Plan is the plan to send: the given one, or its Unsplit when no argument was cut.
	Plan *Plan
	// Rows is the number of rows that were cut, without padding.
	Rows int
	// Padding is the number of added rows.
	Padding int

	args      [][]any // by shard
	others    []any   // arguments of the ranks without data
	shared    []bool  // by argument: it is the same in every part
	meta      MetaPolicy
	mergeFunc func(Mesh, []any) (any, error)
}

// Args are the arguments of a part's ranks.
func (s *Shards) Args(p Part) []any {
	if p.Shard == NoData {
		return s.others
	}
	return s.args[p.Shard]
}

// Shared reports whether argument i, from 0, is the same in every part, so that it needs to be encoded only once.
func (s *Shards) Shared(i int) bool { return i < len(s.shared) && s.shared[i] }

// Sizes divides n rows evenly: the first n mod parts parts have one row more.
func Sizes(n, parts int) []int {
	sizes := make([]int, parts)
	for i := range sizes {
		sizes[i] = n / parts
		if i < n%parts {
			sizes[i]++
		}
	}
	return sizes
}

// Cut cuts the arguments of a call. Unmarked lists (slices and arrays, except of bytes), tensors, batches and Splitters
// are split in the DP modes, and an unmarked map whose tensors all have the same number of rows is refused there; in
// AllToAll every unmarked argument must be a list with one element for each rank; all other arguments are broadcast.
func (p *Plan) Cut(values []any, opt Options) (*Shards, error) { return p.CutNamed(values, nil, opt) }

// CutNamed is Cut for a call whose last arguments have these names.
func (p *Plan) CutNamed(values []any, names []string, opt Options) (*Shards, error) {
	r, err := ruleOf(p.Mode)
	if err != nil {
		return nil, err
	}
	if r.split == splitNone && !opt.Pad && !slices.ContainsFunc(values, mayNeedCut) {
		return &Shards{Plan: p.Unsplit(), meta: opt.Meta, args: [][]any{values}, others: values}, nil
	}
	args := make([]arg, len(values))
	for i, v := range values {
		if args[i], err = newArg(r, argPosition{i, len(values), names}, v); err != nil {
			return nil, err
		}
	}
	s := &Shards{Plan: p, meta: opt.Meta, args: make([][]any, p.Shards)}
	if s.Rows, err = commonRows(args); err != nil {
		return nil, err
	}
	if opt.Pad && s.Rows > 0 {
		if p.Result != Rows {
			return nil, invalid("%s gives one answer a rank: padding could not be trimmed from it again", p.Mode)
		}
		s.Padding = (p.Shards - s.Rows%p.Shards) % p.Shards
	}
	if err := s.addArgs(r, args); err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(args, func(a arg) bool { return a.mark != broadcast }) {
		s.Plan, s.args = p.Unsplit(), s.args[:1]
	}
	return s, nil
}

// mayNeedCut reports whether a value may have rows or a mark.
func mayNeedCut(v any) bool {
	switch v.(type) {
	case nil, bool, int, int32, int64, uint32, uint64, float32, float64, string, []byte:
		return false
	}
	return true
}

// addArgs adds every argument to every shard.
func (s *Shards) addArgs(r rule, args []arg) error {
	for _, a := range args {
		pieces, err := a.pieces(r.split, len(s.args), s.Rows+s.Padding)
		if err != nil {
			return err
		}
		for i, piece := range pieces {
			s.args[i] = append(s.args[i], piece)
		}
		s.others = append(s.others, a.head())
		s.shared = append(s.shared, a.mark == broadcast)
	}
	return nil
}

// ArgName is the name of argument i of n in messages: its own name if it is one of the last, which names has, or else its
// number from 1.
func ArgName(i, n int, names []string) string { return argPosition{i, n, names}.String() }

// argPosition is the position of an argument in a call whose last arguments are named.
type argPosition struct {
	i, n  int
	names []string
}

// String is the argument's name in messages.
func (p argPosition) String() string {
	if named := p.i - (p.n - len(p.names)); named >= 0 {
		return fmt.Sprintf("argument %q", p.names[named])
	}
	return fmt.Sprintf("argument %d", p.i+1)
}

// AddNamed appends named arguments, whole, to every part.
func (s *Shards) AddNamed(values []any, names []string) error {
	for i, v := range values {
		if m, ok := v.(marked); ok {
			if m.mark != broadcast {
				return invalid("argument %q is marked %s, but %s gives named arguments to every rank", names[i], m.mark, s.Plan.Mode)
			}
			values[i] = m.value
		}
	}
	for i := range s.args {
		s.args[i] = append(slices.Clip(s.args[i]), values...)
	}
	return nil
}

// arg is one argument and its mark.
type arg struct {
	position argPosition
	value    any
	mark     mark
	rows     rows // set if the value has rows
}

func newArg(r rule, at argPosition, v any) (arg, error) {
	a := arg{position: at, value: v}
	if m, ok := v.(marked); ok {
		a.mark, a.value = m.mark, m.value
	}
	if _, twice := a.value.(marked); twice {
		return a, invalid("%s is marked twice", at)
	}
	rows, hasRows, err := rowsOf(a.value)
	if err != nil {
		return a, invalid("%s: %w", at, err)
	}
	a.rows = rows
	if a.mark == unmarked {
		a.mark = r.split.defaultMark(hasRows)
		if r.split == splitByDP && !hasRows {
			if err := refuseRowsInside(at, a.value); err != nil {
				return a, err
			}
		}
	}
	switch {
	case a.mark != broadcast && r.split == splitNone:
		return a, invalid("%s is marked %s, but %s gives every rank the same arguments", at, a.mark, r.mode)
	case a.mark == split && !hasRows:
		return a, invalid("%s is marked split, but a value of type %T has no rows", at, a.value)
	}
	return a, nil
}

// refuseRowsInside refuses a map whose tensors all have the same number of rows: it may be a batch to be split, or
// weights for every rank.
func refuseRowsInside(at argPosition, v any) error {
	val := reflect.ValueOf(v)
	if val.Kind() != reflect.Map {
		return nil
	}
	tensors, rows := 0, 0
	for _, item := range val.Seq2() {
		t, ok := item.Interface().(wire.Tensor)
		if !ok {
			continue
		}
		if len(t.Shape) == 0 || tensors > 0 && t.Rows() != rows {
			return nil
		}
		tensors, rows = tensors+1, t.Rows()
	}
	if tensors == 0 {
		return nil
	}
	return invalid("%s is a %T whose tensors all have %d rows: Batch{Arrays: …} splits rows between the ranks, "+
		"Broadcast(value) gives every rank all of them; say which is meant", at, v, rows)
}

// commonRows returns the number of rows of the split arguments, which must be equal; 0 if there are none.
func commonRows(args []arg) (int, error) {
	var counts []string
	n, differ := 0, false
	for _, a := range args {
		if a.mark == split {
			differ = differ || len(counts) > 0 && a.rows.n != n
			n = a.rows.n
			counts = append(counts, fmt.Sprintf("%s has %d", a.position, n))
		}
	}
	if differ {
		return 0, invalid("split arguments must have the same number of rows: %s", strings.Join(counts, ", "))
	}
	return n, nil
}

// pieces cuts the argument into n pieces; padded is the number of rows with padding.
func (a arg) pieces(kind splitKind, n, padded int) ([]any, error) {
	switch a.mark {
	case split:
		return a.split(kind, n, padded)
	case scatter:
		return a.scatter(kind, n)
	}
	out := make([]any, n)
	for i := range out {
		out[i] = a.value
	}
	return out, nil
}

func (a arg) split(kind splitKind, n, padded int) ([]any, error) {
	if padded < n {
		remedy := ""
		if a.rows.n > 0 {
			remedy = "; Options{Pad: true} repeats rows until there is one for each, in modes that join rows"
		}
		return nil, invalid("fewer rows than %ss: %s has %d rows for %d %ss%s",
			kind.receiver(), a.position, a.rows.n, n, kind.receiver(), remedy)
	}
	out := make([]any, n)
	from := 0
	for i, size := range Sizes(padded, n) {
		piece, err := a.rows.sliceRepeated(from, from+size)
		if err != nil {
			return nil, invalid("pad %s: %w", a.position, err)
		}
		out[i] = piece
		from += size
	}
	return out, nil
}

func (a arg) scatter(kind splitKind, n int) ([]any, error) {
	rule := fmt.Sprintf("%s: the list must have one element a %s", a.position, kind.receiver())
	if !isList(a.value) {
		return nil, invalid("%s: it is no list but of type %T, and there are %d (mark it broadcast if all are to have it)", rule, a.value, n)
	}
	if a.rows.n != n {
		return nil, invalid("%s: it has %d, and there are %d", rule, a.rows.n, n)
	}
	list := reflect.ValueOf(a.value)
	out := make([]any, n)
	for i := range out {
		out[i] = list.Index(i).Interface()
	}
	return out, nil
}

// head is the argument of the ranks without data.
func (a arg) head() any {
	if a.mark == broadcast {
		return a.value
	}
	if h, ok := a.value.(Headed); ok && a.mark == split {
		return h.Head()
	}
	return nil
}
