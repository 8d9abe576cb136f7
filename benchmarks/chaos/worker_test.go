package chaos

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"troupe/actors"
)

// WorkerConfig is the configuration of a role of this package's class.
type WorkerConfig struct {
	Dir string `msgpack:"dir"` // where workers write down what they have executed
}

// worker writes down every call that it executes, before it answers.
type worker struct{ executed *os.File }

// WorkerClass is what worker processes of the cluster under test play.
func WorkerClass() *actors.Class {
	k := actors.NewClass("chaos", newWorker)
	actors.Method(k, "run", (*worker).run)
	return k.Class
}

func newWorker(_ context.Context, s actors.Setup) (*worker, error) {
	var cfg WorkerConfig
	if err := s.DecodeConfig(&cfg); err != nil || cfg.Dir == "" {
		return &worker{}, err
	}
	name := fmt.Sprintf("executed-%s-%d-%d-%d", s.Role.Role, s.Rank, os.Getpid(), time.Now().UnixNano())
	f, err := os.OpenFile(filepath.Join(cfg.Dir, name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	return &worker{f}, err
}

// run executes a numbered call. A line that was written outlives a SIGKILL of the process.
func (w *worker) run(_ context.Context, call string) (string, error) {
	if w.executed != nil {
		if _, err := fmt.Fprintln(w.executed, call); err != nil {
			return "", err
		}
	}
	return call, nil
}
