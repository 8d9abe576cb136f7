package main

/*
#include <stdint.h>
*/
import "C"

import (
	"context"
	"errors"
	"os"
	"strings"
	"unsafe"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/roles"
	"troupe/weights"
	"troupe/weights/plan"
	"troupe/weights/versions"
)

// ofWeights is of requests about the weights of a name in this process.
type ofWeights struct {
	ofRuntime
	Name string `msgpack:"name"`
}

func (q ofWeights) find(c *core) (*weights.Weights, error) {
	client, err := c.weightsClient(q.Runtime)
	if err != nil {
		return nil, err
	}
	return client.Open(q.Name)
}

type (
	weightsRequest struct{ ofWeights }
	// weightsBindRequest has tensors whose memory stays in place until another bind or the end of the runtime.
	weightsBindRequest struct {
		ofWeights
		Use     versions.Use    `msgpack:"use"`
		Tensors []weightsTensor `msgpack:"tensors"`
		Device  string          `msgpack:"device,omitempty"`  // that has all of them; empty: they are in memory of the host
		Binding uint64          `msgpack:"binding,omitempty"` // by which orders to move their bytes name them
	}
	weightsPublishRequest struct {
		ofWeights
		within
		Step  int64        `msgpack:"step"`
		Mode  weights.Mode `msgpack:"mode"`
		Ranks []int        `msgpack:"ranks"`
	}
	weightsStageRequest struct {
		ofWeights
		within
		Version versions.Version `msgpack:"version"`
		Whole   bool             `msgpack:"whole"` // an engine loads by name
		Epoch   uint64           `msgpack:"epoch"` // whose tensors are bound for it; 0: none are
	}
	weightsCommitRequest struct {
		ofWeights
		Version versions.Version `msgpack:"version"`
	}
	weightsFillRequest struct {
		ofWeights
		Version   versions.Version `msgpack:"version"`
		First     int              `msgpack:"first"`     // number of the first tensor
		Addresses []uint64         `msgpack:"addresses"` // where it and those that follow it are written, as a whole
	}
	weightsLoadedRequest struct {
		ofWeights
		Version versions.Version `msgpack:"version"`
		Took    float64          `msgpack:"took,omitempty"` // seconds
		Failure string           `msgpack:"failure,omitempty"`
	}
	weightsNextRequest struct {
		ofWeights
		within
		Version versions.Version `msgpack:"version"`
	}
)

// weightsTensor is a tensor of the caller, or a part of one.
type weightsTensor struct {
	Name     string  `msgpack:"name"`
	DType    string  `msgpack:"dtype"`
	ItemSize int     `msgpack:"item_size"`
	Shape    []int64 `msgpack:"shape"`
	Start    []int64 `msgpack:"start"`
	Size     []int64 `msgpack:"size"`
	Address  uint64  `msgpack:"address"` // in memory of the host, or of the device of the binding
	Strides  []int64 `msgpack:"strides"`
}

func (t weightsTensor) tensor(onDevice bool) weights.Tensor {
	out := weights.Tensor{Name: t.Name, DType: t.DType, ItemSize: t.ItemSize, Shape: t.Shape, Box: plan.NewBox(t.Start, t.Size), Strides: t.Strides}
	if onDevice {
		out.Address = int64(t.Address)
	} else {
		out.Pointer = pointerAt(t.Address)
	}
	return out
}

// pointerAt is an address of the caller's memory, which is none of Go's.
func pointerAt(address uint64) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }

// weightsState is what a process knows of a name without a question.
type weightsState struct {
	Version   versions.Version   `msgpack:"version"`
	Available []versions.Version `msgpack:"available"`
	Lag       int                `msgpack:"lag"`
}

// weightsClient is the client of a runtime.
func (c *core) weightsClient(runtime uint64) (*weights.Client, error) {
	rt, err := c.runtime(runtime)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if client := c.weights[runtime]; client != nil {
		return client, nil
	}
	if c.runtimes[runtime] == nil { // it was closed meanwhile
		return nil, bus.Errorf(bus.CodeClosed, "this session is closed; call troupe.init() again")
	}
	mover := newDeviceMover()
	client, err := weights.NewClient(weights.ClientConfig{
		Bus: rt.Bus(), Namespace: rt.Namespace(), Session: rt.Session(), References: rt.References(), Memory: c.memory, AllocFunc: c.memory.makeShared,
		Device: mover, Member: c.memberLocked(rt), Logger: c.log,
	})
	if err == nil {
		c.weights[runtime], c.movers[runtime] = client, mover
	}
	return client, err
}

// memberLocked says who this process is.
func (c *core) memberLocked(rt *roles.Runtime) versions.Member {
	m := versions.Member{Incarnation: rt.Session(), World: 1, Host: c.memory.shared.host(rt.Session())}
	if c.worker != nil && c.worker.process.Runtime() == rt {
		a := c.worker.process.Assignment
		m.Role, m.Incarnation, m.Rank, m.World, m.Gen = a.Role, a.Incarnation, a.Rank, a.World, a.Gen
	}
	return m
}

// host names the processes with which this one shares memory.
func (s *sharedMemory) host(session string) string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if s.off || err != nil {
		return session
	}
	return strings.TrimSpace(string(boot)) + s.cfg.Dir
}

// makeShared is memory of this process for a body that others of the host use in place; nil: out of memory.
func (m *memory) makeShared(n int) []byte {
	if n <= values.MaxInline {
		return make([]byte, n)
	}
	body := m.shared.alloc(n)
	if body == nil {
		return m.Make(n)
	}
	m.add(&block{room: body, origin: fromArena})
	return body
}

// closeWeights ends what a runtime has of weights, before its session.
func (c *core) closeWeights(runtime uint64) {
	c.mu.Lock()
	client, mover := c.weights[runtime], c.movers[runtime]
	delete(c.weights, runtime)
	delete(c.movers, runtime)
	c.mu.Unlock()
	if client != nil {
		close(mover.ended)
		client.Close()
	}
}

func (c *core) closeAllWeights() {
	c.mu.Lock()
	var all []uint64
	for id := range c.weights {
		all = append(all, id)
	}
	c.mu.Unlock()
	for _, id := range all {
		c.closeWeights(id)
	}
}

func (c *core) weightsBind(ctx context.Context, w *weights.Weights, r weightsBindRequest) error {
	tensors := make([]weights.Tensor, len(r.Tensors))
	for i, t := range r.Tensors {
		tensors[i] = t.tensor(r.Device != "")
	}
	if r.Device == "" {
		return w.Bind(ctx, r.Use, tensors)
	}
	return w.BindOn(ctx, r.Use, tensors, &weights.DeviceTensors{ID: r.Binding, Name: r.Device})
}

func (c *core) weightsPublish(ctx context.Context, w *weights.Weights, r weightsPublishRequest) (versions.Version, error) {
	return w.Publish(ctx, r.Step, r.Mode, r.Ranks)
}

// stagedWeights is a version that was staged. Tensors are those of an engine that loads by name, if they were bound for it.
type stagedWeights struct {
	Version versions.Version `msgpack:"version"`
	Tensors []weightsTensor  `msgpack:"tensors"`
}

func (c *core) weightsStage(ctx context.Context, w *weights.Weights, r weightsStageRequest) (out stagedWeights, err error) {
	if r.Whole && r.Epoch == 0 {
		if out.Tensors, err = bindWhole(ctx, w); err != nil {
			return out, err
		}
	}
	if out.Version, err = w.Stage(ctx, r.Version); err != nil {
		return out, err
	}
	if r.Whole && out.Tensors == nil && out.Version.Epoch != r.Epoch { // other processes publish, perhaps other tensors
		if out.Tensors, err = bindWhole(ctx, w); err == nil {
			out.Version, err = w.Stage(ctx, out.Version)
		}
	}
	return out, err
}

// bindWhole binds all tensors that are published, each as a whole, for an engine that loads by name. They are numbered in this order.
func bindWhole(ctx context.Context, w *weights.Weights) ([]weightsTensor, error) {
	all, err := w.Catalog(ctx)
	if err != nil {
		return nil, err
	}
	tensors, out := make([]weights.Tensor, len(all)), make([]weightsTensor, len(all))
	for i, t := range all {
		tensors[i] = weights.Tensor{Name: t.Name, DType: t.DType, ItemSize: t.ItemSize, Shape: t.Shape}
		out[i] = weightsTensor{Name: t.Name, DType: t.DType, ItemSize: t.ItemSize, Shape: t.Shape}
	}
	return out, w.Bind(ctx, versions.Take, tensors)
}

func (c *core) weightsCommit(ctx context.Context, w *weights.Weights, r weightsCommitRequest) (versions.Version, error) {
	if err := w.Commit(ctx, r.Version); err != nil {
		return versions.Version{}, err
	}
	return w.Version(), nil
}

// weightsFill copies whole tensors of what was staged to memory of the caller.
func (c *core) weightsFill(_ context.Context, w *weights.Weights, r weightsFillRequest) error {
	into := make([]unsafe.Pointer, len(r.Addresses))
	for i, at := range r.Addresses {
		into[i] = pointerAt(at)
	}
	return w.Fill(r.Version, r.First, into)
}

// weightsLoaded says that the engine has what was filled, or has failed.
func (c *core) weightsLoaded(_ context.Context, w *weights.Weights, r weightsLoadedRequest) error {
	var failure error
	if r.Failure != "" {
		failure = errors.New(r.Failure)
	}
	return w.Loaded(r.Version, seconds(r.Took), failure)
}

func (c *core) weightsNext(ctx context.Context, w *weights.Weights, r weightsNextRequest) (versions.Version, error) {
	return w.Next(ctx, r.Version)
}

// troupe_weights writes what this process knows of weights to out, if that has room: as msgpack the version that it has committed, those
// that are available, and its lag. The return value is the length, or an error. It does not block.
//
//export troupe_weights
func troupe_weights(runtime C.uint64_t, name *C.char, n C.uint64_t, out *C.char, room C.uint64_t) (length C.int64_t) {
	defer guard64(&length)
	c, err := getCore()
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	if err := c.checkUsable(); err != nil {
		return C.int64_t(setError(statusPanic, err))
	}
	data, err := c.weightsNow(ofWeights{ofRuntime{uint64(runtime)}, C.GoStringN(name, C.int(n))})
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	if len(data) <= int(room) {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(out)), int(room)), data)
	}
	return C.int64_t(len(data))
}

func (c *core) weightsNow(q ofWeights) ([]byte, error) {
	w, err := q.find(c)
	if err != nil {
		return nil, err
	}
	return wire.Marshal(weightsState{w.Version(), w.Available(), w.Lag()})
}

func (c *core) weightsStatus(ctx context.Context, rt *roles.Runtime, r nameRequest) (string, error) {
	client, err := c.weightsClient(r.Runtime)
	if err != nil {
		return "", err
	}
	status, err := client.Status(ctx, r.Name)
	if err != nil {
		return "", err
	}
	return jsonText(status)
}
