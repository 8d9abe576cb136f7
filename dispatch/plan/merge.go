package plan

import (
	"maps"
	"reflect"
	"slices"
)

// Merge makes the result of a call from the answers of the ranks in Plan.Collect, in that order.
func (s *Shards) Merge(answers []any) (any, error) {
	if len(answers) != len(s.Plan.Collect) {
		return nil, joinError("%d answers for the %d collected ranks of %s", len(answers), len(s.Plan.Collect), s.Plan.Mode)
	}
	if s.mergeFunc != nil {
		return s.mergeFunc(s.Plan.Mesh, answers)
	}
	switch s.Plan.Result {
	case Single:
		return answers[0], nil
	case List:
		return answers, nil
	}
	return MergeRows(s, s.Plan.Collect, answers)
}

// HasMergeFunc reports whether a custom mode makes the result.
func (s *Shards) HasMergeFunc() bool { return s.mergeFunc != nil }

// MergeRows removes the padding from the answers of the ranks, which may be some of the collected ones, and joins them.
func MergeRows[R any](s *Shards, ranks []int, answers []R) (R, error) {
	trimmed := make([]R, len(answers))
	for i, answer := range answers {
		var err error
		if trimmed[i], err = Trim(s, ranks[i], answer); err != nil {
			return *new(R), err
		}
	}
	return Join(trimmed, s.meta)
}

// Trim removes the rows that belong to padding from one rank's answer. An answer without rows is unchanged; an answer
// whose number of rows differs from its input's is an error.
func Trim[R any](s *Shards, rank int, answer R) (R, error) {
	if s.Padding == 0 {
		return answer, nil
	}
	rows, ok, err := rowsOf(answer)
	if err != nil || !ok {
		return answer, err
	}
	size := (s.Rows + s.Padding) / s.Plan.Shards
	if rows.n != size {
		return answer, joinError("rank %d answered %d rows for its %d: padding can be trimmed only from one row a row", rank, rows.n, size)
	}
	realRows := s.Rows - size*s.Plan.Mesh.Coord(rank).DP
	return castTo[R](rows.slice(0, min(max(realRows, 0), size)))
}

// Join joins answers in order: rows (lists, tensors, batches, Joiners) are concatenated, and nil is no rows. Answers
// without rows become a list if R is any. A mixture is an error.
func Join[R any](answers []R, meta MetaPolicy) (R, error) {
	var withRows, without []any
	for i, answer := range answers {
		_, ok, err := rowsOf(answer)
		switch {
		case err != nil:
			return *new(R), joinError("answer %d: %w", i, err)
		case canJoin(answer, ok):
			withRows = append(withRows, answer)
		case any(answer) != nil:
			without = append(without, answer)
		}
	}
	switch {
	case len(withRows) == 0 && len(without) == 0:
		return *new(R), nil
	case len(withRows) == 0:
		return castTo[R](asList(answers))
	case len(without) > 0:
		return *new(R), joinError("%d answers are rows (%T) and %d are not (%T): they cannot be joined",
			len(withRows), withRows[0], len(without), without[0])
	}
	joined, err := joinRows(withRows, meta)
	if err != nil {
		return *new(R), err
	}
	return castTo[R](joined)
}

func asList[R any](answers []R) []any {
	list := make([]any, len(answers))
	for i, answer := range answers {
		list[i] = answer
	}
	return list
}

func castTo[R any](v any) (R, error) {
	r, ok := v.(R)
	if !ok {
		return r, joinError("answers of type %s cannot be joined into one: the result is of type %T", reflect.TypeFor[R](), v)
	}
	return r, nil
}

// MetaPolicy is how the metadata of several ranks is merged.
type MetaPolicy int

const (
	FirstWins      MetaPolicy = iota // the first rank that has the key wins
	RefuseConflict                   // a key with two values is an error
)

// MetricsKey is the metadata key of a map of measurements, which are collected from every rank and never conflict.
const MetricsKey = "metrics"

// MergeMeta merges the metadata of the ranks, in rank order. Under MetricsKey each measurement becomes the list of the
// ranks' values; lists are concatenated.
func MergeMeta(policy MetaPolicy, metas []map[string]any) (map[string]any, error) {
	out := map[string]any{}
	metrics := map[string]any{}
	for i, meta := range metas {
		for _, key := range slices.Sorted(maps.Keys(meta)) {
			value := meta[key]
			if key == MetricsKey {
				if err := addMetrics(metrics, value); err != nil {
					return nil, err
				}
				out[key] = metrics
				continue
			}
			first, taken := out[key]
			if taken && policy == RefuseConflict && !reflect.DeepEqual(first, value) {
				return nil, joinError("metadata %q differs: %v before, %v in answer %d", key, first, value, i)
			}
			if !taken {
				out[key] = value
			}
		}
	}
	return out, nil
}

func addMetrics(to map[string]any, from any) error {
	values, ok := from.(map[string]any)
	if !ok {
		return joinError("metadata %q must be a map of measurements, not of type %T", MetricsKey, from)
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		list, _ := to[name].([]any)
		if isList(values[name]) {
			v := reflect.ValueOf(values[name])
			for i := range v.Len() {
				list = append(list, v.Index(i).Interface())
			}
		} else {
			list = append(list, values[name])
		}
		to[name] = list
	}
	return nil
}
