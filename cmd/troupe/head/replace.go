package head

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
)

// replacedEnv tells a head that it has replaced another one.
const replacedEnv = "TROUPE_HEAD_REPLACED"

// replaceHead runs the program anew in this process, with the same arguments and environment, after the store of its server has
// got stuck. The number of the process stays, and with it the agent's parent and what a supervisor watches; all files and
// sockets are closed by the system, and the next head finds its store as after a kill. It returns only if that fails, with
// an error that asks for another start.
func replaceHead(b *bus.Bus, log *slog.Logger) error {
	_, why := b.StoreErr()
	log.Error("troupe: the store is stuck; the head replaces itself", "pid", os.Getpid(), "error", why)
	self, err := os.Executable()
	for _, path := range []string{self, "/proc/self/exe"} { // the file may have been removed
		err = errors.Join(err, syscall.Exec(path, os.Args, append(os.Environ(), replacedEnv+"=1")))
	}
	return cli.TryLater(fmt.Errorf("the store is stuck (%w), and the head cannot replace itself: %w", why, err))
}

// awaitReplaced has a head that replaced another one wait until its disk takes writes: it cannot start on a full one, and nothing
// else would start it again.
func awaitReplaced(ctx context.Context, store string) error {
	if _, replaced := os.LookupEnv(replacedEnv); !replaced {
		return nil
	}
	if err := os.Unsetenv(replacedEnv); err != nil { // it is not for the agent, nor for workers
		return err
	}
	return bus.AwaitSpace(ctx, store)
}
