package rollouts

import (
	"context"
	"errors"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// Server runs rollouts in this process, or stands by while another process runs them.
type Server struct {
	cfg    Config
	name   string
	spec   Spec
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu  sync.Mutex // guards the following field
	own *engine
}

const (
	standbyInterval = 500 * time.Millisecond
	beginTimeout    = time.Minute      // of Serve
	silentTimeout   = 15 * time.Second // an engine that has a subscription and does not answer is replaced
)

// Serve runs rollouts, or continues them from their log. While another process runs them it stands by, and takes over when that
// one is gone. It returns when the rollouts run, here or there.
func Serve(ctx context.Context, cfg Config, name string, declared Spec) (*Server, error) {
	if cfg.Namespace == "" {
		cfg.Namespace = "default"
	}
	if cfg.Logger == nil && cfg.Bus != nil {
		cfg.Logger = cfg.Bus.Logger()
	}
	declared = declared.WithDefaults()
	if cfg.Bus == nil {
		return nil, bus.Errorf(bus.CodeInvalid, "rollouts.Config: Bus is not set; open one with bus.Open")
	}
	if err := errors.Join(bus.CheckName("namespace", cfg.Namespace), bus.CheckName("rollouts", name), declared.Check()); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, name: name, spec: declared}
	if err := s.begin(ctx); err != nil {
		return nil, err
	}
	background, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	s.group.Go(bus.Guard(func() { s.run(background) }))
	return s, nil
}

// begin opens the engine unless another answers.
func (s *Server) begin(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, beginTimeout)
	defer cancel()
	return bus.Retry(ctx, backoff, func() error {
		err := s.answers(ctx)
		if err == nil {
			return nil
		}
		if errors.Is(err, bus.ErrNoResponders) {
			err = s.open(ctx)
		}
		if errors.Is(err, bus.ErrMalformed) || errors.Is(err, bus.ErrInvalid) || errors.Is(err, bus.ErrNoSpace) {
			return bus.Permanent(err)
		}
		return err
	})
}

func (s *Server) open(ctx context.Context) error {
	e, err := open(ctx, s.cfg, s.name, s.spec)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.own = e
	return nil
}

// answers asks for an engine.
func (s *Server) answers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	body, err := wire.Marshal(request{})
	if err != nil {
		return err
	}
	_, err = s.cfg.Bus.Request(ctx, address{s.cfg.Namespace, s.name}.ask("status"), body)
	return err
}

// run keeps an engine running somewhere.
func (s *Server) run(ctx context.Context) {
	heard := time.Now()
	for {
		s.mu.Lock()
		own := s.own
		s.mu.Unlock()
		if own != nil {
			select {
			case <-own.doneCh:
				s.mu.Lock()
				s.own = nil
				s.mu.Unlock()
				own.group.Wait()
				heard = time.Now()
			case <-ctx.Done():
				return
			}
		}
		if bus.Sleep(ctx, standbyInterval) != nil {
			return
		}
		err := s.answers(ctx)
		if err == nil {
			heard = time.Now()
		}
		if errors.Is(err, bus.ErrNoResponders) || err != nil && time.Since(heard) > silentTimeout {
			if err := s.open(ctx); err != nil && ctx.Err() == nil {
				s.cfg.Logger.Warn("rollouts: not taken over yet", "rollouts", s.name, "error", err)
			}
		}
	}
}

// Running reports whether the engine runs in this process.
func (s *Server) Running() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.own != nil
}

// Close ends the engine of this process, or its standing by. What is stored stays.
func (s *Server) Close() {
	s.cancel()
	s.group.Wait()
	s.mu.Lock()
	own := s.own
	s.own = nil
	s.mu.Unlock()
	if own != nil {
		own.cancel(context.Canceled)
		<-own.doneCh
		own.group.Wait()
	}
}
