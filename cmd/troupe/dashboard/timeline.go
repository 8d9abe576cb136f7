package dashboard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"troupe/actors/timeline"
	"troupe/bus"
	"troupe/nodes"
	"troupe/roles"
)

const (
	maxTimelineLast  = 10 * time.Minute
	maxTimelineRoles = 8
	// maxTimelineLanes and maxTimelineEvents bound what the page is sent; the newest events are kept.
	maxTimelineLanes  = 512
	maxTimelineEvents = 20_000
	inspectWait       = 5 * time.Second
	maxInspections    = 4 // timelines and stacks that are collected at a time
)

// timelineView is a timeline for the page: lanes and events as `troupe timeline` has them, without those that are too many.
type timelineView struct {
	*timeline.Timeline
	Lanes []timeline.Lane `json:"lanes"`
	Late  []timeline.Late `json:"late"`
	// OmittedLanes and OmittedEvents are left out here.
	OmittedLanes  int `json:"omitted_lanes"`
	OmittedEvents int `json:"omitted_events"`
}

// timeline collects the flight recorders of some roles, as `troupe timeline` does.
func (s *server) timeline(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	q := roles.TimelineQuery{Namespace: query.Get("namespace"), Roles: query["role"], Last: 10 * time.Second, Wait: 2 * time.Second}
	if text := query.Get("last"); text != "" {
		last, err := time.ParseDuration(text)
		if err != nil || last <= 0 || last > maxTimelineLast {
			http.Error(w, fmt.Sprintf("last %q: give a duration up to %s", text, maxTimelineLast), http.StatusBadRequest)
			return
		}
		q.Last = last
	}
	if len(q.Roles) == 0 || len(q.Roles) > maxTimelineRoles {
		http.Error(w, fmt.Sprintf("give role=NAME, up to %d times", maxTimelineRoles), http.StatusBadRequest)
		return
	}
	if err := checkRoles(q.Namespace, q.Roles...); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.inspect(w, r, func(ctx context.Context) (any, error) {
		var t *timeline.Timeline
		var err error
		if query.Get("failure") != "" {
			t, err = roles.FailureTimeline(ctx, s.Bus, q.Namespace, q.Roles[0])
		} else {
			t, err = roles.Timeline(ctx, s.Bus, q)
		}
		if err != nil {
			return nil, err
		}
		v := viewOf(t, maxTimelineLanes, maxTimelineEvents)
		if query.Get("late") != "" { // the judgement alone
			v.Lanes = []timeline.Lane{}
		}
		return v, nil
	})
}

func checkRoles(namespace string, names ...string) error {
	err := bus.CheckName("namespace", namespace)
	for _, name := range names {
		err = errors.Join(err, bus.CheckRoleName(name))
	}
	return err
}

// viewOf keeps the lanes of ranks that held others up, then processes, then ranks in order; and the newest events, the same number of
// each lane.
func viewOf(t *timeline.Timeline, maxLanes, maxEvents int) timelineView {
	v := timelineView{Timeline: t, Late: t.Late()}
	late := map[string]bool{}
	for _, l := range v.Late {
		late[fmt.Sprintf("%s/%d", l.Role, l.Rank)] = true
	}
	lanes := slices.Clone(t.Lanes)
	if len(lanes) > maxLanes {
		first := func(l timeline.Lane) int {
			switch {
			case late[fmt.Sprintf("%s/%d", l.Role, l.Rank)]:
				return 0
			case l.Role == "":
				return 1
			}
			return 2
		}
		slices.SortStableFunc(lanes, func(a, b timeline.Lane) int { return cmp.Compare(first(a), first(b)) })
		v.OmittedLanes = len(lanes) - maxLanes
		lanes = lanes[:maxLanes]
		slices.SortStableFunc(lanes, func(a, b timeline.Lane) int { return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Rank, b.Rank)) })
	}
	each := maxEvents / max(len(lanes), 1)
	for i := range lanes {
		l := &lanes[i]
		if n := len(l.Events); n > each {
			kept := slices.Clone(l.Events)
			slices.SortStableFunc(kept, func(a, b timeline.Event) int { return cmp.Compare(endOf(b), endOf(a)) })
			kept = kept[:each]
			slices.SortStableFunc(kept, func(a, b timeline.Event) int { return cmp.Compare(a.Begin, b.Begin) })
			l.Events = kept
			v.OmittedEvents += n - each
		}
	}
	v.Lanes = lanes
	return v
}

// endOf is when an event ended; one that runs is the newest.
func endOf(e timeline.Event) int64 {
	if e.Open {
		return math.MaxInt64
	}
	return e.End
}

// stacksView are the stacks of a role's workers, and the same as `troupe stacks` prints them.
type stacksView struct {
	Ranks []nodes.WorkerStacks `json:"ranks"`
	Text  string               `json:"text"`
}

// stacks collects the stacks of one rank, or of all ranks of a role.
func (s *server) stacks(w http.ResponseWriter, r *http.Request) {
	namespace, name := r.URL.Query().Get("namespace"), r.URL.Query().Get("role")
	if err := checkRoles(namespace, name); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var ranks []int
	if text := r.URL.Query().Get("rank"); text != "" {
		rank, err := strconv.Atoi(text)
		if err != nil || rank < 0 {
			http.Error(w, fmt.Sprintf("rank %q is not a number from 0", text), http.StatusBadRequest)
			return
		}
		ranks = []int{rank}
	}
	s.inspect(w, r, func(ctx context.Context) (any, error) {
		rt, err := roles.Open(ctx, roles.Config{Bus: s.Bus, Namespace: namespace, Name: "dashboard"})
		if err != nil {
			return nil, err
		}
		defer func() { _ = rt.Close(context.WithoutCancel(ctx)) }() // it has created nothing
		cl, err := rt.Attach(ctx, name)
		if err != nil {
			return nil, err
		}
		all, err := cl.Stacks(ctx, ranks...)
		if err != nil {
			return nil, err
		}
		var texts []string
		for _, group := range nodes.FoldStacks(all) {
			texts = append(texts, group.String())
		}
		return stacksView{Ranks: all, Text: strings.Join(texts, "\n")}, nil
	})
}

// inspect answers with what get returns, and bounds how much of it happens at a time.
func (s *server) inspect(w http.ResponseWriter, r *http.Request, get func(context.Context) (any, error)) {
	ctx, cancel := context.WithTimeout(r.Context(), inspectWait)
	defer cancel()
	select {
	case s.inspections <- struct{}{}:
		defer func() { <-s.inspections }()
	case <-ctx.Done():
		http.Error(w, "other timelines and stacks are being collected; try again", http.StatusTooManyRequests)
		return
	}
	v, err := get(ctx)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		http.Error(w, err.Error(), http.StatusNotFound)
	case bus.CodeOf(err) == bus.CodeRefused || bus.CodeOf(err) == bus.CodeInvalid:
		http.Error(w, err.Error(), http.StatusConflict)
	case err != nil:
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
	default:
		writeJSON(w, v)
	}
}
