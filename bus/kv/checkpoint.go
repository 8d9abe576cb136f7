package kv

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"troupe/bus"
)

const (
	reservedWord   = "=kv" // the prefix of the bucket's own keys; not a valid namespace
	checkpointKey  = reservedWord + ".checkpoint"
	checkpointPart = 256 << 10 // bytes of keys in one part, about
	readAttempts   = 20        // to read a checkpoint that is being replaced
)

func isReserved(key string) bool { return strings.HasPrefix(key, reservedWord+".") }

// checkpoint distinguishes the live entries of a bucket from ghosts: an entry is live if it is newer than the floor, or
// if the checkpoint lists its key at its revision. A checkpoint allows Compact to remove the markers of deleted keys:
// before it, the marker proves that the key is gone, and afterwards the checkpoint does.
//
// It is stored as a head, the key =kv.checkpoint, and parts with the live keys, =kv.live.<set>.<n>. A head and its
// parts are one batch that replaces the head at its revision, so that one of several writers wins. Two sets of parts
// alternate, so that a batch of which a crash left only a part does not affect the parts of the old head. These keys
// are only overwritten, never deleted, so none of their old values can return after a crash.
type checkpoint struct {
	revision uint64 // of its head; 0: none
	head     checkpointHead
	live     map[string]uint64 // revisions by key
}

type checkpointHead struct {
	Version int    `json:"v"`
	Floor   uint64 `json:"floor"` // never lower than that of the checkpoint before
	Set     int    `json:"set"`   // 0 or 1: the set of parts
	Parts   int    `json:"parts"`
	Keys    int    `json:"keys"` // in all parts
}

type livePart struct {
	Floor uint64            `json:"floor"` // that of its head
	Keys  map[string]uint64 `json:"keys"`  // revisions
}

const checkpointVersion = 1

func livePartKey(set, n int) string { return fmt.Sprintf("%s.live.%d.%d", reservedWord, set, n) }

// covers reports whether an entry of that key at that revision may be live.
func (c *checkpoint) covers(key string, revision uint64) bool {
	return revision > c.head.Floor || c.live[key] == revision
}

// read returns the newest record of a key, as deleted if it is a ghost or an expired lease. Its revision is that of the
// stored message in any case: a creation has to replace that message.
func (bucket *Bucket) read(ctx context.Context, key string) (record, error) {
	if bucket.caller != nil {
		return bucket.readAtDoor(ctx, key)
	}
	for {
		rec, err := bucket.last(ctx, bucket.prefix+key)
		if err != nil || rec.deleted || isReserved(key) {
			return rec, err
		}
		ghosts, err := bucket.ghostFilter(ctx)
		if err != nil || !ghosts.hide(rec) {
			return rec, err
		}
		// The entry may have been replaced, and the new checkpoint may list its replacement. Read again: a ghost is
		// still there.
		again, err := bucket.last(ctx, bucket.prefix+key)
		if err != nil || again.deleted || again.Revision == rec.Revision {
			again.deleted = true
			return again, err
		}
	}
}

// ghostFilter detects ghosts among records that were stored before it was made. The zero filter hides nothing.
type ghostFilter struct {
	now        time.Time // of the server, for leases
	checkpoint *checkpoint
}

func (bucket *Bucket) ghostFilter(ctx context.Context) (f ghostFilter, err error) {
	switch {
	case bucket.cfg.Leases:
		f.now, err = bucket.serverNow(ctx)
	case bucket.cfg.durable():
		f.checkpoint, err = bucket.checkpoint(ctx)
	}
	return f, err
}

// hide reports whether a record is a ghost or an expired lease.
func (f ghostFilter) hide(rec record) bool {
	switch {
	case f.checkpoint != nil:
		return !f.checkpoint.covers(rec.Key, rec.Revision)
	case !f.now.IsZero():
		return rec.expired(f.now)
	}
	return false
}

// refuseGhosts refuses writes that expect the revision of a ghost: the server does not detect ghosts and would accept
// them. It runs before each attempt, because a ghost appears only while the server restarts.
func (bucket *Bucket) refuseGhosts(ctx context.Context, ops []Op) error {
	expects := func(op Op) bool { return op.kind != opCreate && op.revision != 0 }
	if !bucket.cfg.durable() || !slices.ContainsFunc(ops, expects) {
		return nil
	}
	c, err := bucket.checkpoint(ctx)
	if err != nil {
		return err
	}
	for _, op := range ops {
		if !expects(op) || c.covers(op.Key, op.revision) {
			continue
		}
		rec, err := bucket.read(ctx, op.Key)
		if err != nil {
			return err
		}
		if rec.deleted {
			return bucket.conflict(bus.CodeConflict, op.Key, 0, "it does not exist any more")
		}
		return bucket.conflict(bus.CodeConflict, op.Key, rec.Revision, "another writer has written it since revision "+strconv.FormatUint(op.revision, 10))
	}
	return nil
}

// checkpoint reads the bucket's checkpoint. A head that is older than the latest one of this handle comes from a
// damaged store, or from another bucket of that name, whose revisions are all newer: the floor never decreases.
func (bucket *Bucket) checkpoint(ctx context.Context) (*checkpoint, error) {
	waits := retries.Start()
	for range readAttempts {
		head, err := bucket.last(ctx, bucket.prefix+checkpointKey)
		if err != nil {
			return nil, err
		}
		known := bucket.latest.Load()
		if known != nil && head.Revision <= known.revision {
			return known, nil
		}
		c, complete, err := bucket.readParts(ctx, head)
		if err != nil {
			return nil, err
		}
		if complete {
			bucket.latest.CompareAndSwap(known, c) // another reader may have a newer one
			return c, nil
		}
		if waits.Wait(ctx) != nil {
			return nil, bucket.fail(ctx, "read the checkpoint", ctx.Err())
		}
	}
	return nil, bus.Errorf(bus.CodeMalformed, "bucket %s: parts of its checkpoint are missing: the store is damaged; restore it from a backup", bucket.cfg.Bucket)
}

// readParts reads the parts of a head; complete is false if they belong to another head, because a writer is replacing
// them.
func (bucket *Bucket) readParts(ctx context.Context, rec record) (c *checkpoint, complete bool, err error) {
	c = &checkpoint{revision: rec.Revision, live: map[string]uint64{}}
	if rec.deleted {
		return c, true, nil
	}
	if err := json.Unmarshal(rec.Value, &c.head); err != nil {
		return nil, false, bus.Errorf(bus.CodeMalformed, "bucket %s: its checkpoint is malformed: %w", bucket.cfg.Bucket, err)
	}
	if c.head.Version != checkpointVersion {
		return nil, false, bus.Errorf(bus.CodeVersion, "bucket %s: its checkpoint has version %d; this program supports %d", bucket.cfg.Bucket, c.head.Version, checkpointVersion)
	}
	for n := range c.head.Parts {
		rec, err := bucket.last(ctx, bucket.prefix+livePartKey(c.head.Set, n))
		if err != nil || rec.deleted {
			return nil, false, err
		}
		var part livePart
		if err := json.Unmarshal(rec.Value, &part); err != nil {
			return nil, false, bus.Errorf(bus.CodeMalformed, "bucket %s: part %d of its checkpoint is malformed: %w", bucket.cfg.Bucket, n, err)
		}
		if part.Floor != c.head.Floor {
			return nil, false, nil
		}
		maps.Copy(c.live, part.Keys)
	}
	return c, len(c.live) == c.head.Keys, nil
}

// ops returns the writes that replace the checkpoint old by c.
func (c *checkpoint) ops(old *checkpoint) ([]Op, error) {
	c.head.Version, c.head.Set, c.head.Keys = checkpointVersion, 1-old.head.Set, len(c.live)
	var ops []Op
	part, size := livePart{Floor: c.head.Floor, Keys: map[string]uint64{}}, 0
	flush := func() error {
		value, err := json.Marshal(part)
		ops = append(ops, OpPut(livePartKey(c.head.Set, len(ops)), value))
		part.Keys, size = map[string]uint64{}, 0
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(c.live)) {
		part.Keys[key] = c.live[key]
		if size += len(key) + 24; size >= checkpointPart {
			if err := flush(); err != nil {
				return nil, err
			}
		}
	}
	if len(part.Keys) > 0 {
		if err := flush(); err != nil {
			return nil, err
		}
	}
	c.head.Parts = len(ops)
	value, err := json.Marshal(c.head)
	head := OpCreate(checkpointKey, value)
	if old.revision != 0 {
		head = OpUpdate(checkpointKey, value, old.revision)
	}
	return append(ops, head), err
}
