package bustest

import (
	"math/rand/v2"
	"sync"
	"time"

	"troupe/bus/wire"
)

// Direction is which way a message goes.
type Direction uint8

const (
	ToServer Direction = iota // PUB and HPUB: what the client publishes
	ToClient                  // MSG and HMSG: what the server delivers
)

// Message is one message on its way. Header and Payload are views that end with the call of the rule and must not be
// changed.
type Message struct {
	Toward  Direction
	Conn    int // the connection's number, from 1, in the order they were made; a reconnect is a new one
	N       int // this message's number, from 1, on this connection in this direction
	Subject string
	Reply   string
	Header  []byte // NATS headers as they travel; nil without
	Payload []byte
}

// Frame reads the payload as a frame of the bus; false if it is none.
func (m Message) Frame() (wire.Frame, bool) {
	f, err := wire.ParseFrame(m.Payload)
	return f, err == nil
}

// Verdict is what happens to a message.
type Verdict struct {
	do   action
	wait time.Duration
}

type action uint8

const (
	doPass action = iota
	doDrop
	doDouble
	doDelay
	doSwap
)

var (
	Pass   = Verdict{}             // it goes on
	Drop   = Verdict{do: doDrop}   // it is lost, and nobody is told
	Double = Verdict{do: doDouble} // it goes on twice
	// Swap holds it until the next message of the same direction that passes has passed. While one is held, a second
	// Swap passes. One that is still held when the connection ends is lost.
	Swap = Verdict{do: doSwap}
)

// Delay lets the message go on after d; those behind it overtake it. What waits when the connection ends is lost.
func Delay(d time.Duration) Verdict { return Verdict{do: doDelay, wait: d} }

// Rule judges each message. It is called serially for one connection and direction, concurrently for different ones;
// while it blocks, that direction of that connection stands still. It may call the methods of Faults.
type Rule func(Message) Verdict

// Once gives the verdict to the first message that only accepts (nil: any), on whichever connection, and lets all
// others pass.
func Once(v Verdict, only func(Message) bool) Rule {
	var mu sync.Mutex
	done := false
	return func(m Message) Verdict {
		mu.Lock()
		defer mu.Unlock()
		if done || (only != nil && !only(m)) {
			return Pass
		}
		done = true
		return v
	}
}

// Random gives each message that only accepts (nil: any) a verdict with these probabilities; delays are between 1 and
// 20 ms. Each direction of each connection has its own sequence of verdicts, which seed fixes: what the other
// connections do does not change it.
func Random(seed uint64, pDrop, pDouble, pDelay, pSwap float64, only func(Message) bool) Rule {
	var mu sync.Mutex
	dice := map[[2]int]*rand.Rand{}
	roll := func(m Message) (p, wait float64) {
		mu.Lock()
		defer mu.Unlock()
		key := [2]int{m.Conn, int(m.Toward)}
		if dice[key] == nil {
			dice[key] = rand.New(rand.NewPCG(seed, uint64(m.Conn)<<1|uint64(m.Toward)))
		}
		return dice[key].Float64(), dice[key].Float64()
	}
	return func(m Message) Verdict {
		if only != nil && !only(m) {
			return Pass
		}
		p, wait := roll(m)
		for _, c := range []struct {
			p float64
			v Verdict
		}{{pDrop, Drop}, {pDouble, Double}, {pDelay, Delay(time.Millisecond + time.Duration(wait*19e6))}, {pSwap, Swap}} {
			if p < c.p {
				return c.v
			}
			p -= c.p
		}
		return Pass
	}
}
