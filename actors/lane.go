package actors

import "troupe/bus"

// Lane is a worker's queue. Calls start in the order of their arrival, at most Limit at a time.
type Lane struct {
	Name  string `msgpack:"name" json:"name"`
	Limit int    `msgpack:"limit" json:"limit"`
}

// Serial runs one call at a time: the lane of methods that declare none.
var Serial = Lane{Name: "work", Limit: 1}

// Control never waits behind work; its calls run side by side.
var Control = Lane{Name: "control", Limit: 64}

// Concurrent runs up to n calls at once.
func Concurrent(n int) Lane { return Lane{Name: "concurrent", Limit: n} }

func (l Lane) check() error {
	if err := bus.CheckName("lane", l.Name); err != nil {
		return err
	}
	for _, own := range []Lane{Serial, Control} {
		if l.Name == own.Name && l.Limit != own.Limit {
			return bus.Errorf(bus.CodeInvalid, "lane %q is every worker's own, with limit %d, not %d; give yours another name", l.Name, own.Limit, l.Limit)
		}
	}
	if l.Limit < 1 {
		return bus.Errorf(bus.CodeInvalid, "lane %q: the limit must be at least 1, not %d", l.Name, l.Limit)
	}
	return nil
}

// queue is one lane of one worker. The worker's mutex guards it.
type queue struct {
	lane    Lane
	waiting fifo[*call] // in order of arrival
	running int
}

// next takes the first call if it may start: its body is here and a slot is free. A call whose body is still on its
// way holds up those behind it, because order is by arrival of the envelope.
func (q *queue) next() *call {
	if q.running >= q.lane.Limit || q.waiting.len() == 0 || !q.waiting.first().bodyHere {
		return nil
	}
	q.running++
	return q.waiting.pop()
}
