package kv

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"troupe/bus"

	"github.com/nats-io/nats.go/jetstream"
)

const (
	markersKept    = 1000             // deletion markers that a bucket may have, whatever the number of its keys
	maintainEvery  = 5 * time.Second  // interval of Maintain's size checks
	rescanEvery    = 10 * time.Minute // interval of its scans without a visible change
	maintainAct    = time.Minute      // limit of one compaction
	removeTogether = 32               // concurrent writes while markers are removed
)

// Compaction is the result of Compact.
type Compaction struct {
	Live    int // keys
	Markers int // of deleted keys, before
	Ghosts  int // values that a crash restored
	Removed int // markers and ghosts removed
}

// Compact removes ghosts, and the markers of deleted keys if there are more than max(1,000, live keys), or always if
// all is true. Writers and other compactors may run at the same time. The order of steps makes it safe:
//
//  1. read the stream's last sequence: the new floor;
//  2. read the bucket;
//  3. write a checkpoint with the live keys up to the floor, in place of the checkpoint that step 2 used, or fail;
//  4. only then remove markers up to the floor.
//
// A key that is written after step 1 is above the floor. A crash after step 4 may restore values that the markers had
// ended: they are not above the floor, and the checkpoint does not list them.
//
// In a full bucket the size limit is raised meanwhile: the new checkpoint needs space beside the old one.
func (bucket *Bucket) Compact(ctx context.Context, all bool) (Compaction, error) {
	if !bucket.cfg.durable() || bucket.caller != nil { // the head compacts it
		return Compaction{}, nil
	}
	done, err := bucket.compact(ctx, all)
	if !bus.HasServerCode(err, bus.CodeStoreFailed) {
		return done, err
	}
	reserve := int64(checkpointPart + 200*(done.Live+done.Markers+done.Ghosts))
	if err := bucket.raiseLimit(ctx, reserve); err != nil {
		return done, err
	}
	done, err = bucket.compact(ctx, all)
	return done, errors.Join(err, bucket.raiseLimit(ctx, -reserve))
}

func (bucket *Bucket) compact(ctx context.Context, all bool) (done Compaction, err error) {
	old, err := bucket.checkpoint(ctx)
	if err != nil {
		return done, err
	}
	floor, err := bucket.lastSequence(ctx)
	if err != nil {
		return done, err
	}
	records, err := bucket.scan(ctx)
	if err != nil {
		return done, bucket.fail(ctx, "compact", err)
	}
	next := &checkpoint{head: checkpointHead{Floor: max(floor, old.head.Floor)}, live: map[string]uint64{}}
	var markers, ghosts []record
	for _, rec := range records {
		switch {
		case isReserved(rec.Key):
		case rec.deleted && rec.ttl > 0: // it expires soon
		case rec.deleted:
			markers = append(markers, rec)
		case !old.covers(rec.Key, rec.Revision):
			ghosts = append(ghosts, rec)
		default:
			done.Live++
			if rec.Revision <= next.head.Floor {
				next.live[rec.Key] = rec.Revision
			}
		}
	}
	done.Markers, done.Ghosts = len(markers), len(ghosts)
	remove := ghosts // the old checkpoint hides them already
	if len(markers) > 0 && (all || len(markers) > max(markersKept, done.Live)) {
		ops, err := next.ops(old)
		if err != nil {
			return done, err
		}
		if _, err := bucket.commit(ctx, ops, nil); err != nil {
			return done, err
		}
		for _, rec := range markers {
			if rec.Revision <= next.head.Floor {
				remove = append(remove, rec)
			}
		}
	}
	done.Removed, err = bucket.removeAll(ctx, remove)
	return done, err
}

func (bucket *Bucket) raiseLimit(ctx context.Context, by int64) error {
	s, err := bucket.b.JetStream().Stream(ctx, bucket.stream)
	if err == nil {
		cfg := s.CachedInfo().Config
		cfg.MaxBytes += by
		_, err = bucket.b.JetStream().UpdateStream(ctx, cfg)
	}
	if err != nil {
		return bucket.fail(ctx, "change the size limit", err)
	}
	return nil
}

// lastSequence is the sequence of the newest message that the bucket ever had.
func (bucket *Bucket) lastSequence(ctx context.Context) (last uint64, err error) {
	info, err := bucket.info(ctx, "read the last sequence")
	if err != nil {
		return 0, err
	}
	return info.State.LastSeq, nil
}

// Created is when the bucket was created, by the server's clock. One that was lost and created again is younger than what it had.
func (bucket *Bucket) Created(ctx context.Context) (time.Time, error) {
	info, err := bucket.info(ctx, "read the time of its creation")
	if err != nil {
		return time.Time{}, err
	}
	return info.Created, nil
}

func (bucket *Bucket) info(ctx context.Context, doing string) (info *jetstream.StreamInfo, err error) {
	if bucket.caller != nil {
		return bucket.infoAtDoor(ctx)
	}
	err = bucket.retry(ctx, func(ctx context.Context) error {
		s, err := bucket.b.JetStream().Stream(ctx, bucket.stream)
		if err == nil {
			info = s.CachedInfo()
		}
		return err
	})
	if err != nil {
		return nil, bucket.fail(ctx, doing, err)
	}
	return info, nil
}

// scan reads the newest record of every key, including markers, without values. It includes everything acknowledged
// before the call.
func (bucket *Bucket) scan(ctx context.Context) ([]record, error) {
	w := &watch{kv: bucket, filters: []string{bucket.prefix + ">"}, known: map[string]uint64{}, bare: true}
	ctx, cancel := w.untilReconnect(ctx)
	defer cancel()
	s, err := w.open(ctx)
	if err != nil {
		return nil, err
	}
	defer s.close(ctx)
	found := map[string]record{}
	for s.pending > 0 || s.highest < s.floor {
		rec, err := s.next(ctx, false)
		if err != nil {
			return nil, err
		}
		if rec != nil {
			found[rec.Key] = *rec
		}
	}
	return slices.Collect(maps.Values(found)), nil
}

// removeAll replaces each record by a marker that expires, unless another write was faster. Publishing is sufficient:
// neither a purge nor a deletion in the stream survives a crash any better.
func (bucket *Bucket) removeAll(ctx context.Context, records []record) (removed int, err error) {
	for chunk := range slices.Chunk(records, removeTogether) {
		errs := make([]error, len(chunk))
		var group sync.WaitGroup
		for i, rec := range chunk {
			group.Go(bus.Guard(func() { errs[i] = bucket.remove(ctx, rec) }))
		}
		group.Wait()
		for _, err := range errs {
			switch {
			case err == nil:
				removed++
			case !bus.HasServerCode(err, codeWrongRevision, codeWrongRevision2): // otherwise another write was faster
				return removed, bucket.fail(ctx, "remove a marker", err)
			}
		}
	}
	return removed, nil
}

func (bucket *Bucket) remove(ctx context.Context, rec record) error {
	m := bucket.message(OpDelete(rec.Key, rec.Revision))
	m.Header[jetstream.MsgTTLHeader] = []string{"1s"}
	return bucket.retry(ctx, func(ctx context.Context) error {
		_, err := bucket.append(ctx, []*bus.Msg{m}, "") // a repetition is refused, or removes the same record again
		return err
	})
}

// Maintain compacts the bucket when necessary, and removes ghosts after each restart of the server, until ctx ends. One
// process does it for all users of the bucket; several are harmless. It needs permission to write every key.
func (bucket *Bucket) Maintain(ctx context.Context) {
	if bucket.caller != nil {
		return // the head does
	}
	var scanned time.Time
	var reconnects uint64
	var due uint64 // number of messages that makes a compaction necessary
	for ctx.Err() == nil {
		messages, full := bucket.size(ctx)
		now := bucket.b.Reconnects()
		if scanned.IsZero() || time.Since(scanned) > rescanEvery || now != reconnects || messages > due || full {
			act, cancel := context.WithTimeout(ctx, maintainAct)
			done, err := bucket.Compact(act, full)
			cancel()
			switch {
			case err == nil:
				scanned, reconnects, due = time.Now(), now, uint64(done.Live+max(markersKept, done.Live)+markersKept/10)
				if done.Ghosts > 0 {
					bucket.b.Logger().Warn("bus: a restart of the server restored deleted values; they were ignored and are removed", "bucket", bucket.cfg.Bucket, "ghosts", done.Ghosts)
				}
			case ctx.Err() == nil:
				bucket.b.Logger().Warn("bus: compaction of a bucket failed; it will be retried", "bucket", bucket.cfg.Bucket, "error", err)
			}
		}
		_ = bus.Sleep(ctx, maintainEvery/2+rand.N(maintainEvery)) // the loop checks ctx
	}
}

// size is the number of messages of the bucket, and whether it is nearly full; zero without an answer of the server.
func (bucket *Bucket) size(ctx context.Context) (messages uint64, full bool) {
	ctx, cancel := context.WithTimeout(ctx, attemptLimit)
	defer cancel()
	s, err := bucket.b.JetStream().Stream(ctx, bucket.stream)
	if err != nil {
		return 0, false
	}
	info := s.CachedInfo()
	return info.State.Msgs, info.Config.MaxBytes > 0 && info.State.Bytes > uint64(info.Config.MaxBytes)/4*3
}
