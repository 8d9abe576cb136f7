package flow

import (
	"iter"
	"slices"
	"time"

	"troupe/pipeline/spec"
)

// Flow decides which task a worker gets, what is committed and what is dropped. It does no I/O and reads no clock: the
// engine sets Now, reports events by calling methods, and carries out the effects that TakeEffects returns. One
// goroutine owns a Flow and everything reachable from it.
type Flow struct {
	streams      []*StreamState
	Stages       []*StageState
	Version      spec.Version
	Now          time.Time
	sampled      time.Time // last update of the rates
	window       memoryWindow
	maxBody      int
	LargeBodyMin int // bodies of at least this many bytes go to a body stream; 0: none

	sources          map[string]*producerState
	queue            fifo[*change] // changes to commit, in order
	queued           int           // messages in queue
	queuedBytes      int64
	pendingBodyBytes int64  // bytes of large bodies that are not stored yet
	CommitNumber     uint64 // number of the last commit that was built
	scanNumber       uint64 // number of the current scan of queue, see commitFilter
	nextTask         uint64
	stopped          bool // no new tasks
	IntakeClosed     bool // no new puts
	finalEnqueued    bool // the last checkpoint of this engine is in the queue
	taken            map[uint64]*takenItems
	isolated         *isolatedRetry // work that has to run while no other function runs; nil: none
	DeadBodies       *BodyStream    // bodies of dead letters
	Resolved         *ResolvedLetters
	retired          map[string]StreamCheckpoint // streams of the first checkpoint, declared or not

	Effects
	spare Effects // slices of the last TakeEffects, for reuse
}

// Effects is what the engine has to do.
type Effects struct {
	Starts  []*Task        // give these tasks to their workers
	Cancels []Cancellation // cancel these tasks
	Bodies  []*PendingBody // store these bodies
	Reads   []ReadRequest  // read these items from the log
	Replies []Reply        // answer these requests
}

// TakeEffects returns the effects since the last call. They are valid until the next call.
func (f *Flow) TakeEffects() Effects {
	clear(f.spare.Starts)
	clear(f.spare.Bodies)
	clear(f.spare.Replies)
	out := f.Effects
	f.Effects = Effects{f.spare.Starts[:0], f.spare.Cancels[:0], f.spare.Bodies[:0], f.spare.Reads[:0], f.spare.Replies[:0]}
	f.spare = out
	return out
}

// Lanes iterates over the lanes of all streams.
func (f *Flow) Lanes() iter.Seq[*Lane] {
	return func(yield func(*Lane) bool) {
		for _, s := range f.streams {
			for _, l := range s.lanes {
				if !yield(l) {
					return
				}
			}
		}
	}
}

type (
	Cancellation struct {
		Task  *Task
		Abort bool // the task may return a partial result
	}
	ReadRequest struct {
		Lane     *Lane
		From, To uint64
		AfterSeq uint64     // read after this sequence of the log
		MaxBytes int64      // stop when this many bytes were read
		Done     OrdinalSet // ordinals to skip
	}
	Reply struct {
		Token any
		Err   error
	}
)

func New(declared spec.Spec, rec *Checkpoint) *Flow {
	declared = declared.WithDefaults()
	f := &Flow{sources: map[string]*producerState{}, window: defaultWindow, maxBody: spec.MaxBody, taken: map[uint64]*takenItems{}, DeadBodies: &BodyStream{Name: DeadBodiesName, MaxBytes: 64 << 20},
		Resolved: NewResolvedLetters(rec), retired: map[string]StreamCheckpoint{}}
	for _, s := range declared.Streams {
		f.streams = append(f.streams, newStream(s))
		f.DeadBodies.MaxBytes += s.Bytes
	}
	for _, s := range declared.Stages {
		f.Stages = append(f.Stages, f.connect(newStage(s)))
	}
	for _, cycle := range declared.Cycles() {
		f.exemptCycle(cycle)
	}
	if rec != nil {
		f.restore(rec)
	}
	return f
}

func (f *Flow) connect(s *StageState) *StageState {
	for _, name := range s.Spec.In {
		s.inputs = append(s.inputs, f.StreamNamed(name))
	}
	for _, name := range s.Spec.Out {
		out := f.StreamNamed(name)
		s.Outputs = append(s.Outputs, out)
		if out.spec.Full != spec.DropOldest {
			s.blockingOutputs = append(s.blockingOutputs, out)
		}
	}
	return s
}

// exemptCycle removes the streams of a cycle from the streams that block its stages: stages that wait for each other
// would never run.
func (f *Flow) exemptCycle(cycle []spec.StageSpec) {
	for _, member := range cycle {
		s := f.StageNamed(member.Name)
		s.blockingOutputs = slices.DeleteFunc(s.blockingOutputs, func(out *StreamState) bool {
			return slices.ContainsFunc(cycle, func(next spec.StageSpec) bool { return slices.Contains(next.In, out.spec.Name) })
		})
	}
}

func (f *Flow) StreamNamed(name string) *StreamState {
	i := slices.IndexFunc(f.streams, func(s *StreamState) bool { return s.spec.Name == name })
	if i < 0 {
		return nil
	}
	return f.streams[i]
}

func (f *Flow) StageNamed(name string) *StageState {
	i := slices.IndexFunc(f.Stages, func(s *StageState) bool { return s.Spec.Name == name })
	if i < 0 {
		return nil
	}
	return f.Stages[i]
}
