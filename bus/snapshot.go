package bus

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	snapshotChunk = 128 << 10
	snapshotWait  = 30 * time.Second // for the next chunk, or for the answer to one
)

// StreamSnapshot describes the snapshot of a stream. Config and State are the server's JSON, unchanged.
type StreamSnapshot struct {
	Name   string          `json:"name"`
	Config json.RawMessage `json:"config"`
	State  json.RawMessage `json:"state"`
}

type snapshotAnswer struct {
	Error   *jetstream.APIError `json:"error"`
	Config  json.RawMessage     `json:"config"`
	State   json.RawMessage     `json:"state"`
	Deliver string              `json:"deliver_subject"`
}

// SnapshotStream writes the content of a stream to w, as of one moment: messages with their sequences. Consumers are left
// out: all of them are ephemeral, and one that ends meanwhile would fail the snapshot.
func (b *Bus) SnapshotStream(ctx context.Context, name string, w io.Writer) (StreamSnapshot, error) {
	snapshot := StreamSnapshot{Name: name}
	inbox := b.Conn().NewInbox()
	sub, err := b.Conn().SubscribeSync(inbox)
	if err != nil {
		return snapshot, Errorf(CodeUnavailable, "snapshot of stream %s: %w", name, err)
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only if the connection is closed
	request, err := json.Marshal(map[string]any{"deliver_subject": inbox, "chunk_size": snapshotChunk, "no_consumers": true})
	if err != nil {
		return snapshot, err
	}
	answer, err := b.askJetStream(ctx, "$JS.API.STREAM.SNAPSHOT."+name, request)
	if err != nil {
		return snapshot, Errorf(CodeUnavailable, "snapshot of stream %s: %w", name, err)
	}
	snapshot.Config, snapshot.State = answer.Config, answer.State
	for {
		m, err := nextChunk(ctx, sub)
		if err != nil {
			return snapshot, Errorf(CodeUnavailable, "snapshot of stream %s: %w", name, err)
		}
		if len(m.Data) == 0 {
			if status := m.Header.Get("Status"); status != "" && status != "204" {
				return snapshot, Errorf(CodeUnavailable, "snapshot of stream %s: the server ended it: %s %s", name, status, m.Header.Get("Description"))
			}
			return snapshot, nil
		}
		if _, err := w.Write(m.Data); err != nil {
			return snapshot, err
		}
		if m.Reply == "" {
			continue // the last chunk
		}
		if err := m.Respond(nil); err != nil {
			return snapshot, Errorf(CodeUnavailable, "snapshot of stream %s: %w", name, err)
		}
	}
}

func nextChunk(ctx context.Context, sub *nats.Subscription) (*nats.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, snapshotWait)
	defer cancel()
	return sub.NextMsgWithContext(ctx)
}

func (b *Bus) askJetStream(ctx context.Context, subject string, request []byte) (snapshotAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, snapshotWait)
	defer cancel()
	var answer snapshotAnswer
	m, err := b.Conn().RequestWithContext(ctx, subject, request)
	if err != nil {
		return answer, err
	}
	if len(m.Data) > 0 {
		err = json.Unmarshal(m.Data, &answer)
	}
	if err == nil && answer.Error != nil {
		err = answer.Error
	}
	return answer, err
}

// sendChunk sends one chunk of a stream that is restored. In a cluster another server may restore it, whose interest takes a moment to arrive; a
// chunk without a responder was not taken.
func (b *Bus) sendChunk(ctx context.Context, subject string, chunk []byte) error {
	ctx, cancel := context.WithTimeout(ctx, snapshotWait)
	defer cancel()
	return Retry(ctx, Backoff{First: 5 * time.Millisecond, Most: 100 * time.Millisecond}, func() error {
		_, err := b.askJetStream(ctx, subject, chunk)
		if errors.Is(err, nats.ErrNoResponders) {
			return err
		}
		return Permanent(err)
	})
}

// restoredConfig is the configuration of a stream for this server: replicas need a cluster, and one that may have replicas must sync its writes
// as the server does.
func (b *Bus) restoredConfig(config json.RawMessage) (json.RawMessage, error) {
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal(config, &fields); err != nil {
		return nil, err
	}
	if b.Clustered() {
		delete(fields, "persist_mode")
	} else {
		fields["num_replicas"] = json.RawMessage("1")
	}
	return json.Marshal(fields)
}

// awaitRestored returns when every replica of a stream has what was restored, which at first its leader alone has.
func (b *Bus) awaitRestored(ctx context.Context, snapshot StreamSnapshot) error {
	var wanted jetstream.StreamState
	if err := json.Unmarshal(snapshot.State, &wanted); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, snapshotWait)
	defer cancel()
	return Retry(ctx, Backoff{First: 5 * time.Millisecond, Most: 100 * time.Millisecond}, func() error {
		s, err := b.JetStream().Stream(ctx, snapshot.Name)
		if err != nil {
			return err
		}
		info := s.CachedInfo()
		usage := StreamUsage{Replicas: info.Config.Replicas}
		usage.readReplicas(info.Cluster)
		if info.State.LastSeq < wanted.LastSeq {
			return Errorf(CodeUnavailable, "it has messages up to %d of %d", info.State.LastSeq, wanted.LastSeq)
		}
		if usage.Replicas > 1 && (usage.Leaderless() || usage.Current() < usage.Replicas) {
			return Errorf(CodeUnavailable, "%d of %d replicas have it", usage.Current(), usage.Replicas)
		}
		return nil
	})
}

// RestoreStream creates a stream from a snapshot. The stream must not exist. It has the sequences of the snapshot.
func (b *Bus) RestoreStream(ctx context.Context, snapshot StreamSnapshot, r io.Reader) error {
	fail := func(err error) error { return Errorf(CodeUnavailable, "restore stream %s: %w", snapshot.Name, err) }
	config, err := b.restoredConfig(snapshot.Config)
	if err != nil {
		return fail(err)
	}
	request, err := json.Marshal(map[string]json.RawMessage{"config": config, "state": snapshot.State})
	if err != nil {
		return fail(err)
	}
	answer, err := b.askJetStream(ctx, "$JS.API.STREAM.RESTORE."+snapshot.Name, request)
	if err != nil {
		return fail(err)
	}
	chunk := make([]byte, snapshotChunk)
	for {
		n, err := io.ReadFull(r, chunk)
		if n > 0 {
			if err := b.sendChunk(ctx, answer.Deliver, chunk[:n]); err != nil {
				return fail(err)
			}
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF { //nolint:errorlint // io.ReadFull returns them unwrapped
			break
		}
		if err != nil {
			return err
		}
	}
	if err := b.sendChunk(ctx, answer.Deliver, nil); err != nil { // an empty chunk ends the restore
		return fail(err)
	}
	if err := b.awaitRestored(ctx, snapshot); err != nil {
		return fail(err)
	}
	return nil
}

// DeleteStream deletes a stream. It purges it first: a server that is killed during the deletion may restore the messages when a stream of
// the same name is created.
func (b *Bus) DeleteStream(ctx context.Context, name string) error {
	s, err := b.JetStream().Stream(ctx, name)
	if err == nil {
		err = s.Purge(ctx)
	}
	if err == nil {
		err = b.JetStream().DeleteStream(ctx, name)
	}
	if err != nil {
		return Errorf(CodeUnavailable, "delete stream %s: %w", name, err)
	}
	return nil
}
