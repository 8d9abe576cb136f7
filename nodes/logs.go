package nodes

import (
	"cmp"
	"context"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/wire"
)

// LogQuery selects stored lines.
type LogQuery struct {
	Namespace   string
	Role        string
	Incarnation string    // zero: all
	Rank        int       // negative: all
	Since       time.Time // zero: from the beginning
	Follow      bool      // wait for lines that are printed later
}

// ReadLogs calls f with the selected lines in the order in which they were stored; with Follow it waits for later ones
// until ctx ends, which is no error then. An error of f ends it. Each line is passed once. Lines that the full stream
// has dropped are only in the files of their node.
func ReadLogs(ctx context.Context, b *bus.Bus, q LogQuery, f func(Line) error) error {
	once := lineFilter{since: q.Since, seen: map[WorkerID]uint64{}}
	filter := bus.Logs(ownNamespace(b, q.Namespace), q.Role, q.Incarnation, q.Rank)
	return readStream(ctx, b, logStreamConfig(), stream.ReadOptions{Subject: filter, Since: q.Since}, q.Follow, func(m stream.Message) error {
		var p lineBatch
		if err := wire.Unmarshal(m.Data, &p); err != nil {
			return bus.Errorf(bus.CodeMalformed, "the log message on %s: %w", m.Subject, err)
		}
		for _, l := range once.lines(p) {
			if err := f(l); err != nil {
				return err
			}
		}
		return nil
	})
}

// ownNamespace is the namespace that is asked for; if none is, with a team's credential its own.
func ownNamespace(b *bus.Bus, namespace string) string {
	team, _ := b.Team()
	return cmp.Or(namespace, team.Namespace)
}

// TeamStreams are the streams of which processes with a team's credential read what belongs to their namespace.
func TeamStreams() []stream.SharedStream {
	return []stream.SharedStream{
		{Config: logStreamConfig(), SubjectFunc: func(namespace string) string { return bus.Logs(namespace, "", "", -1) }},
		{Config: eventStreamConfig(0), SubjectFunc: bus.Events},
	}
}

// lineFilter drops lines that are too old, and lines that were stored twice.
type lineFilter struct {
	since time.Time
	seen  map[WorkerID]uint64
}

func (f lineFilter) lines(p lineBatch) (out []Line) {
	for _, l := range p.Lines {
		if l.Seq <= f.seen[p.ID] {
			continue
		}
		f.seen[p.ID] = l.Seq
		if !l.At.Before(f.since) {
			out = append(out, Line{ID: p.ID, Name: p.Name, Node: p.Node, Stream: l.Stream, At: l.At, Seq: l.Seq, Text: l.Text})
		}
	}
	return out
}

// readStream calls f with the selected messages of a stream; with follow it waits for later ones until ctx ends, which is
// no error then.
func readStream(ctx context.Context, b *bus.Bus, cfg stream.Config, o stream.ReadOptions, follow bool, f func(stream.Message) error) error {
	s, err := stream.Open(ctx, b, cfg)
	switch {
	case err != nil:
	case follow:
		err = s.Follow(ctx, o, f)
	default:
		return s.Each(ctx, o, f)
	}
	if follow && ctx.Err() != nil {
		return nil
	}
	return err
}
