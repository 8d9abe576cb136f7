package main

/*
#include <stdint.h>
*/
import "C"

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"time"
	"unsafe"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/roles"
	"troupe/weights"
	"troupe/weights/plan"
	"troupe/weights/versions"
)

// weightsRequest is the fields of weights ops.
type weightsRequest struct {
	Name    string           `msgpack:"name"`
	Use     versions.Use     `msgpack:"use"`
	Tensors []weightsTensor  `msgpack:"tensors"`
	Step    int64            `msgpack:"step"`
	Mode    weights.Mode     `msgpack:"mode"`
	Ranks   []int            `msgpack:"ranks"`
	Version versions.Version `msgpack:"version"`
	Timeout *float64         `msgpack:"timeout"` // seconds; nil: none

	Whole bool   `msgpack:"whole"` // an engine loads by name
	Epoch uint64 `msgpack:"epoch"` // whose tensors are bound for it; 0: none are

	First     int      `msgpack:"first"`     // of weights_fill: the number of the first tensor
	Addresses []uint64 `msgpack:"addresses"` // and where it and those that follow it are written, as a whole
	Took      float64  `msgpack:"took"`      // seconds
	Failure   string   `msgpack:"failure"`
}

// weightsTensor is a tensor of the caller, or a part of one.
type weightsTensor struct {
	Name     string  `msgpack:"name"`
	DType    string  `msgpack:"dtype"`
	ItemSize int     `msgpack:"item_size"`
	Shape    []int64 `msgpack:"shape"`
	Start    []int64 `msgpack:"start"`
	Size     []int64 `msgpack:"size"`
	Address  uint64  `msgpack:"address"`
	Strides  []int64 `msgpack:"strides"`
}

func (t weightsTensor) tensor() weights.Tensor {
	return weights.Tensor{
		Name: t.Name, DType: t.DType, ItemSize: t.ItemSize, Shape: t.Shape, Box: plan.NewBox(t.Start, t.Size), Pointer: pointerAt(t.Address), Strides: t.Strides,
	}
}

// pointerAt is an address of the caller's memory, which is none of Go's.
func pointerAt(address uint64) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }

// weightsState is what a process knows of a name without a question.
type weightsState struct {
	Version   versions.Version   `msgpack:"version"`
	Available []versions.Version `msgpack:"available"`
	Lag       int                `msgpack:"lag"`
}

// weightsFor is a name of a runtime; a process has one client for each runtime.
func (c *core) weightsFor(r *request) (*weights.Weights, error) {
	client, err := c.weightsClient(r.Runtime)
	if err != nil {
		return nil, err
	}
	return client.Open(r.Weights.Name)
}

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
	client, err := weights.NewClient(weights.ClientConfig{
		Bus: rt.Bus(), Namespace: rt.Namespace(), Session: rt.Session(), References: rt.References(), Memory: c.memory, AllocFunc: c.memory.makeShared,
		Member: c.memberLocked(rt), Logger: c.log,
	})
	if err == nil {
		c.weights[runtime] = client
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
	client := c.weights[runtime]
	delete(c.weights, runtime)
	c.mu.Unlock()
	if client != nil {
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

func (c *core) weightsBind(ctx context.Context, r *request) (any, error) {
	w, err := c.weightsFor(r)
	if err != nil {
		return nil, err
	}
	tensors := make([]weights.Tensor, len(r.Weights.Tensors))
	for i, t := range r.Weights.Tensors {
		tensors[i] = t.tensor()
	}
	return nil, w.Bind(ctx, r.Weights.Use, tensors)
}

func (c *core) weightsPublish(ctx context.Context, r *request) (any, error) {
	w, err := c.weightsFor(r)
	if err != nil {
		return nil, err
	}
	ctx, cancel := within(ctx, r.Weights.Timeout)
	defer cancel()
	return w.Publish(ctx, r.Weights.Step, r.Weights.Mode, r.Weights.Ranks)
}

// stagedWeights is a version that was staged. Tensors are those of an engine that loads by name, if they were bound for it.
type stagedWeights struct {
	Version versions.Version `msgpack:"version"`
	Tensors []weightsTensor  `msgpack:"tensors"`
}

func (c *core) weightsStage(ctx context.Context, r *request) (any, error) {
	w, err := c.weightsFor(r)
	if err != nil {
		return nil, err
	}
	ctx, cancel := within(ctx, r.Weights.Timeout)
	defer cancel()
	var out stagedWeights
	if r.Weights.Whole && r.Weights.Epoch == 0 {
		if out.Tensors, err = bindWhole(ctx, w); err != nil {
			return nil, err
		}
	}
	if out.Version, err = w.Stage(ctx, r.Weights.Version); err != nil {
		return nil, err
	}
	if r.Weights.Whole && out.Tensors == nil && out.Version.Epoch != r.Weights.Epoch { // other processes publish, perhaps other tensors
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

func (c *core) weightsCommit(ctx context.Context, r *request) (any, error) {
	w, err := c.weightsFor(r)
	if err != nil {
		return nil, err
	}
	if err := w.Commit(ctx, r.Weights.Version); err != nil {
		return nil, err
	}
	return w.Version(), nil
}

// weightsFill copies tensors of what was staged to memory of the caller.
func (c *core) weightsFill(_ context.Context, r *request) (any, error) {
	w, err := c.weightsFor(r)
	if err != nil {
		return nil, err
	}
	into := make([]unsafe.Pointer, len(r.Weights.Addresses))
	for i, at := range r.Weights.Addresses {
		into[i] = pointerAt(at)
	}
	return nil, w.Fill(r.Weights.Version, r.Weights.First, into)
}

func (c *core) weightsLoaded(_ context.Context, r *request) (any, error) {
	w, err := c.weightsFor(r)
	if err != nil {
		return nil, err
	}
	var failure error
	if r.Weights.Failure != "" {
		failure = errors.New(r.Weights.Failure)
	}
	return nil, w.Loaded(r.Weights.Version, time.Duration(r.Weights.Took*float64(time.Second)), failure)
}

func (c *core) weightsNext(ctx context.Context, r *request) (any, error) {
	w, err := c.weightsFor(r)
	if err != nil {
		return nil, err
	}
	ctx, cancel := within(ctx, r.Weights.Timeout)
	defer cancel()
	return w.Next(ctx, r.Weights.Version)
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
	data, err := c.weightsNow(&request{Runtime: uint64(runtime), Weights: weightsRequest{Name: C.GoStringN(name, C.int(n))}})
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	if len(data) <= int(room) {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(out)), int(room)), data)
	}
	return C.int64_t(len(data))
}

func (c *core) weightsNow(r *request) ([]byte, error) {
	w, err := c.weightsFor(r)
	if err != nil {
		return nil, err
	}
	return wire.Marshal(weightsState{w.Version(), w.Available(), w.Lag()})
}

func (c *core) weightsStatus(ctx context.Context, r *request) (any, error) {
	client, err := c.weightsClient(r.Runtime)
	if err != nil {
		return nil, err
	}
	status, err := client.Status(ctx, r.Weights.Name)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(status)
	return string(text), err
}
