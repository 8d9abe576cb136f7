package weights

import (
	"context"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/weights/plan"
	"troupe/weights/versions"
)

// TestPublishStageCommit: rows become columns; nothing changes before the commit; memory of older versions is freed.
func TestPublishStageCommit(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	train, infer := c.four()
	for step := int64(1); step < 5; step++ {
		v := publishAll(step, Full, train...)
		for _, p := range infer {
			got, err := p.w.Stage(p.ctxOf(), v)
			require.NoError(t, err)
			require.Equal(t, v, got)
			if step > 1 {
				p.has(step - 1)
			}
			require.NoError(t, p.w.Commit(p.ctxOf(), v))
			p.has(step)
			require.Equal(t, v, p.w.Version())
		}
	}
	for _, p := range train {
		until(t, "older versions are freed", func() bool { return p.memory.InUse() == 2 && p.store.References().Owned() == 2 })
	}
	for _, p := range infer {
		until(t, "what was staged is freed", func() bool { return p.memory.InUse() == 0 && p.store.References().Held() == 0 })
		require.Equal(t, 0, p.w.Lag())
	}
	until(t, "the service knows who has the version", func() bool {
		st, err := infer[0].Status(infer[0].ctxOf(), "policy")
		require.NoError(t, err)
		return st.Versions[0].Has == 2
	})
	all, err := Overviews(t.Context(), c.bus)
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, "policy", all[0].Name)
	require.Equal(t, 2, all[0].Current)
	require.Empty(t, all[0].Members)
}

// TestCommitRefusesWhatIsNotStaged: another version, nothing, or tensors that were bound since.
func TestCommitRefusesWhatIsNotStaged(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	train, infer := c.four()
	p := infer[0]
	v := publishAll(3, Full, train...)
	require.ErrorContains(t, p.w.Commit(p.ctxOf(), v), `weights "policy": step 3 of epoch 1 cannot be committed: nothing is staged`)
	_, err := p.w.Stage(p.ctxOf(), v)
	require.NoError(t, err)
	other := versions.Version{Epoch: 2, Step: 3}
	require.ErrorContains(t, p.w.Commit(p.ctxOf(), other), "step 3 of epoch 2 cannot be committed: step 3 of epoch 1 is staged")
	p.bind(square, columns(1))
	require.ErrorIs(t, p.w.Commit(p.ctxOf(), v), bus.ErrRefused)
	p.take(v)
}

// TestAJoinerTakesTheNewest: with a layout that is known, and with one that is not, for which publishers pack again.
func TestAJoinerTakesTheNewest(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	train, infer := c.four()
	publishAll(1, Full, train...)
	v := publishAll(2, Full, train...)
	infer[0].take(v)
	late := c.start(member("late", 0, 1))
	late.bind(square, columns(1))
	late.take(versions.Version{})
	require.Equal(t, v, late.w.Version())
	whole := c.start(member("judge", 0, 1))
	whole.bind(square, map[string]plan.Box{"b": {0, 0, 512, 256}})
	whole.take(versions.Version{})
	publishAll(3, Full, train...)
	for _, p := range append(infer, late, whole) {
		p.take(versions.Version{})
	}
	for _, p := range train {
		until(t, "what was packed again is freed", func() bool { return p.store.References().Owned() <= 3 })
	}
}

// TestStageWaits: for the last rank, until its context ends; and for the first version.
func TestStageWaits(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	train, infer := c.four()
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	_, err := infer[0].w.Stage(ctx, versions.Version{})
	require.ErrorIs(t, err, bus.ErrTimedOut)
	require.ErrorContains(t, err, "no version was published yet")
	train[0].publish(1, Full)
	done := make(chan error, 1)
	go func() {
		_, err := infer[1].w.Stage(infer[1].ctxOf(), versions.Version{Epoch: 1, Step: 1})
		done <- err
	}()
	ctx, cancel = context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	_, err = infer[0].w.Stage(ctx, versions.Version{Epoch: 1, Step: 1})
	require.ErrorContains(t, err, "waits for rank 1 to publish it")
	train[1].publish(1, Full)
	require.NoError(t, <-done)
}

// TestNextIsTold: what waits for a version is told, and what can be taken is known without a question.
func TestNextIsTold(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	train, infer := c.four()
	got := make(chan versions.Version, 1)
	go func() {
		v, err := infer[0].w.Next(infer[0].ctxOf(), versions.Version{})
		if err == nil {
			got <- v
		}
	}()
	v := publishAll(1, Full, train...)
	require.Equal(t, v, <-got)
	require.Equal(t, []versions.Version{v}, infer[0].w.Available())
	require.Equal(t, 1, infer[0].w.Lag())
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err := infer[0].w.Next(ctx, v)
	require.ErrorContains(t, err, "no version newer than step 1 of epoch 1")
}

// TestDeltas: receivers that have kept a version take what changed, bit for bit, over several versions; others take the whole.
func TestDeltas(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	train, infer := c.four()
	change := func(step int64) versions.Version {
		var v versions.Version
		for _, p := range train {
			p.each(func(name string, at int, whole int64) {
				if step == 1 || whole%97 == step {
					p.tensors[name][at] = byte(step)
				}
			})
			var err error
			v, err = p.w.Publish(p.ctxOf(), step, Delta, nil)
			require.NoError(t, err)
		}
		return v
	}
	same := func(p *proc) {
		t.Helper()
		p.each(func(name string, at int, whole int64) {
			row := whole / 256
			from := train[row/256].tensors[name]
			require.Equal(t, from[4*(whole-row/256*256*256)], p.tensors[name][at])
		})
	}
	take := func(p *proc, v versions.Version) map[string]int64 {
		t.Helper()
		b := p.w.all()[0]
		_, err := p.w.Stage(p.ctxOf(), v)
		require.NoError(t, err)
		require.NoError(t, p.w.Commit(p.ctxOf(), v))
		same(p)
		var bytes map[string]int64
		until(t, "the report arrives", func() bool {
			st, err := p.Status(p.ctxOf(), "policy")
			require.NoError(t, err)
			for _, m := range st.Members {
				if m.ID == b.member.ID && m.Committed == v {
					bytes = m.Bytes
				}
			}
			return bytes != nil
		})
		return bytes
	}
	take(infer[0], change(1))
	for step := int64(2); step < 5; step++ {
		change(step)
	}
	v := change(5)
	bytes := take(infer[0], v)
	require.Equal(t, int64(2*512*128*4), bytes["host"], "the first version, as a whole")
	require.Less(t, bytes["delta host"], int64(60_000))
	require.Positive(t, bytes["delta host"])
	require.Zero(t, take(infer[1], v)["delta host"], "one that has kept nothing takes the whole")
	take(infer[0], change(6))
	train[0].memory.InUse()
	for _, p := range train {
		until(t, "deltas that lead nowhere are freed", func() bool { return p.store.References().Owned() < 40 })
	}
}

// TestAKilledReceiver: it holds back neither the others nor the memory of what it was taking.
func TestAKilledReceiver(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	train, infer := c.four()
	v := publishAll(1, Full, train...)
	dead := c.start(member("infer", 2, 3))
	dead.bind(square, columns(0))
	_, err := dead.w.bindings[versions.Any].locate(dead.ctxOf(), v) // it dies while it takes the version
	require.NoError(t, err)
	v = publishAll(2, Full, train...)
	until(t, "both versions are kept", func() bool { return len(train[0].w.Available()) == 2 })
	dead.kill(c.bus)
	for _, p := range infer {
		p.take(v)
	}
	for _, p := range train {
		until(t, "the older version is freed", func() bool { return p.memory.InUse() == 2 })
	}
	infer[0].take(publishAll(3, Full, train...))
}

// TestAKilledPublisher: what it has not completed is given up with the reason; the process that replaces it publishes in the next epoch.
func TestAKilledPublisher(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	train, infer := c.four()
	v := publishAll(1, Full, train...)
	infer[0].take(v)
	train[0].publish(2, Full)
	failed := make(chan error, 1)
	go func() {
		_, err := infer[0].w.Stage(infer[0].ctxOf(), versions.Version{Epoch: 1, Step: 2})
		failed <- err
	}()
	until(t, "the request waits", func() bool { st, _ := train[0].Status(train[0].ctxOf(), "policy"); return len(st.Versions) == 2 })
	train[1].kill(c.bus)
	require.ErrorContains(t, <-failed, "killed by SIGKILL")
	require.Equal(t, v, infer[0].w.Version())
	infer[0].has(1)
	m := member("train", 1, 2)
	m.Gen = 1
	again := c.start(m)
	again.bind(square, rows(1))
	v = publishAll(2, Full, train[0], again)
	require.Equal(t, versions.Version{Epoch: 2, Step: 2}, v)
	for _, p := range infer {
		p.take(v)
	}
}

// TestTheServiceIsReplaced: members say what they have, and nothing is lost: neither what was published nor the number of the epoch.
func TestTheServiceIsReplaced(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	train, infer := c.four()
	v := publishAll(4, Full, train...)
	infer[0].take(v)
	c.restart()
	infer[1].take(v) // the processes that published it bind again when they renew
	require.Equal(t, versions.Version{Epoch: 1, Step: 4}, infer[1].w.Version())
	v = publishAll(5, Full, train...)
	c.restart()
	for _, p := range infer {
		p.take(v)
	}
	_, err := train[0].w.Publish(train[0].ctxOf(), 5, Full, nil)
	require.ErrorIs(t, err, bus.ErrExists)
	for _, p := range train {
		until(t, "older versions are freed", func() bool { return p.memory.InUse() == 2 })
	}
}

// TestAnEpochIsNeverGivenAgain: not even when all processes and the service have ended.
func TestAnEpochIsNeverGivenAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	p := c.start(member("train", 0, 1))
	p.bind(square, rows(0))
	require.Equal(t, uint64(1), p.publish(1, Full).Epoch)
	p.kill(nil)
	c.restart()
	m := member("train", 0, 1)
	m.Incarnation = "train-2"
	p = c.start(m)
	p.bind(square, rows(0))
	require.Equal(t, uint64(2), p.publish(1, Full).Epoch)
}

// TestManyTensors: layouts and plans that do not fit into a message travel as values.
func TestManyTensors(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const n = 6000
	boxes := map[string]plan.Box{}
	for i := range n {
		boxes[fmt.Sprintf("%c.layers.%d.mlp.experts.%d.down_proj.weight", 'a'+i%7, i/64, i%64)] = plan.Box{0, 0, 4, 4}
	}
	shape := []int64{4, 4}
	p := c.start(member("train", 0, 1))
	p.bind(shape, boxes)
	q := c.start(member("infer", 0, 1))
	half := map[string]plan.Box{}
	for name := range boxes {
		half[name] = plan.Box{1, 1, 2, 3}
	}
	q.bind(shape, half)
	for step := int64(1); step < 4; step++ {
		q.take(p.publish(step, Full))
	}
	require.Greater(t, len(p.w.all()[0].encoded), largest/4)
}

// TestAnEngineLoadsByName: it learns which tensors there are, takes them whole, and gets them one after the other.
func TestAnEngineLoadsByName(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	train, _ := c.four()
	engine := c.start(member("engine", 0, 1))
	ctx, cancel := context.WithTimeout(t.Context(), 600*time.Millisecond)
	defer cancel()
	_, err := engine.w.Catalog(ctx)
	require.ErrorContains(t, err, "nothing was published yet")
	v := publishAll(1, Full, train...)
	all, err := engine.w.Catalog(engine.ctxOf())
	require.NoError(t, err)
	require.Len(t, all, 2)
	var tensors []Tensor
	for _, one := range all {
		tensors = append(tensors, Tensor{Name: one.Name, DType: one.DType, ItemSize: one.ItemSize, Shape: one.Shape})
	}
	require.NoError(t, engine.w.Bind(engine.ctxOf(), versions.Take, tensors))
	_, err = engine.w.Stage(engine.ctxOf(), v)
	require.NoError(t, err)
	own := make([]uint32, 512*256)
	for i, one := range all {
		require.NoError(t, engine.w.Fill(v, i, []unsafe.Pointer{unsafe.Pointer(&own[0])}))
		for at, got := range own {
			require.Equal(t, content(1, one.Name, int64(at)), got)
		}
	}
	require.ErrorContains(t, engine.w.Fill(v, 2, []unsafe.Pointer{unsafe.Pointer(&own[0])}), "tensors 2 to 3 of 2")
	require.NoError(t, engine.w.Loaded(v, time.Second, fmt.Errorf("a shape")))
	require.Zero(t, engine.w.Version())
	require.NoError(t, engine.w.Loaded(v, time.Second, nil))
	require.Equal(t, v, engine.w.Version())
	until(t, "what was staged is freed", func() bool { return engine.memory.InUse() == 0 })
}

// TestOneProcessPublishesAndTakes: with two sets of tensors, as a trainer and its engine in one process have.
func TestOneProcessPublishesAndTakes(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	p := c.start(member("both", 0, 1))
	p.bind(square, rows(0))
	from := p.bound
	require.NoError(t, p.w.Bind(p.ctxOf(), versions.Publish, from))
	p.fill(9)
	own := make([]byte, len(p.tensors["a"]))
	to := []Tensor{{Name: "a", DType: "float32", ItemSize: 4, Shape: square, Box: plan.Box{0, 0, 256, 256}, Pointer: unsafe.Pointer(&own[0]), Strides: []int64{1024, 4}}}
	require.NoError(t, p.w.Bind(p.ctxOf(), versions.Take, to))
	v, err := p.w.Publish(p.ctxOf(), 9, Full, nil)
	require.NoError(t, err)
	_, err = p.w.Stage(p.ctxOf(), v)
	require.NoError(t, err)
	require.NoError(t, p.w.Commit(p.ctxOf(), v))
	require.Equal(t, p.tensors["a"], own)
}

// TestMistakes: each names what is wrong.
func TestMistakes(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	train, infer := c.four()
	_, err := c.start(member("x", 0, 1)).w.Publish(t.Context(), 1, Full, nil)
	require.ErrorContains(t, err, `weights "policy": no tensors are bound to publish`)
	_, err = train[0].Open("no name")
	require.ErrorIs(t, err, bus.ErrInvalid)
	_, err = train[0].w.Publish(t.Context(), 1, "most", nil)
	require.ErrorContains(t, err, "give full, delta or auto")
	p := c.start(member("x", 0, 1))
	err = p.tryBind([]int64{3}, map[string]plan.Box{"a": {0, 3}})
	require.ErrorContains(t, err, `tensor "a": its shape as a whole is [3] here and [512 256] elsewhere`)
	p.bind([]int64{3}, map[string]plan.Box{"lora": {0, 3}})
	v := publishAll(1, Full, train...)
	_, err = p.w.Stage(p.ctxOf(), v)
	require.ErrorContains(t, err, `tensor "lora": no process that publishes has it`)
	infer[0].take(v)
}

// TestWithoutAService: the error names the remedy, and comes when the caller's patience ends.
func TestWithoutAService(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	p := c.start(member("train", 0, 1))
	c.stop()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := p.w.Bind(ctx, versions.Any, nil)
	require.ErrorContains(t, err, "the service of weights has not answered")
	c.serve()
}
