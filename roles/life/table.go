package life

import (
	"slices"
	"strings"
)

// roleTable is what an event does to a role in each state; the words are in apply. "." is an event that is reported late,
// because another was faster: it is ignored. "-" is one that the loop never reports in that state; see Legal.
var roleTable = parse(`
	              Starting  Serving   Recovering  Restarting  Failed   Ending   Finishing  Gone     Closed
	Started       serve     -         -           -           .        .        .          .        .
	NotStarted    end       -         -           -           .        .        .          .        .
	WorkerLost    lose      lose      lose        lose        tell     tell     tell       tell     tell
	WorkerStopped stop      stop      stop        tell        tell     tell     tell       tell     tell
	Read          read      read      read        readOwn     .        .        .          .        .
	Changed       .         recover   wake        .           .        .        .          .        .
	Deferred      -         -         -           recover     .        .        .          .        .
	GaveUp        -         -         -           giveUp      .        .        .          .        .
	Destroy       destroy   destroy   destroy     destroy     destroy  destroy  .          .        destroy
	Destroyed     -         -         -           -           -        vanish   vanish     .        vanish
	Interrupted   .         .         .           .           repeat   repeat   .          .        repeat
	Close         close     close     close       close       close    close    close      .        .
`)

// rankTable is what evidence of the current generation does to a rank in each state; the words are in evidence. "." is
// nothing new, and "-" what no worker does; both are ignored. Evidence of an earlier generation is ignored, and that of a
// later one makes the rank Expected first: so of two generations only the later one ever serves.
var rankTable = parse(`
	              Expected  Loading   Ready    Stopping  Exiting  Stopped  Lost
	SaysLoading   load      .         -        -         -        -        -
	SaysReady     serve     serve     .        -         -        -        -
	SaysStopping  stop      stop      stop     .         -        -        -
	SaysStopped   leave     leave     leave    leave     .        .        .
	SaysFailed    lose      lose      lose     lose      -        -        .
	Exited        end       end       end      end       end      .        .
	Crashed       lose      lose      lose     lose      end      .        .
	Evicted       lose      lose      lose     lose      lose     .        .
	Silent        lose      lose      lose     lose      -        .        .
	Unconfirmed   -         -         -        -         end      .        .
`)

// parse reads a table: the words of each row, without the head and the name of the row.
func parse(text string) (rows [][]string) {
	for _, line := range strings.Split(strings.TrimSpace(text), "\n")[1:] {
		rows = append(rows, strings.Fields(line)[1:])
	}
	return rows
}

// Legal reports whether the loop may report what happened to a role, in a state.
func Legal(s State, k Kind) bool { return k < Started || roleTable[k-Started][s] != "-" }

// apply handles what happened to the role.
func (r *Role) apply(e Event) {
	if e.Again && (r.ranks[e.Rank].Gen != e.Gen || !r.ranks[e.Rank].State.Over()) {
		return // it has been replaced
	}
	switch roleTable[e.Kind-Started][r.state] {
	case "serve":
		r.become(Serving)
		r.do(Action{Kind: SendCalls})
	case "lose":
		r.lose(e)
	case "stop":
		r.stop(e)
	case "tell":
		r.tell(e)
	case "read":
		r.read(e.Record)
	case "readOwn":
		if e.Record.Own { // one that was read before the restart began is old
			r.read(e.Record)
		}
	case "recover":
		r.recover()
	case "wake":
		r.do(Action{Kind: Wake})
	case "giveUp":
		if lost := r.LostRanks(); len(lost) > 0 && !e.Final { // new workers, or others
			r.recover()
		} else {
			r.fail(e.Rank, e.Loss, true)
		}
	case "end":
		r.endElsewhere(e.Why, false)
	case "destroy":
		r.finish(Ending, End{Why: e.Why, Rank: -1})
	case "vanish":
		r.become(Gone)
	case "repeat":
		if r.cfg.Part == Creator {
			r.become(Finishing)
			r.do(Action{Kind: Repeat})
		}
	case "close":
		r.finish(Closed, End{Why: e.Why, Rank: -1})
	case "-":
		r.do(Action{Kind: Complain, Event: e.Kind})
	}
}

// become changes the state.
func (r *Role) become(s State) {
	if s != r.state {
		r.state = s
		r.version++
	}
}

// recover makes the role recover.
func (r *Role) recover() {
	if r.state == Serving {
		r.episode++
		r.do(Action{Kind: Recover})
	}
	r.become(Recovering)
}

// tell fails the calls of a worker that has ended.
func (r *Role) tell(e Event) {
	if e.Again {
		return
	}
	lost := r.ranks[e.Rank].State == Lost
	r.do(Action{Kind: FailCalls, Rank: e.Rank, Gen: e.Gen, Loss: e.Loss, Slow: !lost && !e.Loss.Killed})
}

// lose handles a lost worker, by the policy of the role.
func (r *Role) lose(e Event) {
	switch {
	case e.Rank >= r.cfg.World: // being added, removed, or added by another process
		r.tell(e)
		if !e.Again {
			r.do(Action{Kind: Check, Rank: e.Rank, Gen: e.Gen})
		}
	case r.Replaces():
		ranks := []int{e.Rank}
		if r.cfg.Policy == ReplaceAll {
			ranks = r.all()
		}
		r.do(Action{Kind: TellSiblings, Rank: e.Rank, Gen: e.Gen, Loss: e.Loss})
		r.hold(Action{Kind: HoldCalls, Ranks: ranks, Loss: e.Loss})
		r.tell(e)
		switch r.state {
		case Serving:
			r.recover()
		case Recovering:
			r.do(Action{Kind: Wake})
		}
	case r.state != Starting && r.cfg.Policy == Continue:
		r.tell(e)
		r.do(Action{Kind: Report, Rank: e.Rank, Gen: e.Gen, Loss: e.Loss})
	default:
		r.tell(e)
		r.fail(e.Rank, e.Loss, false)
	}
}

// stop handles a worker that has ended in order: the role is being destroyed, is smaller, or is restarted elsewhere. Where the
// workers are processes the record says which; one that cannot be read counts as destroyed.
func (r *Role) stop(e Event) {
	r.tell(e)
	switch removed := e.Rank >= r.cfg.World; {
	case removed && (e.Again || !r.cfg.Processes || r.cfg.Part == Creator):
	case r.cfg.Processes && !e.Again:
		r.do(Action{Kind: Check, Rank: e.Rank, Gen: e.Gen})
	case r.cfg.Processes && r.state == Recovering: // the record is being read
	default:
		r.endStopped()
	}
}

// endStopped ends a role one of whose workers has ended in order: somebody destroys it. The creator finishes that.
func (r *Role) endStopped() {
	starting := r.state == Starting
	r.endElsewhere(nil, false)
	if r.cfg.Part == Creator && !starting {
		r.do(Action{Kind: DestroyRole})
	}
}

// read applies a record.
func (r *Role) read(rec Record) {
	switch rec.State {
	case Absent:
		r.endElsewhere(rec.Why, false)
		return
	case Unworkable:
		r.endElsewhere(rec.Why, true)
		return
	}
	r.applyRecord(rec)
	if r.state == Starting || rec.State == Unready {
		return
	}
	away := map[int]bool{}
	if r.replaces() {
		for _, rank := range r.LostRanks() {
			away[rank] = true
			if r.cfg.Policy == ReplaceAll {
				for _, other := range r.all() {
					away[other] = true
				}
			}
		}
	}
	if rec.State == Unsettled {
		for _, rank := range rec.Restarting {
			away[rank] = true
		}
		r.hold(Action{Kind: HoldCalls, Ranks: rec.Restarting})
		if rec.RestartGen != r.restart {
			r.restart = rec.RestartGen
			r.do(Action{Kind: FailReplaced, Ranks: rec.Restarting, Gen: rec.RestartGen - 1})
		}
	}
	r.send(away)
	switch {
	case rec.State == Unsettled && r.state == Restarting: // this process has begun it
	case rec.State == Settled && len(away) == 0 && r.has(Stopped): // and nobody replaces it
		r.endStopped()
	case rec.State == Settled && len(away) == 0:
		r.become(Serving)
		r.do(Action{Kind: ExpectBeats})
		r.publish(rec.Epoch)
	case rec.Turn:
		r.become(Restarting)
		r.do(Action{Kind: Restart, Ranks: r.LostRanks()})
	default:
		r.recover()
	}
}

// publish announces an epoch that is newer than the last.
func (r *Role) publish(epoch uint64) {
	if epoch > r.cfg.Epoch {
		r.cfg.Epoch = epoch
		r.do(Action{Kind: Publish})
	}
}

// applyRecord applies the size and the generations of a record.
func (r *Role) applyRecord(rec Record) {
	r.cfg.Processes, r.cfg.Detached, r.cfg.Policy = rec.Processes, rec.Detached, rec.Policy
	r.grow(max(rec.World, len(rec.Gens)))
	for rank, gen := range rec.Gens {
		if k := r.ranks[rank]; k.Gen < gen {
			r.setRank(rank, Rank{Gen: gen, Held: k.Held})
		}
	}
	if r.cfg.World != rec.World {
		r.cfg.World = rec.World
		r.version++
		r.do(Action{Kind: Reshape})
	}
}

// fail ends the role because of a worker. The process that is responsible ends the other workers; of a detached role every
// process that is certain, because its driver may be gone.
func (r *Role) fail(rank int, loss Loss, certain bool) {
	starting := r.state == Starting
	r.finish(Failed, End{Why: loss.Why, Failure: true, Rank: rank})
	r.do(Action{Kind: FailPending})
	r.do(Action{Kind: Report, Rank: rank, Gen: r.ranks[rank].Gen, Loss: loss, Fails: true})
	switch part := r.cfg.Part; {
	case starting:
	case part == Creator, part == Monitor && r.cfg.Processes, (certain || !loss.Guessed) && part != Reader && r.cfg.Detached:
		r.do(Action{Kind: TearDown, Rank: rank, Loss: loss})
	}
}

// endElsewhere ends the role because another process has, or because it was not started. Handles that only watch are closed.
func (r *Role) endElsewhere(why error, failure bool) {
	to := Ending
	if failure {
		to = Failed
	}
	if r.finish(to, End{Why: why, Failure: failure, Rank: -1}); failure {
		r.do(Action{Kind: FailPending})
	}
	if r.cfg.Part == Reader || r.cfg.Part == Monitor {
		r.do(Action{Kind: LeaveSoon})
	}
}

// finish refuses calls from now on. The first reason stays.
func (r *Role) finish(to State, why End) {
	if r.end == nil {
		why.AtStart = r.state == Starting
		r.end = &why
		r.do(Action{Kind: EndCalls})
		for rank := range r.ranks {
			r.ranks[rank].Held = false
		}
	}
	r.become(to)
}

// hold makes calls wait.
func (r *Role) hold(a Action) {
	for _, rank := range a.Ranks {
		r.setHeld(rank, true)
	}
	r.do(a)
}

// send sends the calls that wait, except those to some ranks.
func (r *Role) send(except map[int]bool) {
	var held []int
	for rank, k := range r.ranks {
		stays := except[rank] || k.Retired && !k.State.Over()
		if r.setHeld(rank, stays); stays {
			held = append(held, rank)
		}
	}
	r.do(Action{Kind: SendCalls, Ranks: held})
}

func (r *Role) setHeld(rank int, on bool) {
	if r.ranks[rank].Held != on {
		r.ranks[rank].Held = on
		r.version++
	}
}

// has reports whether a rank of the role is in a state.
func (r *Role) has(s RankState) bool {
	return slices.ContainsFunc(r.ranks[:r.cfg.World], func(k Rank) bool { return k.State == s })
}

func (r *Role) all() []int {
	ranks := make([]int, r.cfg.World)
	for rank := range ranks {
		ranks[rank] = rank
	}
	return ranks
}
