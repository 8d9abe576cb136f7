package versions

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/bus/wire"
	"troupe/weights/plan"
)

var start = time.Unix(1_700_000_000, 0)

// world is a state with members that have real memory, so that what receivers end up with can be compared.
type world struct {
	t       require.TestingT
	s       *State
	now     time.Time
	members map[string]*process
	values  map[uint64][]int64 // buckets by number, of all members
	owners  map[uint64]string
	last    uint64
	answers map[int]Answer
	asked   int
	cuts    []Cut
	epochs  []uint64
	news    News
	service int
}

// process is a member. Its elements have the version and the number of the element in the tensor.
type process struct {
	Member
	catalog *plan.Catalog
	layout  *plan.Layout
	shards  [][]int64
	memory  []plan.Memory
	planID  string
	part    plan.Part
	partOf  string // name of the part that it took last
	taken   plan.Part
	base    Version // what its arena has
	arena   [][]int64
	held    map[Version]Held
	packed  map[Version][][]int64
	parts   map[Version]plan.Part
	staged  map[Version]bool
	now     Version // committed
}

func newWorld(t require.TestingT) *world {
	w := &world{t: t, now: start, members: map[string]*process{}, values: map[uint64][]int64{}, owners: map[uint64]string{}, answers: map[int]Answer{}}
	w.s = New("policy", "s0", 0)
	return w
}

// run carries out effects.
func (w *world) run() {
	for _, e := range w.s.Take() {
		switch e := e.(type) {
		case Answer:
			_, twice := w.answers[e.To.(int)]
			require.False(w.t, twice, "a request was answered twice")
			w.answers[e.To.(int)] = e
		case Cut:
			w.cuts = append(w.cuts, e)
		case KeepEpoch:
			require.NotContains(w.t, w.epochs, e.Epoch, "an epoch was given twice")
			w.epochs = append(w.epochs, e.Epoch)
		case News:
			w.news = e
			w.free()
		}
	}
}

// free frees what members need not keep.
func (w *world) free() {
	for _, p := range w.members {
		for v, h := range p.held {
			if !slices.Contains(w.news.Kept, v) {
				for _, o := range h.Content.Buckets {
					delete(w.values, o.ID)
				}
				if !slices.Contains(w.news.Deltas, v) {
					for _, o := range h.Content.Deltas {
						delete(w.values, o.ID)
					}
					delete(p.held, v)
				}
			}
		}
	}
}

// ask makes a request, and returns its answer if there is one already.
func (w *world) ask(do func(to any)) (Answer, int, bool) {
	w.asked++
	to := w.asked
	do(to)
	w.run()
	a, ok := w.answers[to]
	return a, to, ok
}

func (w *world) must(do func(to any)) any {
	a, _, ok := w.ask(do)
	require.True(w.t, ok, "a request was not answered")
	require.NoError(w.t, a.Err)
	return a.Value
}

// join adds a member with shards {name: box} of tensors of one shape.
func (w *world) join(m Member, shape []int64, boxes map[string]plan.Box) *process {
	p := &process{Member: m, catalog: &plan.Catalog{}, held: map[Version]Held{}, packed: map[Version][][]int64{}, parts: map[Version]plan.Part{}, staged: map[Version]bool{}}
	p.Session = m.ID
	var shards []plan.Shard
	for _, name := range slices.Sorted(maps.Keys(boxes)) {
		i, err := p.catalog.Add(plan.Tensor{Name: name, DType: "int64", ItemSize: 8, Shape: shape})
		require.NoError(w.t, err)
		shards = append(shards, plan.Shard{Tensor: i, Box: boxes[name]})
		n := int64(8)
		strides := make([]int64, len(shape))
		for k := len(shape) - 1; k >= 0; k-- {
			strides[k] = n
			n *= boxes[name].Sizes()[k]
		}
		p.shards, p.memory = append(p.shards, make([]int64, n/8)), append(p.memory, plan.Memory{Strides: strides})
	}
	var err error
	p.layout, err = p.catalog.Layout(shards...)
	require.NoError(w.t, err)
	w.members[m.ID] = p
	w.bind(p)
	return p
}

func (w *world) bind(p *process) {
	r := BindRequest{Member: p.Member, Layout: plan.EncodeLayout(p.catalog, p.layout), Committed: p.now}
	for _, v := range slices.SortedFunc(maps.Keys(p.held), Version.Compare) {
		if len(p.packed[v]) > 0 && slices.Contains(w.news.Kept, v) {
			r.Held = append(r.Held, p.held[v])
		}
	}
	w.must(func(to any) { w.s.Bind(w.now, to, r) })
}

// value is the content of an element in a version.
func value(v Version, tensor string, whole int64) int64 {
	return int64(v.Epoch)<<40 | v.Step<<24 | int64(tensor[len(tensor)-1])<<16 | whole
}

// each calls do with the shard, the index in it and the number in the tensor of all elements.
func (p *process) each(do func(shard int, at, whole int64)) {
	for i := range p.layout.Len() {
		box, shape := p.layout.Box(i), p.catalog.Tensors[p.layout.Tensor(i)].Shape
		d := len(shape)
		at := slices.Clone(box[:d])
		for n := range box.Elements() {
			whole := int64(0)
			for k := range d {
				whole = whole*shape[k] + at[k]
			}
			do(i, n, whole)
			for k := d - 1; k >= 0; k-- {
				if at[k]++; at[k] < box[k]+box[d+k] {
					break
				}
				at[k] = box[k]
			}
		}
	}
}

func (p *process) nameOf(shard int) string { return p.catalog.Tensors[p.layout.Tensor(shard)].Name }

// copyAll carries out the copies of a part.
func copyAll(copies []plan.Copy, shards, buckets [][]int64, pack bool) {
	for _, c := range copies {
		at := c.Offset / 8
		for j := range c.N[1] {
			for i := range c.N[0] {
				for k := range c.Run / 8 {
					memory := &shards[c.Shard][(c.At+j*c.Stride[1]+i*c.Stride[0])/8+k]
					if pack {
						buckets[c.Bucket][at] = *memory
					} else {
						*memory = buckets[c.Bucket][at]
					}
					at++
				}
			}
		}
	}
}

// put keeps the buckets of a part, packed from some memory.
func (w *world) put(p *process, part plan.Part, copies []plan.Copy, shards [][]int64) (offers []Offer, buckets [][]int64) {
	for _, b := range part.Buckets {
		buckets = append(buckets, make([]int64, b.Bytes/8))
	}
	copyAll(copies, shards, buckets, true)
	for _, data := range buckets {
		w.last++
		w.values[w.last], w.owners[w.last] = data, p.ID
		offers = append(offers, Offer{Owner: p.ID, ID: w.last, Bytes: int64(8 * len(data))})
	}
	return offers, buckets
}

// begin begins a version, and fills the shards of the member with it.
func (w *world) begin(p *process, step int64, ranks ...int) (BeginAnswer, error) {
	a, _, ok := w.ask(func(to any) { w.s.Begin(w.now, to, p.ID, BeginRequest{Step: step, Plan: p.planID, Ranks: ranks}) })
	require.True(w.t, ok)
	if a.Err != nil {
		return BeginAnswer{}, a.Err
	}
	b := a.Value.(BeginAnswer)
	if b.Plan != p.planID {
		var err error
		p.part, err = plan.DecodePart(p.catalog, p.layout, b.Part)
		require.NoError(w.t, err)
		p.planID = b.Plan
	}
	p.each(func(shard int, at, whole int64) { p.shards[shard][at] = value(b.Version, p.nameOf(shard), whole) })
	return b, nil
}

// publish packs and publishes what was begun. Deltas are whole buckets here.
func (w *world) publish(p *process, b BeginAnswer, delta bool) error {
	offers, buckets := w.put(p, p.part, p.part.Copies(p.catalog, p.layout, p.memory), p.shards)
	content := Publication{Buckets: offers, Keep: delta}
	before := Version{}
	for v, h := range p.held {
		if h.Plan == p.planID && v.Compare(before) > 0 {
			before = v
		}
	}
	if delta && !before.IsZero() {
		content.Base = before
		for i := range buckets {
			w.last++
			w.values[w.last], w.owners[w.last] = buckets[i], p.ID
			content.Deltas = append(content.Deltas, Offer{Owner: p.ID, ID: w.last, Bytes: int64(len(buckets[i]))})
		}
	}
	p.held[b.Version] = Held{Version: b.Version, Ranks: b.Ranks, Plan: p.planID, Part: p.part.Encode(), Content: content}
	p.packed[b.Version], p.parts[b.Version] = buckets, p.part
	a, _, ok := w.ask(func(to any) {
		w.s.Publish(w.now, to, p.ID, PublishRequest{Version: b.Version, Plan: p.planID, Content: content})
	})
	require.True(w.t, ok)
	return a.Err
}

func (w *world) mustPublish(step int64, all ...*process) (v Version) {
	for _, p := range all {
		b, err := w.begin(p, step)
		require.NoError(w.t, err)
		require.NoError(w.t, w.publish(p, b, false))
		v = b.Version
	}
	return v
}

// cut carries out the requests to pack again.
func (w *world) cut() {
	for len(w.cuts) > 0 {
		c := w.cuts[0]
		w.cuts = w.cuts[1:]
		p := w.members[c.Member]
		if p == nil {
			continue
		}
		v := c.Request.Version
		require.Contains(w.t, p.packed, v, "a publisher is asked for what it has freed")
		layout, memory := asMemory(p.catalog, p.layout, p.parts[v])
		part, err := plan.DecodePart(p.catalog, layout, c.Request.Part)
		require.NoError(w.t, err)
		var shards [][]int64
		for _, q := range p.parts[v].Pieces {
			shards = append(shards, p.packed[v][q.Bucket][q.Offset/8:])
		}
		offers, _ := w.put(p, part, part.Copies(p.catalog, layout, memory), shards)
		w.s.CutDone(w.now, p.ID, c.Request.Number, offers, nil)
		w.run()
	}
}

// asMemory is the pieces of a part as shards.
func asMemory(c *plan.Catalog, l *plan.Layout, part plan.Part) (*plan.Layout, []plan.Memory) {
	return c.AsMemory(l, part)
}

// stage takes a version as far as it can be; done: it was answered.
func (w *world) stage(p *process, v Version) (got StageAnswer, to int, done bool, err error) {
	_, to, _ = w.ask(func(to any) { w.s.Stage(w.now, to, p.ID, StageRequest{Version: v, Part: p.partOf, Base: p.base}) })
	w.cut()
	a, done := w.answers[to]
	if !done {
		return got, to, false, nil
	}
	if a.Err != nil {
		return got, to, true, a.Err
	}
	got = a.Value.(StageAnswer)
	return got, to, true, w.fetch(p, got)
}

var errFreed = errors.New("a bucket was freed")

// fetch takes the buckets of an answer.
func (w *world) fetch(p *process, got StageAnswer) error {
	if got.PartName != p.partOf {
		part, err := plan.DecodePart(p.catalog, p.layout, got.Part)
		require.NoError(w.t, err)
		p.taken, p.partOf = part, got.PartName
	}
	steps := [][]Offer{got.Buckets}
	if len(got.Deltas) > 0 {
		steps = got.Deltas
	}
	var arena [][]int64
	for _, step := range steps {
		require.Len(w.t, step, len(p.taken.Buckets))
		arena = nil
		for i, o := range step {
			data := w.values[o.ID]
			if data == nil || w.members[o.Owner] == nil {
				return errFreed
			}
			require.Len(w.t, data, int(p.taken.Buckets[i].Bytes/8))
			arena = append(arena, data)
		}
	}
	p.arena, p.base = arena, got.Version
	return nil
}

// commit copies what was taken, reports it, and checks every element.
func (w *world) commit(p *process, v Version) {
	copyAll(p.taken.Copies(p.catalog, p.layout, p.memory), p.shards, p.arena, false)
	p.now = v
	for _, what := range []Done{Staged, Committed} {
		w.must(func(to any) { w.s.Report(w.now, to, p.ID, Report{Version: v, What: what}) })
	}
	p.each(func(shard int, at, whole int64) {
		require.Equal(w.t, value(v, p.nameOf(shard), whole), p.shards[shard][at], "%s has other values than %s", p.ID, v)
	})
}

func (w *world) take(p *process, v Version) {
	got, _, done, err := w.stage(p, v)
	require.NoError(w.t, err)
	require.True(w.t, done)
	require.Equal(w.t, v, got.Version)
	w.commit(p, v)
}

func trainer(rank, world int) Member {
	return Member{ID: fmt.Sprint("train-", rank), Role: "train", Incarnation: "a", Rank: rank, World: world, Host: "h1"}
}

func receiver(rank int) Member {
	return Member{ID: fmt.Sprint("infer-", rank), Role: "infer", Incarnation: "b", Rank: rank, World: 2, Host: "h1"}
}

var square = []int64{4, 4}

func rows(rank int64) map[string]plan.Box {
	return map[string]plan.Box{"a": {2 * rank, 0, 2, 4}, "b": {2 * rank, 0, 2, 4}}
}
func columns(rank int64) map[string]plan.Box {
	return map[string]plan.Box{"a": {0, 2 * rank, 4, 2}, "b": {0, 2 * rank, 4, 2}}
}

// four is a world of two trainers with rows and two receivers with columns.
func four(t *testing.T) (w *world, train, infer []*process) {
	w = newWorld(t)
	for i := range 2 {
		train = append(train, w.join(trainer(i, 2), square, rows(int64(i))))
		infer = append(infer, w.join(receiver(i), square, columns(int64(i))))
	}
	return w, train, infer
}

// TestPublishAndTake: rows become columns, version after version, and nothing older is kept.
func TestPublishAndTake(t *testing.T) {
	w, train, infer := four(t)
	for step := int64(5); step < 8; step++ {
		v := w.mustPublish(step, train...)
		require.Equal(t, Version{1, step}, v)
		for _, p := range infer {
			w.take(p, v)
		}
		require.Equal(t, []Version{v}, w.news.Available)
		require.Equal(t, []Version{v}, w.news.Kept)
		require.Empty(t, w.cuts)
	}
	require.Len(t, w.values, 4, "memory of older versions is not freed")
	require.Equal(t, []uint64{1}, w.epochs)
}

// TestOneThatJoinsLate: a receiver with a layout that nobody knew takes the newest version, packed for it; one whose layout is known
// takes what is there.
func TestOneThatJoinsLate(t *testing.T) {
	w, train, _ := four(t)
	v := w.mustPublish(1, train...)
	late := w.join(receiver(7), square, columns(0))
	w.take(late, Version{1, 1})
	require.Len(t, w.values, 4, "what is known is not packed again")
	whole := w.join(Member{ID: "whole", Role: "judge", Host: "h2"}, square, map[string]plan.Box{"a": {0, 0, 4, 4}})
	w.take(whole, v)
	require.Len(t, w.values, 6)
}

// TestPublishedBeforeAnyReceiver: the first version is packed by the trainers' own layouts; a receiver with the same layout takes it
// as it is.
func TestPublishedBeforeAnyReceiver(t *testing.T) {
	w := newWorld(t)
	first := w.join(trainer(0, 2), square, rows(0))
	b, err := w.begin(first, 1)
	require.NoError(t, err)
	require.NoError(t, w.publish(first, b, false))
	second := w.join(trainer(1, 2), square, rows(1))
	require.Empty(t, w.news.Available)
	v := w.mustPublish(1, second)
	require.Equal(t, []Version{v}, w.news.Available)
	same := w.join(receiver(0), square, rows(1))
	w.take(same, v)
	require.Len(t, w.values, 2, "nothing was packed again")
	other := w.join(receiver(1), square, columns(1))
	w.take(other, v)
}

// TestStageWaitsForTheLastRank: a request is answered when the version is complete; one that is given up says what it waits for.
func TestStageWaitsForTheLastRank(t *testing.T) {
	w, train, infer := four(t)
	w.mustPublish(1, train[0])
	_, to, done, _ := w.stage(infer[0], Version{1, 1})
	require.False(t, done)
	_, newest, done, _ := w.stage(infer[1], Version{})
	require.False(t, done)
	w.s.Cancel(to)
	w.run()
	require.ErrorContains(t, w.answers[to].Err, "step 1 of epoch 1 waits for rank 1 to publish it")
	require.ErrorIs(t, w.answers[to].Err, wire.ErrTimedOut)
	v := w.mustPublish(1, train[1])
	got := w.answers[newest]
	require.NoError(t, got.Err)
	require.Equal(t, v, got.Value.(StageAnswer).Version)
}

// TestAVersionIsKeptForThoseThatTakeIt: a newer version does not free an older one while a receiver takes it; the end of the receiver does.
func TestAVersionIsKeptForThoseThatTakeIt(t *testing.T) {
	for _, end := range []string{"committed", "gone", "given up"} {
		t.Run(end, func(t *testing.T) {
			w, train, infer := four(t)
			old := w.mustPublish(1, train...)
			_, _, done, err := w.stage(infer[0], old)
			require.NoError(t, err)
			require.True(t, done)
			v := w.mustPublish(2, train...)
			require.Equal(t, []Version{old, v}, w.news.Kept)
			switch end {
			case "committed":
				w.commit(infer[0], old)
			case "gone":
				w.s.Gone(w.now, infer[0].ID, "killed")
				w.run()
			default:
				w.s.Lasting(w.now, infer[0].ID, nil)
				w.run()
			}
			require.Equal(t, []Version{v}, w.news.Kept)
			_, _, _, err = w.stage(infer[1], old)
			require.ErrorIs(t, err, ErrSuperseded)
			require.ErrorContains(t, err, "step 1 of epoch 1 was replaced by step 2 of epoch 1")
		})
	}
}

// TestALostPublisher: what it has not completed is given up, what it has published cannot be taken any more, and those that go on
// publish in the next epoch with the process that replaces it.
func TestALostPublisher(t *testing.T) {
	w, train, infer := four(t)
	v := w.mustPublish(1, train...)
	w.take(infer[0], v)
	b, err := w.begin(train[0], 2)
	require.NoError(t, err)
	_, to, done, _ := w.stage(infer[0], Version{1, 2})
	require.False(t, done)
	delete(w.members, train[1].ID)
	w.s.Gone(w.now, train[1].ID, "killed by SIGKILL")
	w.run()
	require.ErrorContains(t, w.answers[to].Err, "rank 1 of train has ended: killed by SIGKILL")
	require.Empty(t, w.news.Available)
	_, _, _, err = w.stage(infer[1], v)
	require.Error(t, err)
	err = w.publish(train[0], b, false)
	require.ErrorContains(t, err, "step 2 of epoch 1 was given up: rank 1 of train has ended")

	next := trainer(1, 2)
	next.ID, next.Gen = "train-1-again", 1
	again := w.join(next, square, rows(1))
	v = w.mustPublish(2, train[0], again)
	require.Equal(t, Version{2, 2}, v)
	for _, p := range infer {
		w.take(p, v)
	}
	old := w.join(trainer(1, 2), square, rows(1)) // it was cut off, and comes back
	_, err = w.begin(old, 3)
	require.ErrorIs(t, err, wire.ErrFenced)
}

// TestEpochs: a role that was started again may repeat steps, in a later epoch; another role may not publish beside it; a rank may not
// publish a step twice.
func TestEpochs(t *testing.T) {
	w, train, infer := four(t)
	v := w.mustPublish(9, train...)
	_, err := w.begin(train[0], 9)
	require.ErrorContains(t, err, "is not newer than step 9 of epoch 1")
	other := w.join(Member{ID: "other", Role: "other", World: 1}, square, map[string]plan.Box{"a": {0, 0, 4, 4}})
	_, err = w.begin(other, 10)
	require.ErrorContains(t, err, `weights "policy" are published by role train`)
	w.take(infer[0], v)
	var again []*process
	for i := range 2 {
		m := trainer(i, 2)
		m.ID, m.Incarnation = fmt.Sprint("again-", i), "a2"
		again = append(again, w.join(m, square, rows(int64(i))))
	}
	v = w.mustPublish(3, again...)
	require.Equal(t, Version{2, 3}, v)
	w.take(infer[0], v)
	_, err = w.begin(train[0], 10)
	require.ErrorIs(t, err, wire.ErrFenced)
	b, err := w.begin(again[0], 4, 0)
	require.NoError(t, err)
	_, err = w.begin(again[1], 4)
	require.ErrorContains(t, err, "another rank publishes step 4 of epoch 2 for the ranks [0]")
	require.NoError(t, w.publish(again[0], b, false))
	_, err = w.begin(again[0], 5, 1)
	require.ErrorContains(t, err, "rank 0 cannot publish for the ranks [1]")
}

// TestDeltasAreTaken: a receiver that has kept a version takes what changed since, over several versions, and one that has not takes
// the whole.
func TestDeltasAreTaken(t *testing.T) {
	w, train, infer := four(t)
	publish := func(step int64) (v Version) {
		for _, p := range train {
			b, err := w.begin(p, step)
			require.NoError(t, err)
			require.NoError(t, w.publish(p, b, true))
			v = b.Version
		}
		return v
	}
	w.take(infer[0], publish(1))
	for step := int64(2); step < 5; step++ {
		publish(step)
	}
	got, _, _, err := w.stage(infer[0], Version{1, 4})
	require.NoError(t, err)
	require.Len(t, got.Deltas, 3)
	w.commit(infer[0], got.Version)
	got, _, _, err = w.stage(infer[1], Version{1, 4})
	require.NoError(t, err)
	require.Empty(t, got.Deltas)
	w.commit(infer[1], got.Version)
	for step := int64(5); step < 40; step++ { // deltas have an eighth of the bytes here
		publish(step)
	}
	require.Len(t, w.news.Deltas, 6)
	got, _, _, err = w.stage(infer[0], Version{1, 39})
	require.NoError(t, err)
	require.Empty(t, got.Deltas, "the deltas since are more than the whole")
	w.commit(infer[0], got.Version)
}

// TestAnotherModelUnderTheName: processes that have ended do not fix the shapes of those that follow.
func TestAnotherModelUnderTheName(t *testing.T) {
	w, train, infer := four(t)
	w.mustPublish(1, train...)
	for _, p := range append(train, infer...) {
		delete(w.members, p.ID)
		w.s.Gone(w.now, p.ID, "ended")
	}
	w.run()
	larger := []int64{6, 4}
	whole := map[string]plan.Box{"a": {0, 0, 6, 4}}
	m := trainer(0, 1)
	m.ID, m.Incarnation = "new", "z"
	p := w.join(m, larger, whole)
	q := w.join(receiver(0), larger, whole)
	w.take(q, w.mustPublish(1, p))
	_, _, _ = w.ask(func(to any) {
		w.s.Bind(w.now, to, BindRequest{Member: receiver(3), Layout: plan.EncodeLayout(train[0].catalog, train[0].layout)})
	})
	require.ErrorContains(t, w.answers[w.asked].Err, `tensor "a": its shape as a whole is [4 4] here and [6 4] elsewhere`)
}

// TestMistakesAreNamed: of a receiver, without harm to the others.
func TestMistakesAreNamed(t *testing.T) {
	w, train, infer := four(t)
	wrong := w.join(receiver(5), square, map[string]plan.Box{"a": {0, 0, 4, 4}, "lora": {0, 0, 4, 4}})
	v := w.mustPublish(1, train...)
	_, _, _, err := w.stage(wrong, v)
	require.ErrorContains(t, err, `weights "policy": tensor "lora": no process that publishes has it`)
	w.take(infer[0], v)
	_, _, ok := w.ask(func(to any) { w.s.Stage(w.now, to, "nobody", StageRequest{}) })
	require.True(t, ok)
	require.ErrorIs(t, w.answers[w.asked].Err, ErrUnbound)
}

// TestStatus: what operators see.
func TestStatus(t *testing.T) {
	w, train, infer := four(t)
	v := w.mustPublish(1, train...)
	w.take(infer[0], v)
	w.now = w.now.Add(3 * time.Second)
	b, err := w.begin(train[0], 2)
	require.NoError(t, err)
	require.NoError(t, w.publish(train[0], b, false))
	s := w.s.Status(w.now)
	require.Equal(t, "train", s.Publisher)
	require.Equal(t, 1, s.Versions[0].Has)
	require.Equal(t, "complete", s.Versions[0].State)
	require.Equal(t, []int{1}, s.Versions[1].Missing)
	require.Equal(t, []string{"infer-0", "infer-1", "train-0", "train-1"}, []string{s.Members[0].ID, s.Members[1].ID, s.Members[2].ID, s.Members[3].ID})
	require.Equal(t, 0, s.Members[0].Lag)
	require.Equal(t, 1, s.Members[1].Lag)
	require.True(t, s.Members[2].Publishes)
	require.Equal(t, []int{2, 2, 1, 1}, []int{s.Publishers, s.Receivers, s.Current, s.Lag})
}

// TestHistories: whatever happens in whatever order, no receiver ever has a mix of versions, or values that nobody published; epochs
// and versions are never given twice; and when all is quiet the newest version can be taken by all.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		h := &history{world: w, next: map[string]int{}, began: map[string]BeginAnswer{}, seen: map[Version]bool{}, gens: map[int]uint32{}}
		for range rapid.IntRange(5, 60).Draw(t, "events") {
			h.event(t)
		}
		h.quiet(t)
	})
}

// history draws events.
type history struct {
	*world
	next  map[string]int
	began map[string]BeginAnswer
	seen  map[Version]bool
	gens  map[int]uint32
	step  int64
	inc   int
}

func (h *history) event(t *rapid.T) {
	h.now = h.now.Add(time.Second)
	switch rapid.SampledFrom([]string{"trainer", "trainer", "receiver", "begin", "begin", "publish", "publish", "publish", "stage", "stage", "commit", "kill", "service", "restart", "step", "lasting"}).Draw(t, "event") {
	case "trainer":
		h.addTrainer(rapid.IntRange(0, 1).Draw(t, "rank"))
	case "receiver":
		h.addReceiver(rapid.IntRange(0, 3).Draw(t, "layout"))
	case "begin":
		if p := h.draw(t, "train"); p != nil {
			if b, err := h.begin(p, h.step+1); err == nil {
				h.began[p.ID] = b
			}
		}
	case "publish":
		if p := h.draw(t, "train"); p != nil && !h.began[p.ID].Version.IsZero() {
			b := h.began[p.ID]
			delete(h.began, p.ID)
			_ = h.publish(p, b, rapid.Bool().Draw(t, "delta"))
		}
	case "stage":
		if p := h.draw(t, "infer"); p != nil {
			v := Version{}
			if n := len(h.news.Kept); n > 0 && rapid.Bool().Draw(t, "named") {
				v = h.news.Kept[rapid.IntRange(0, n-1).Draw(t, "which")]
			}
			got, _, done, err := h.stage(p, v)
			if done && err == nil {
				p.staged = map[Version]bool{got.Version: true}
			}
		}
	case "commit":
		if p := h.draw(t, "infer"); p != nil {
			for v := range p.staged {
				h.commit(p, v)
			}
			p.staged = nil
		}
	case "lasting":
		if p := h.draw(t, "infer"); p != nil {
			h.s.Lasting(h.now, p.ID, slices.Collect(maps.Keys(p.staged)))
			h.run()
		}
	case "kill":
		if p := h.draw(t, rapid.SampledFrom([]string{"train", "infer"}).Draw(t, "role")); p != nil {
			delete(h.members, p.ID)
			h.s.Gone(h.now, p.ID, "killed")
			h.run()
		}
	case "service":
		h.restartService()
	case "restart":
		h.inc++
		h.gens = map[int]uint32{}
	case "step":
		h.step++
	}
	for _, v := range h.news.Available {
		h.seen[v] = true
	}
}

func (h *history) draw(t *rapid.T, role string) *process {
	var all []string
	for id, p := range h.members {
		if p.Role == role {
			all = append(all, id)
		}
	}
	if len(all) == 0 {
		return nil
	}
	slices.Sort(all)
	return h.members[rapid.SampledFrom(all).Draw(t, "member")]
}

func (h *history) id(role string) string {
	h.next[role]++
	return fmt.Sprint(role, "-", h.next[role])
}

func (h *history) addTrainer(rank int) *process {
	h.gens[rank]++
	m := trainer(rank, 2)
	m.ID, m.Incarnation, m.Gen = h.id("train"), fmt.Sprint("inc", h.inc), h.gens[rank]
	return h.join(m, square, rows(int64(rank)))
}

func (h *history) addReceiver(layout int) *process {
	m := receiver(0)
	m.ID, m.Host = h.id("infer"), fmt.Sprint("h", layout%2)
	boxes := []map[string]plan.Box{columns(0), columns(1), rows(1), {"a": {0, 0, 4, 4}}}[layout]
	return h.join(m, square, boxes)
}

// restartService replaces the service by one that knows what members say, and the number of the epoch.
func (h *history) restartService() {
	h.service++
	epoch := uint64(0)
	if n := len(h.epochs); n > 0 {
		epoch = h.epochs[n-1]
	}
	h.s, h.cuts = New("policy", fmt.Sprint("s", h.service), epoch), nil
	for _, id := range slices.Sorted(maps.Keys(h.members)) {
		h.bind(h.members[id])
	}
}

// quiet ends the history: a new set of trainers publishes, and every receiver takes it.
func (h *history) quiet(t *rapid.T) {
	h.inc++
	h.gens = map[int]uint32{}
	h.addReceiver(0)
	var v Version
	trainers := []*process{h.addTrainer(0), h.addTrainer(1)}
	for _, p := range trainers {
		b, err := h.begin(p, 1)
		require.NoError(t, err)
		require.NoError(t, h.publish(p, b, false))
		v = b.Version
	}
	require.False(t, h.seen[v], "a version was given twice")
	require.Contains(t, h.news.Available, v)
	for _, p := range h.members {
		if p.Role == "infer" {
			h.take(p, v)
		}
	}
	require.Equal(t, []Version{v}, h.news.Kept)
}
