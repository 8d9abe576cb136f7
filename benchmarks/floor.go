package benchmarks

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"

	"github.com/nats-io/nats.go"
)

// floorFanout is the same publish and gather with bare nats.go: n subscriptions whose handlers echo the message, on connections
// of the same layout; one publish, one inbox, a counter. For one worker it is nc.Request.
func floorFanout(url string, n int, layout string, arg []byte) (call func(context.Context) error, stop func(), err error) {
	var conns []*nats.Conn
	stop = func() {
		for _, nc := range conns {
			nc.Close()
		}
	}
	connect := func() (*nats.Conn, error) {
		nc, err := nats.Connect(url)
		if err == nil {
			conns = append(conns, nc)
		}
		return nc, err
	}
	driver, err := connect()
	if err != nil {
		return nil, nil, err
	}
	var worker *nats.Conn
	for i := range n {
		if i == 0 || layout == Own {
			if worker, err = connect(); err != nil {
				stop()
				return nil, nil, err
			}
		}
		nc := worker
		if _, err = nc.Subscribe(floorSubject, func(m *nats.Msg) { _ = nc.Publish(m.Reply, m.Data) }); err == nil {
			err = nc.Flush()
		}
		if err != nil {
			stop()
			return nil, nil, err
		}
	}
	call, err = floorCall(driver, n, arg)
	return call, stop, err
}

// floorSubject is where the workers of the floor listen.
const floorSubject = "floor.all"

// floorCall publishes once and waits for n answers.
func floorCall(driver *nats.Conn, n int, arg []byte) (func(context.Context) error, error) {
	if n == 1 {
		return func(ctx context.Context) error {
			m, err := driver.RequestWithContext(ctx, floorSubject, arg)
			if err == nil && !bytes.Equal(m.Data, arg) {
				err = fmt.Errorf("a wrong answer")
			}
			return err
		}, nil
	}
	return floorGather(driver, n, arg)
}

func floorGather(driver *nats.Conn, n int, arg []byte) (func(context.Context) error, error) {
	var left atomic.Int64
	doneCh := make(chan struct{}, 1)
	inbox := nats.NewInbox()
	_, err := driver.Subscribe(inbox, func(*nats.Msg) {
		if left.Add(-1) == 0 {
			doneCh <- struct{}{}
		}
	})
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		left.Store(int64(n))
		if err := driver.PublishRequest(floorSubject, inbox, arg); err != nil {
			return err
		}
		select {
		case <-doneCh:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}, driver.Flush()
}
