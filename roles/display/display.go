package display

import (
	"bytes"
	"container/list"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"time"

	"troupe/internal/terminal"
	"troupe/nodes"
)

const (
	mergeFor     = 5 * time.Second // how long equal lines of other ranks are counted rather than shown
	mergeMost    = 1024            // texts that are remembered
	displayBurst = 2000            // lines that are shown at once
	displayRate  = 500             // lines a second after that; the others are counted
	noteEvery    = time.Second     // between two lines that say how many were left out
	shownMost    = 64              // of each worker, the lines on stderr that are known to have been shown
	rawLineMost  = 64 << 10        // bytes of an incomplete line in raw mode that wait for the rest
	partialFor   = time.Second     // how long an incomplete line in raw mode waits for the rest before it is shown as a line
)

// Text is text for the driver's stdout or stderr: whole lines, except in raw mode.
type Text struct {
	Stream nodes.OutputStream
	Text   []byte
}

// Display makes the output of many workers readable: lines begin with role and rank, a line that several ranks print is
// shown once and then counted, and of too many lines some are left out and counted. It has no clock: its methods take
// the time. One goroutine uses it at a time.
type Display struct {
	// Terminal escapes control characters, Color colours the prefixes.
	Terminal, Color bool

	out    []Text
	groups map[string]*list.Element // of order
	order  list.List                // of *lineGroup, oldest first

	tokens   float64
	at       time.Time
	omitted  map[string]*omittedLines // by role
	notedAt  time.Time
	shown    map[workerKey]*shownLines
	partials map[partialKey]*partialLine // of raw mode
}

// workerKey is a worker process of a role.
type workerKey struct {
	role string
	rank int
	gen  uint32
}

type partialKey struct {
	workerKey
	stream nodes.OutputStream
}

// partialLine is an incomplete line. Once it has been shown as a line, the end that comes later is left out.
type partialLine struct {
	data  []byte
	at    time.Time // of the last addition
	ended bool
}

// lineGroup is a line that was shown, and the other ranks that have printed it since.
type lineGroup struct {
	key    string
	role   string
	stream nodes.OutputStream
	text   string
	first  int // rank
	ranks  map[int]bool
	expiry time.Time
}

type omittedLines struct {
	lines int
	ranks map[int]bool
}

// shownLines is the newest lines on stderr of a worker that were shown, by their numbers.
type shownLines struct{ seqs []uint64 }

func (s *shownLines) add(seq uint64) {
	s.seqs = append(s.seqs, seq)
	s.seqs = s.seqs[max(0, len(s.seqs)-shownMost):]
}

// Add adds an item of a role with a number of ranks. In raw mode its bytes are passed on unchanged, in whole lines; a line without an end
// becomes one after partialFor.
func (d *Display) Add(role string, world int, mode nodes.OutputMode, item nodes.OutputItem, now time.Time) {
	worker := workerKey{role, item.Rank, item.Gen}
	if mode == nodes.OutputRaw {
		d.addRaw(worker, item, now)
		return
	}
	if item.LeftOut > 0 {
		d.leaveOut(role, item.Rank, item.LeftOut)
	}
	switch {
	case item.Seq == 0 && !item.End:
	case item.End:
		delete(d.shown, worker)
	case item.Dying:
		d.addDying(worker, item)
	default:
		d.addLine(worker, world, item, now)
	}
	d.expire(now)
}

func (d *Display) addLine(worker workerKey, world int, item nodes.OutputItem, now time.Time) {
	key := worker.role + "\x00" + string(item.Data)
	g := d.group(key)
	if g != nil && g.ranks[worker.rank] { // the next time that the ranks print it
		d.closeGroup(g)
		g = nil
	}
	if g != nil {
		g.ranks[worker.rank] = true
		d.noteShown(worker, item)
		if len(g.ranks) == world {
			d.closeGroup(g)
		}
		return
	}
	if !d.admit(now) {
		d.leaveOut(worker.role, worker.rank, 1)
		return
	}
	d.show(worker.role, strconv.Itoa(worker.rank), item.Stream, string(item.Data))
	d.noteShown(worker, item)
	if world == 1 {
		return
	}
	for d.order.Len() >= mergeMost {
		d.closeGroup(d.oldest())
	}
	if d.groups == nil {
		d.groups = map[string]*list.Element{}
	}
	d.groups[key] = d.order.PushBack(&lineGroup{
		key: key, role: worker.role, stream: item.Stream, text: string(item.Data), first: worker.rank, ranks: map[int]bool{worker.rank: true}, expiry: now.Add(mergeFor),
	})
}

// group is the group with a key, or nil.
func (d *Display) group(key string) *lineGroup {
	if e := d.groups[key]; e != nil {
		return e.Value.(*lineGroup)
	}
	return nil
}

// oldest is the group that was begun first, or nil.
func (d *Display) oldest() *lineGroup {
	if e := d.order.Front(); e != nil {
		return e.Value.(*lineGroup)
	}
	return nil
}

// addDying shows a last line of a dead worker, unless it was shown before.
func (d *Display) addDying(worker workerKey, item nodes.OutputItem) {
	if s := d.shown[worker]; s != nil && slices.Contains(s.seqs, item.Seq) {
		return
	}
	d.show(worker.role, strconv.Itoa(worker.rank), item.Stream, string(item.Data))
}

func (d *Display) noteShown(worker workerKey, item nodes.OutputItem) {
	if item.Stream != nodes.Stderr {
		return
	}
	s := d.shown[worker]
	if s == nil {
		s = &shownLines{}
		if d.shown == nil {
			d.shown = map[workerKey]*shownLines{}
		}
		d.shown[worker] = s
	}
	s.add(item.Seq)
}

// admit reports whether one more line may be shown now.
func (d *Display) admit(now time.Time) bool {
	if d.at.IsZero() {
		d.tokens = displayBurst
	} else {
		d.tokens = min(displayBurst, d.tokens+now.Sub(d.at).Seconds()*displayRate)
	}
	d.at = now
	if d.tokens < 1 {
		return false
	}
	d.tokens--
	return true
}

func (d *Display) leaveOut(role string, rank, lines int) {
	o := d.omitted[role]
	if o == nil {
		o = &omittedLines{ranks: map[int]bool{}}
		if d.omitted == nil {
			d.omitted = map[string]*omittedLines{}
		}
		d.omitted[role] = o
	}
	o.lines += lines
	o.ranks[rank] = true
}

// addRaw passes on complete lines, so that those of two workers do not mix.
func (d *Display) addRaw(worker workerKey, item nodes.OutputItem, now time.Time) {
	if item.End {
		d.endRaw(worker)
		return
	}
	key := partialKey{worker, item.Stream}
	data := item.Data
	if held := d.partials[key]; held != nil {
		if held.ended && len(data) > 0 {
			data = bytes.TrimPrefix(data, []byte("\n"))
		}
		data = append(held.data, data...)
	}
	end := bytes.LastIndexByte(data, '\n') + 1
	if len(data)-end > rawLineMost {
		end = len(data)
	}
	if end > 0 {
		d.out = append(d.out, Text{item.Stream, data[:end]})
	}
	if end == len(data) {
		delete(d.partials, key)
		return
	}
	if d.partials == nil {
		d.partials = map[partialKey]*partialLine{}
	}
	d.partials[key] = &partialLine{data: slices.Clone(data[end:]), at: now}
}

// endRaw ends the incomplete lines of a worker.
func (d *Display) endRaw(worker workerKey) {
	for _, stream := range []nodes.OutputStream{nodes.Stdout, nodes.Stderr} {
		key := partialKey{worker, stream}
		if held := d.partials[key]; held != nil {
			d.endPartial(key, held)
		}
		delete(d.partials, key)
	}
}

// endPartial shows an incomplete line as a line.
func (d *Display) endPartial(key partialKey, held *partialLine) {
	if len(held.data) > 0 {
		d.out = append(d.out, Text{key.stream, append(held.data, '\n')})
		held.data, held.ended = nil, true
	}
}

// Take returns what is to be shown now.
func (d *Display) Take(now time.Time) []Text {
	d.expire(now)
	for key, held := range d.partials {
		if now.Sub(held.at) >= partialFor {
			d.endPartial(key, held)
		}
	}
	if now.Sub(d.notedAt) >= noteEvery {
		d.noteOmitted()
		d.notedAt = now
	}
	out := d.out
	d.out = nil
	return out
}

// Flush returns everything that was held back.
func (d *Display) Flush() []Text {
	for g := d.oldest(); g != nil; g = d.oldest() {
		d.closeGroup(g)
	}
	d.noteOmitted()
	for key := range d.partials {
		d.endRaw(key.workerKey)
	}
	out := d.out
	d.out = nil
	return out
}

func (d *Display) expire(now time.Time) {
	for g := d.oldest(); g != nil && !g.expiry.After(now); g = d.oldest() {
		d.closeGroup(g)
	}
}

// closeGroup shows how many other ranks have printed a line.
func (d *Display) closeGroup(g *lineGroup) {
	d.order.Remove(d.groups[g.key])
	delete(d.groups, g.key)
	if more := len(g.ranks) - 1; more > 0 {
		delete(g.ranks, g.first)
		note := "[and 1 more rank]"
		if more > 1 {
			note = fmt.Sprintf("[and %d more ranks]", more)
		}
		d.show(g.role, nodes.RankRanges(g.ranks), g.stream, g.text+" "+note)
	}
}

func (d *Display) noteOmitted() {
	roles := make([]string, 0, len(d.omitted))
	for role := range d.omitted {
		roles = append(roles, role)
	}
	slices.Sort(roles)
	for _, role := range roles {
		o := d.omitted[role]
		d.show(role, nodes.RankRanges(o.ranks), nodes.Stderr, fmt.Sprintf("[%d lines left out; `troupe logs %s` has them, output=\"raw\" shows all]", o.lines, role))
	}
	d.omitted = nil
}

func (d *Display) show(role, ranks string, stream nodes.OutputStream, text string) {
	prefix := role + "[" + ranks + "]"
	if d.Terminal {
		text = terminal.Line(text)
	}
	if d.Color {
		prefix = fmt.Sprintf("\x1b[%dm%s\x1b[0m", colorOf(role), prefix)
	}
	d.out = append(d.out, Text{stream, []byte(prefix + " " + text + "\n")})
}

// colorOf is the terminal colour of a role: one of cyan, green, yellow, blue, magenta and bright blue.
func colorOf(role string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(role)) // never fails
	return []int{36, 32, 33, 34, 35, 94}[h.Sum32()%6]
}
