package registry

import (
	"context"
	"errors"
)

// MaxValue is the maximum size of one value of the registry: half of the default size of a message.
const MaxValue = 512 << 10

// The keys of a role whose policy restarts workers, beside its record. Their values belong to package roles.
func startParamsKey(role string) string { return "recipe." + role }
func replayKey(role string) string      { return "replay." + role }

// StartParams is the start parameters of a role's workers; ErrNotFound: none are stored.
func (g Registry) StartParams(ctx context.Context, role string) ([]byte, error) {
	e, err := g.kv.Get(ctx, g.key(startParamsKey(role)))
	return e.Value, err
}

// PutStartParams stores the start parameters of a role's workers, in place of those of an earlier role of the name.
func (g Registry) PutStartParams(ctx context.Context, role string, value []byte) error {
	_, err := g.kv.Put(ctx, g.key(startParamsKey(role)), value)
	return err
}

// Replays is the replayed calls of a role and their revision; ErrNotFound: none are stored.
func (g Registry) Replays(ctx context.Context, role string) ([]byte, uint64, error) {
	e, err := g.kv.Get(ctx, g.key(replayKey(role)))
	return e.Value, e.Revision, err
}

// PutReplays stores the replayed calls of a role, by compare-and-set. Revision 0: none are stored. Another writer in between
// is ErrConflict or ErrExists.
func (g Registry) PutReplays(ctx context.Context, role string, value []byte, revision uint64) error {
	var err error
	if revision == 0 {
		_, err = g.kv.Create(ctx, g.key(replayKey(role)), value)
	} else {
		_, err = g.kv.Update(ctx, g.key(replayKey(role)), value, revision)
	}
	return err
}

// DeleteRestartKeys deletes the start parameters and the replayed calls of a role.
func (g Registry) DeleteRestartKeys(ctx context.Context, role string) error {
	return errors.Join(g.deleteKey(ctx, g.key(startParamsKey(role))), g.deleteKey(ctx, g.key(replayKey(role))))
}
