package actors_test

import (
	"context"
	"fmt"
	"log"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// Counter is a class: its methods take a context and one argument, and return a result and an error.
type Counter struct{ n int }

func (c *Counter) Add(_ context.Context, by int) (int, error) { c.n += by; return c.n, nil }

func (c *Counter) Divide(_ context.Context, by int) (int, error) { return c.n / by, nil }

// This example starts a worker and calls it over the wire.
func Example() {
	ctx := context.Background()
	b, err := bus.Open(ctx, bus.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer b.Close()
	endpoint, err := calls.Open(b, "default")
	if err != nil {
		log.Fatal(err)
	}

	counter := actors.NewClass("counter", func(_ context.Context, s actors.Setup) (*Counter, error) {
		c := &Counter{}
		return c, s.DecodeConfig(&c.n) // the role's configuration: the first value
	})
	actors.Method(counter, "add", (*Counter).Add)
	actors.Method(counter, "divide", (*Counter).Divide)

	host, err := actors.NewHost(endpoint, actors.HostConfig{Classes: []*actors.Class{counter.Class}, Node: "node-1"})
	if err != nil {
		log.Fatal(err)
	}
	defer host.Close(ctx)
	role, _ := bus.NewAddress("default", "tally", "i1")
	start, _ := wire.Marshal(40)
	if _, err := host.Start(ctx, actors.WorkerSpec{Address: role, Class: "counter", World: 1, Config: start}); err != nil {
		log.Fatal(err)
	}

	call := func(method string, arg any) {
		raw, _ := wire.Marshal(arg)
		gather, err := endpoint.Scatter(ctx, calls.Call{To: role, Method: method, World: 1, Parts: []calls.Part{
			{Scope: calls.OneRank(0), Ranks: []int{0}, Body: wire.Args{Positional: []wire.Raw{raw}}.Append(nil, nil)},
		}})
		if err != nil {
			log.Fatal(err)
		}
		<-gather.Done()
		answer := gather.Answers()[0]
		if answer.Err != nil {
			fmt.Println(method, "failed:", bus.CodeOf(answer.Err))
			return
		}
		var n int
		_ = wire.Unmarshal(answer.Body, &n)
		fmt.Println(method, "gives", n)
	}
	call("add", 2)
	call("add", "two")
	call("divide", 0)
	call("add", 0)
	// Output:
	// add gives 42
	// add failed: refused
	// divide failed: panic
	// add gives 42
}

// Sampler has a long method that runs concurrently, and one in the control lane.
type Sampler struct{}

func (*Sampler) Generate(_ context.Context, prompt string) (string, error) {
	return prompt + "…", nil
}

func (*Sampler) Abort(context.Context, actors.None) (actors.None, error) { return actors.None{}, nil }

func ExampleMethod() {
	sampler := actors.NewClass("sampler", func(context.Context, actors.Setup) (*Sampler, error) { return &Sampler{}, nil })
	actors.Method(sampler, "generate", (*Sampler).Generate, actors.MethodOptions{Lane: actors.Concurrent(32), Mode: "DP_MP_COMPUTE"})
	actors.Method(sampler, "abort", (*Sampler).Abort, actors.MethodOptions{Lane: actors.Control})
	for _, m := range sampler.Methods {
		fmt.Println(m.Name, "runs in lane", m.Lane.Name, "up to", m.Lane.Limit, "at once", m.Mode)
	}
	// Output:
	// generate runs in lane concurrent up to 32 at once DP_MP_COMPUTE
	// abort runs in lane control up to 64 at once
}

// interpreter stands for a runtime of another language: it gets a method's name and encoded bytes, and returns encoded
// bytes.
type interpreter struct{ role string }

func (i interpreter) Handle(ctx context.Context, method string, body []byte) ([]byte, error) {
	call, _ := actors.Current(ctx)
	return wire.Marshal(fmt.Sprintf("%s(%d bytes) on rank %d of %s", method, len(body), call.Rank, i.role))
}

// This example has a class whose methods are known only at run time. Bodies are not decoded.
func ExampleClass() {
	class := &actors.Class{
		Name:    "python",
		Methods: []actors.MethodInfo{{Name: "train_step", Lane: actors.Serial}},
		Open:    true, // other methods are accepted too
		New: func(_ context.Context, s actors.Setup) (actors.Handler, error) {
			return interpreter{role: s.Role.Role}, nil
		},
	}
	ctx := context.Background()
	b, err := bus.Open(ctx, bus.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer b.Close()
	endpoint, _ := calls.Open(b, "default")
	host, err := actors.NewHost(endpoint, actors.HostConfig{Classes: []*actors.Class{class}})
	if err != nil {
		log.Fatal(err)
	}
	defer host.Close(ctx)
	role, _ := bus.NewAddress("default", "actor_train", "i1")
	for rank := range 2 {
		if _, err := host.Start(ctx, actors.WorkerSpec{Address: role, Class: "python", Rank: rank, World: 2}); err != nil {
			log.Fatal(err)
		}
	}
	gather, err := endpoint.Scatter(ctx, calls.Call{To: role, Method: "train_step", World: 2, Parts: []calls.Part{
		{Scope: calls.Everyone(), Ranks: []int{0, 1}, Body: []byte("opaque")}, // one message for both ranks
	}})
	if err != nil {
		log.Fatal(err)
	}
	<-gather.Done()
	for _, answer := range gather.Answers() {
		var said string
		_ = wire.Unmarshal(answer.Body, &said)
		fmt.Println(said)
	}
	// Output:
	// train_step(6 bytes) on rank 0 of actor_train
	// train_step(6 bytes) on rank 1 of actor_train
}
