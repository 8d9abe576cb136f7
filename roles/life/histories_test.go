package life

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// model is a role with its record, its workers, and the processes that have a handle of it. What a real loop does, it does in
// random order, with messages that arrive late, twice, or of workers that have been replaced.
type model struct {
	t      *rapid.T
	policy Policy
	most   int // restarts

	rec      Record
	restarts int
	by       *process        // carries out the restart in the record
	loaded   map[[2]int]bool // by rank and generation: its class is constructed
	dead     map[[2]int]bool // it has ended
	asked    map[[2]int]bool // it was asked to
	procs    []*process
	errs     int
}

// process is one process with a handle.
type process struct {
	*Role
	part     Part
	m        *model
	inbox    []Event
	gate     map[int]bool // ranks whose calls wait
	refused  bool
	first    *End
	recovers int   // running loops that read the record
	restart  []int // the ranks of its Restart action; nil: none
	begun    bool
	started  bool
	torn     int
	repeats  bool
	checks   []Event
	wants    bool // somebody destroys the role
}

func (m *model) why() error { m.errs++; return fmt.Errorf("reason %d", m.errs) }

func newModel(t *rapid.T) *model {
	m := &model{t: t, policy: rapid.SampledFrom([]Policy{FailRole, ReplaceRank, ReplaceAll, Continue}).Draw(t, "policy"), most: rapid.IntRange(0, 3).Draw(t, "restarts"),
		loaded: map[[2]int]bool{}, dead: map[[2]int]bool{}, asked: map[[2]int]bool{}}
	world := rapid.IntRange(1, 4).Draw(t, "world")
	m.rec = Record{State: Unready, Config: Config{Processes: rapid.Bool().Draw(t, "processes"), Detached: rapid.Bool().Draw(t, "detached"), Policy: m.policy, World: world, Gens: make([]uint32, world)}}
	m.add(Creator)
	return m
}

func (m *model) add(part Part) {
	cfg := m.rec.Config
	cfg.Part, cfg.Gens = part, slices.Clone(cfg.Gens)
	m.procs = append(m.procs, &process{Role: New(cfg), part: part, m: m, gate: map[int]bool{}})
}

func (m *model) worker(rank int) [2]int { return [2]int{rank, int(m.rec.Gens[rank])} }

// tell sends evidence to every process; each has an order of its own.
func (m *model) tell(e Event) {
	for _, p := range m.procs {
		p.inbox = append(p.inbox, e)
	}
}

// feed is the loop: an event, the checks, and the actions.
func (p *process) feed(e Event) {
	t := p.m.t
	require.True(t, Legal(p.State(), e.Kind), "event %d in state %d", e.Kind, p.State())
	before, gens := p.State(), []uint32{}
	for _, k := range p.Ranks() {
		gens = append(gens, k.Gen)
	}
	actions := p.Handle(e)
	for rank, gen := range gens {
		require.GreaterOrEqual(t, p.Ranks()[rank].Gen, gen, "an earlier generation of rank %d serves again", rank)
	}
	require.False(t, before.Over() && !p.State().Over(), "state %d became %d: an end was undone", before, p.State())
	require.False(t, before == Gone && p.State() != Gone)
	require.Equal(t, p.State().Over(), p.End() != nil || p.part == Ender)
	if p.first == nil && p.End() != nil {
		first := *p.End()
		p.first = &first
	}
	if p.first != nil {
		require.Equal(t, *p.first, *p.End(), "the first cause stays")
	}
	for _, a := range actions {
		p.perform(a, before)
	}
	for rank, k := range p.Ranks() {
		require.Equal(t, k.Held && !p.refused, p.gate[rank] && !p.refused, "rank %d", rank)
	}
}

func (p *process) perform(a Action, before State) {
	m, t := p.m, p.m.t
	switch a.Kind {
	case HoldCalls:
		require.False(t, before.Over())
		for _, rank := range a.Ranks {
			p.gate[rank] = true
		}
	case SendCalls:
		require.False(t, before.Over())
		for rank := range p.gate {
			if p.gate[rank] && !slices.Contains(a.Ranks, rank) {
				require.True(t, m.loaded[m.worker(rank)], "rank %d serves and is not loaded", rank)
				delete(p.gate, rank)
			}
		}
	case EndCalls:
		require.False(t, p.refused)
		p.refused = true
	case AwaitExit:
		p.inbox = append(p.inbox, Event{Kind: Unconfirmed, Rank: a.Rank, Gen: a.Gen})
	case Check:
		again := Event{Kind: WorkerStopped, Rank: a.Rank, Gen: a.Gen, Again: true, Loss: p.Ranks()[a.Rank].Loss}
		if p.Ranks()[a.Rank].State == Lost {
			again.Kind = WorkerLost
		}
		p.checks = append(p.checks, again)
	case Recover:
		p.recovers++
		require.Equal(t, p.recovers, p.Episode())
	case Restart:
		require.Nil(t, p.restart, "two restarts at a time")
		require.Contains(t, []Part{Creator, Monitor}, p.part)
		p.restart = append([]int{}, a.Ranks...)
	case TearDown:
		require.Equal(t, Failed, p.State())
		p.torn++
		require.Equal(t, 1, p.torn)
		if m.rec.State != Absent {
			m.rec.State, m.rec.Why = Unworkable, p.End().Why
			m.killAll()
		}
	case DestroyRole:
		p.wants = true
	case Repeat:
		require.False(t, p.repeats)
		p.repeats = true
	case Leave, LeaveSoon:
		p.feed(Event{Kind: Close, Why: errors.New("closed")})
	}
}

func (m *model) killAll() {
	for rank := range m.rec.World {
		m.crash(rank, Exited)
	}
}

func (m *model) crash(rank int, kind Kind) {
	if w := m.worker(rank); !m.dead[w] {
		m.dead[w] = true
		m.tell(Event{Kind: kind, Rank: rank, Gen: uint32(w[1]), Loss: Loss{Why: m.why(), Evicted: kind == Evicted, Guessed: kind == Silent}})
	}
}

func (m *model) load(rank int) {
	if w := m.worker(rank); !m.loaded[w] && !m.dead[w] {
		m.loaded[w] = true
		m.tell(Event{Kind: SaysLoading, Rank: rank, Gen: uint32(w[1])})
		m.tell(Event{Kind: SaysReady, Rank: rank, Gen: uint32(w[1])})
	}
}

// allLoaded reports whether the workers of ranks are loaded and live.
func (m *model) allLoaded(ranks []int) bool {
	return !slices.ContainsFunc(ranks, func(rank int) bool { return !m.loaded[m.worker(rank)] || m.dead[m.worker(rank)] })
}

func (m *model) read(own, turn bool) Event {
	rec := m.rec
	rec.Gens, rec.Restarting, rec.Own = slices.Clone(rec.Gens), slices.Clone(rec.Restarting), own
	rec.Turn = turn && rec.Processes && (m.policy == ReplaceRank || m.policy == ReplaceAll)
	return Event{Kind: Read, Record: rec}
}

// step does the next thing that a process has to do; false: it has nothing to do.
func (p *process) step() bool {
	m := p.m
	switch {
	case len(p.inbox) > 0:
		e := p.inbox[0]
		p.inbox = p.inbox[1:]
		p.feed(e)
	case len(p.checks) > 0:
		e := p.checks[0]
		p.checks = p.checks[1:]
		if m.rec.State != Absent {
			p.feed(m.read(false, false))
		}
		p.feed(e)
	case p.State() == Starting && !p.started && m.allLoaded(p.all()) && m.rec.State == Unready:
		p.started, m.rec.State = true, Settled
		p.feed(Event{Kind: Started})
	case p.State() == Failed && p.End().AtStart && p.part == Creator, p.wants && p.State() != Gone && m.rec.State != Absent:
		p.wants = false
		p.feed(Event{Kind: Destroy, Why: m.why()})
		m.rec.State = Absent
		m.killAll()
		p.feed(Event{Kind: Destroyed})
	case p.State() == Ending && p.wants:
		p.feed(Event{Kind: Destroyed})
	case p.repeats && p.State() != Gone:
		m.rec.State = Absent
		m.killAll()
		p.feed(Event{Kind: Destroyed})
	case p.restart != nil && !p.begun:
		p.begin()
	case p.restart != nil && m.by != p || p.restart != nil && m.rec.State != Unsettled:
		p.restart, p.begun = nil, false
		p.feed(Event{Kind: Deferred})
	case p.restart != nil && m.allLoaded(m.rec.Restarting):
		p.restart, p.begun = nil, false
		m.rec.State, m.rec.Restarting, m.by = Settled, nil, nil
		p.feed(m.read(true, false))
	case p.restart != nil && slices.ContainsFunc(m.rec.Restarting, func(rank int) bool { return m.dead[m.worker(rank)] }):
		p.restart, p.begun = nil, false
		p.feed(Event{Kind: GaveUp, Loss: Loss{Why: m.why()}, Rank: m.rec.Restarting[0]})
	case p.State() == Recovering:
		free := m.rec.State == Settled || m.rec.State == Unsettled && (m.by == p || m.by.State().Over() || m.by.restart == nil)
		p.feed(m.read(false, free && (p.part == Creator || p.part == Monitor)))
		return p.State() != Recovering
	default:
		return false
	}
	return true
}

// begin writes the restart into the record, as the first writer.
func (p *process) begin() {
	m := p.m
	lost := slices.DeleteFunc(slices.Clone(p.restart), func(rank int) bool { return p.Ranks()[rank].Gen != m.rec.Gens[rank] })
	if len(lost) > 0 && m.policy == ReplaceAll {
		lost = p.all()
	}
	free := m.rec.State == Settled && len(lost) > 0 || m.rec.State == Unsettled && (m.by == p || m.by.State().Over() || m.by.restart == nil)
	switch {
	case !free:
		p.restart = nil
		p.feed(Event{Kind: Deferred})
		return
	case m.restarts == m.most:
		p.restart = nil
		p.feed(Event{Kind: GaveUp, Final: true, Loss: Loss{Why: m.why()}})
		return
	}
	m.restarts++
	m.rec.State, m.by, p.begun = Unsettled, p, true
	m.rec.RestartGen++
	for _, rank := range m.rec.Restarting {
		if !slices.Contains(lost, rank) {
			lost = append(lost, rank)
		}
	}
	m.rec.Restarting = lost
	for _, rank := range lost {
		m.dead[m.worker(rank)] = true
		m.rec.Gens[rank] = m.rec.RestartGen
	}
	p.feed(m.read(true, false))
}

// settle lets everything that is under way end.
func (m *model) settle() {
	for busy, rounds := true, 0; busy; rounds++ {
		require.Less(m.t, rounds, 500, "the role does not settle")
		busy = false
		for rank := range m.rec.World {
			if m.rec.State != Absent && m.rec.State != Unworkable {
				m.load(rank)
			}
		}
		for _, p := range m.procs {
			for p.step() {
				busy = true
			}
		}
	}
}

// TestHistories tries random histories of one role in several processes.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newModel(t)
		any := func() *process { return rapid.SampledFrom(m.procs).Draw(t, "process") }
		rank := func() int { return rapid.IntRange(0, m.rec.World-1).Draw(t, "rank") }
		t.Repeat(map[string]func(*rapid.T){
			"step":  func(*rapid.T) { any().step() },
			"steps": func(*rapid.T) { m.settle() },
			"load":  func(*rapid.T) { m.load(rank()) },
			"crash": func(*rapid.T) {
				m.crash(rank(), rapid.SampledFrom([]Kind{Crashed, SaysFailed, Evicted, Silent}).Draw(t, "how"))
			},
			"stop":   func(*rapid.T) { m.crash(rank(), SaysStopped) },
			"change": func(*rapid.T) { any().feed(Event{Kind: Changed}) },
			"attach": func(*rapid.T) {
				if len(m.procs) < 4 && m.rec.State != Unready {
					m.add(rapid.SampledFrom([]Part{Guest, Reader, Monitor}).Draw(t, "part"))
				}
			},
			"late": func(*rapid.T) { // a message of a worker that may have been replaced, once more
				p, r := any(), rank()
				gen := rapid.Uint32Range(0, m.rec.Gens[r]).Draw(t, "gen")
				if w := [2]int{r, int(gen)}; m.loaded[w] && !m.dead[w] || m.dead[w] && gen < m.rec.Gens[r] {
					p.inbox = append(p.inbox, Event{Kind: SaysReady, Rank: r, Gen: gen})
				}
			},
			"interrupted": func(*rapid.T) {
				p := any()
				p.feed(Event{Kind: Destroy, Why: m.why()})
				p.feed(Event{Kind: Interrupted})
				p.wants = p.part != Creator
			},
			"destroy": func(*rapid.T) { any().wants = true },
			"close": func(*rapid.T) {
				if p := any(); p.part != Creator {
					p.feed(Event{Kind: Close, Why: m.why()})
				}
			},
			"": func(t *rapid.T) { require.LessOrEqual(t, m.restarts, m.most) },
		})
		m.settle()
		creator := m.procs[0]
		switch {
		case creator.State().Over():
			require.True(t, creator.refused)
			if creator.State() == Failed && creator.End().Rank >= 0 {
				require.Equal(t, 1, creator.torn, "what is left of a failed role is ended")
			}
			if m.rec.State == Absent {
				for _, p := range m.procs {
					require.True(t, p.State().Over() || p.State() == Serving || m.policy == Continue, "state %d", p.State())
				}
			}
		case m.policy != Continue:
			for rank, k := range creator.Ranks()[:creator.World()] {
				require.Equal(t, Ready, k.State, "rank %d of a role in state %d", rank, creator.State())
				require.False(t, k.Held)
			}
		}
	})
}

// TestTables checks that the tables have a word for every pair, which the code knows.
func TestTables(t *testing.T) {
	check := func(table [][]string, rows, columns int, words string) {
		require.Len(t, table, rows)
		for _, row := range table {
			require.Len(t, row, columns)
			for _, word := range row {
				require.Contains(t, words, " "+word+" ")
			}
		}
	}
	check(roleTable, int(kinds-Started), int(states), " . - serve lose stop tell read readOwn recover wake giveUp end destroy vanish repeat close ")
	check(rankTable, int(rankEvents), int(Lost)+1, " . - load serve stop leave end lose ")
}
