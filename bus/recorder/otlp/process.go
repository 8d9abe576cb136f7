package otlp

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"troupe/bus/recorder"
)

const flushWait = 2 * time.Second

// process is the exporter of this process; nil: none is wanted.
var process = sync.OnceValue(func() *Exporter {
	cfg, err := FromEnvironment(os.Getenv, filepath.Base(os.Args[0]))
	if err != nil {
		slog.Error("OpenTelemetry: nothing is exported", "error", err)
		return nil
	}
	if cfg.Traces == "" || !recorder.On() {
		return nil
	}
	cfg.Resource["process.pid"] = strconv.Itoa(os.Getpid())
	if host, err := os.Hostname(); err == nil {
		cfg.Resource["host.name"] = host
	}
	return Start(cfg, slog.Default())
})

// Begin exports the records of this process from now on, if the environment says so. It does nothing the second time.
func Begin() { process() }

// FlushProcess sends what is queued, for two seconds at most: before a process ends.
func FlushProcess() {
	if e := process(); e != nil {
		ctx, cancel := context.WithTimeout(context.Background(), flushWait)
		defer cancel()
		e.Flush(ctx)
	}
}
