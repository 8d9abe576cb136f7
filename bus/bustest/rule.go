package bustest

import (
	"math/rand/v2"
	"sync"
	"time"

	"troupe/bus/wire"
)

// Direction is the direction of a message.
type Direction uint8

const (
	ToServer Direction = iota // PUB and HPUB: published by the client
	ToClient                  // MSG and HMSG: delivered by the server
)

// Message is one message. Header and Payload are views that are valid during the call of the rule and must not be
// changed.
type Message struct {
	Toward  Direction
	Conn    int // number of the connection, from 1; a reconnect is a new one
	N       int // number of the message, from 1, on this connection in this direction
	Subject string
	Reply   string
	Header  []byte // encoded NATS headers; nil without
	Payload []byte
}

// Frame parses the payload as a frame; false if it is none.
func (m Message) Frame() (wire.Frame, bool) {
	f, err := wire.ParseFrame(m.Payload)
	return f, err == nil
}

// Verdict is the treatment of a message.
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
	Pass   = Verdict{}             // deliver it
	Drop   = Verdict{do: doDrop}   // lose it
	Double = Verdict{do: doDouble} // deliver it twice
	// Swap delivers it after the next message of the same direction that passes. Meanwhile a second Swap is a Pass.
	// When the connection ends a swapped message is lost.
	Swap = Verdict{do: doSwap}
)

// Delay delivers the message after d; later messages overtake it. Delayed messages are lost when the connection ends.
func Delay(d time.Duration) Verdict { return Verdict{do: doDelay, wait: d} }

// Rule decides about each message. It is called serially for one connection and direction, concurrently for different
// ones; while it blocks, that direction of that connection blocks too. It may call the methods of Faults.
type Rule func(Message) Verdict

// Once applies the verdict to the first message that only accepts (nil: any), on any connection, and passes all others.
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

// Random applies a verdict with these probabilities to each message that only accepts (nil: any); delays are between 1
// and 20 ms. Each direction of each connection has its own sequence of verdicts, which seed determines, independently
// of the other connections.
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
