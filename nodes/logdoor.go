package nodes

import (
	"context"
	"errors"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/wire"
)

const (
	logDoor     = "logs"
	logDoorPart = 256                    // stored messages of one answer, at most
	logDoorPoll = 500 * time.Millisecond // between two requests that follow the output
	logDoorTry  = 10 * time.Second       // for one request and its answer
)

type logRequest struct {
	Role        string    `msgpack:"role"`
	Incarnation string    `msgpack:"incarnation"`
	Rank        int       `msgpack:"rank"`
	Since       time.Time `msgpack:"since"`
	From        uint64    `msgpack:"from"` // the first message that was not read; zero: by Since
}

type logReply struct {
	Err  *bus.Error `msgpack:"err,omitempty"`
	Data [][]byte   `msgpack:"data,omitempty"`
	Next uint64     `msgpack:"next,omitempty"`
}

// LogDoor serves the stored output of a namespace's workers to processes with a team's credential.
type LogDoor struct {
	Bus    *bus.Bus
	Serves func() bool
}

// Start serves until stop is called or the bus is closed.
func (d LogDoor) Start() (stop func(), err error) {
	return d.Bus.ServeDoor(logDoor, d.Serves, func(ctx context.Context, c bus.Caller, m *bus.Msg) {
		r, err := d.answer(ctx, c, m.Data)
		if err != nil {
			r = logReply{Err: bus.AsError(err)}
		}
		data, err := wire.Marshal(r)
		if err == nil {
			err = d.Bus.Respond(m, data)
		}
		if err != nil {
			d.Bus.Logger().Debug("nodes: sending an answer failed; the client repeats its request", "namespace", c.Namespace, "error", err)
		}
	})
}

func (d LogDoor) answer(ctx context.Context, c bus.Caller, data []byte) (r logReply, err error) {
	var q logRequest
	if err := wire.Unmarshal(data, &q); err != nil {
		return r, bus.Errorf(bus.CodeMalformed, "the request cannot be read: %w", err)
	}
	for what, name := range map[string]string{"role": q.Role, "incarnation": q.Incarnation} { // a wildcard is no name
		if name != "" {
			err = errors.Join(err, bus.CheckName(what, name))
		}
	}
	if err != nil {
		return r, err
	}
	s, err := stream.Open(ctx, d.Bus, logStreamConfig())
	if err != nil {
		return r, err
	}
	o := stream.ReadOptions{Subject: bus.Logs(c.Namespace, q.Role, q.Incarnation, q.Rank), From: q.From}
	if q.From == 0 {
		o.Since = q.Since
	}
	reader, err := s.Reader(ctx, o)
	if err != nil {
		return r, err
	}
	defer reader.Close(ctx)
	msgs, err := reader.Next(ctx, logDoorPart)
	r.Next = q.From
	size := 0
	for _, m := range msgs {
		if size += len(m.Data) + 16; size > d.Bus.MaxPayload()/2 && len(r.Data) > 0 {
			break
		}
		r.Data, r.Next = append(r.Data, m.Data), m.Seq+1
	}
	return r, err
}

// readLogsAtDoor is ReadLogs of a process that asks the head.
func readLogsAtDoor(ctx context.Context, b *bus.Bus, team bus.Credential, q LogQuery, read func(subject string, data []byte) error) error {
	subject := team.DoorSubject(logDoor)
	ask := logRequest{Role: q.Role, Incarnation: q.Incarnation, Rank: q.Rank, Since: q.Since}
	for {
		data, err := wire.Marshal(ask)
		if err != nil {
			return err
		}
		try, cancel := context.WithTimeout(ctx, logDoorTry)
		m, err := b.Request(try, subject, data)
		cancel()
		var r logReply
		if err == nil {
			err = wire.Unmarshal(m.Data, &r)
		}
		if err == nil && r.Err != nil {
			err = r.Err
		}
		switch {
		case q.Follow && ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		for _, one := range r.Data {
			if err := read(subject, one); err != nil {
				return err
			}
		}
		ask.From = r.Next
		switch {
		case len(r.Data) > 0:
		case !q.Follow:
			return nil
		case bus.Sleep(ctx, logDoorPoll) != nil:
			return nil
		}
	}
}
