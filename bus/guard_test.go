package bus_test

import (
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
)

type told struct {
	what  any
	stack string
}

// tell sends panics to a channel during the test. Such a test must not be parallel.
func tell(t *testing.T) <-chan told {
	ch := make(chan told, 8)
	bus.OnPanic(func(p any, stack []byte) { ch <- told{p, string(stack)} })
	t.Cleanup(func() { bus.OnPanic(nil) })
	return ch
}

func TestAPanicIsToldAndEndsNothing(t *testing.T) {
	ch := tell(t)
	b := bustest.Open(t, bus.Config{})
	heard := make(chan string, 2)
	sub, err := b.Conn().Subscribe("guard.test", bus.GuardMsg(func(m *nats.Msg) {
		if string(m.Data) == "bad" {
			panic("message")
		}
		heard <- string(m.Data)
	}))
	require.NoError(t, err)
	defer func() { require.NoError(t, sub.Unsubscribe()) }()
	var group sync.WaitGroup
	for what, do := range map[string]func(){
		"goroutine": func() { bus.Go(func() { panic("goroutine") }) },
		"group":     func() { group.Go(bus.Guard(func() { panic("group") })) },
		"timer":     func() { time.AfterFunc(0, bus.Guard(func() { panic("timer") })) },
		"message":   func() { require.NoError(t, b.Conn().Publish("guard.test", []byte("bad"))) },
	} {
		do()
		got := <-ch
		assert.Equal(t, what, got.what)
		assert.Contains(t, got.stack, "guard_test.go", "where it happened")
	}
	group.Wait()
	require.NoError(t, b.Conn().Publish("guard.test", []byte("good")))
	assert.Equal(t, "good", <-heard, "the subscription goes on")
}

// TestAPanicEndsAProgramThatDidNotAsk runs itself as another process.
func TestAPanicEndsAProgramThatDidNotAsk(t *testing.T) {
	if os.Getenv("TROUPE_TEST_PANIC") != "" {
		bus.Go(func() { panic("on purpose") })
		select {}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestAPanicEndsAProgramThatDidNotAsk$")
	cmd.Env = append(os.Environ(), "TROUPE_TEST_PANIC=1")
	out, err := cmd.CombinedOutput()
	assert.ErrorContains(t, err, "exit status 2")
	assert.Contains(t, string(out), "panic: on purpose")
}
