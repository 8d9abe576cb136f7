package calls_test

import (
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/direct"
	"troupe/bus/shm"
	"troupe/bus/values"
	"troupe/bus/wire"
)

const dataPortEnv = "TROUPE_BUS_TEST_DATA_PORT"

func init() { programs = append(programs, runDataPortIfAsked) }

// runDataPortIfAsked is the main function of a node's data port, which ends with its standard input.
func runDataPortIfAsked() {
	dir := os.Getenv(dataPortEnv)
	if dir == "" {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }()
	server, err := direct.Serve(direct.Config{Listen: "127.0.0.1:0", OpenFunc: direct.NewRegions(shm.Config{Dir: dir}).Open})
	if err == nil {
		err = server.Announce(ctx, dir)
	}
	if err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

func straight(dir string) bus.Config {
	return bus.Config{Values: bus.ValuesConfig{Direct: bus.DirectConfig{On: true, Dir: dir, Listen: "127.0.0.1"}}}
}

// dialStraight is a second process's bus that uses the direct way.
func dialStraight(t *testing.T, b *bus.Bus, dir string) *bus.Bus {
	cfg := straight(dir)
	cfg.URLs = []string{b.URL()}
	return bustest.Open(t, cfg)
}

func openStraight(t *testing.T, dir string) *bus.Bus {
	cfg := straight(dir)
	cfg.Server = bus.ServerConfig{Listen: "127.0.0.1:0"}
	return bustest.Open(t, cfg)
}

// TestLargeValuesGoStraight: values and arguments of processes that share no memory do not pass the server, small ones do.
func TestLargeValuesGoStraight(t *testing.T) {
	const small, middle, large = 300 << 10, 3 << 20, 12 << 20
	b := openStraight(t, "")
	memory := bustest.NewMemory(t)
	owner, reader := endpoint(t, b), endpoint(t, dialStraight(t, b, ""))
	for _, size := range []int{small, middle, large} {
		ref, err := owner.References().Put(pattern(size, 1), nil, nil)
		require.NoError(t, err)
		reader.References().Retain(ref)
		v, err := value(t, reader, ref, memory)
		require.NoError(t, err)
		require.Equal(t, checksum(pattern(size, 1)), checksum(v.Body))
		values.FreeBody(memory, v.Body)
		reader.References().Release(ref)
		owner.References().Release(ref)
	}
	received := reader.Traffic().Received
	require.EqualValues(t, small, received[values.PathChunks])
	require.EqualValues(t, middle+large, received[values.PathDirect])
	until(t, func() bool {
		return owner.Traffic().Sent[values.PathDirect] == middle+large && memory.InUse() == 0 && owner.Values().Uploads() == 0
	})

	role := newTestRole(t, 2)
	role.start(dialStraight(t, b, ""))
	before := owner.Traffic().Sent[values.PathChunks]
	for _, a := range good(t, scatter(t, owner, role.call("crc", pattern(large, 2)))) {
		require.Equal(t, checksum(pattern(large, 2)), a.Body)
	}
	require.Equal(t, before, owner.Traffic().Sent[values.PathChunks])
}

// TestWithoutATicketTheBusIsTheWay: the tickets are lost, as they are with an owner of an earlier version.
func TestWithoutATicketTheBusIsTheWay(t *testing.T) {
	t.Parallel()
	const size = 3 << 20
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	driver := newFaultyConnWith(t, srv, straight(""))
	cfg := straight("")
	cfg.URLs = []string{srv.URL()}
	owner, reader := endpoint(t, bustest.Open(t, cfg)), endpoint(t, driver.Bus)
	driver.faults.SetRule(func(m bustest.Message) bustest.Verdict {
		if f, ok := m.Frame(); ok && f.Kind == wire.KindTicket {
			return bustest.Drop
		}
		return bustest.Pass
	})
	ref, err := owner.References().Put(pattern(size, 1), nil, nil)
	require.NoError(t, err)
	reader.References().Retain(ref)
	v, err := value(t, reader, ref, nil)
	require.NoError(t, err)
	require.Equal(t, checksum(pattern(size, 1)), checksum(v.Body))
	require.EqualValues(t, size, reader.Traffic().Received[values.PathChunks])
}

// cutRelay passes connections on to a data port until so many bytes of it have passed; from then on do is called with each connection.
func cutRelay(t *testing.T, to string, after int64, do func(near, far net.Conn)) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	var passed atomic.Int64
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				_ = near.Close()
				continue
			}
			t.Cleanup(func() { _ = near.Close(); _ = far.Close() })
			go func() { _, _ = io.Copy(far, near) }()
			go func() {
				buf := make([]byte, 32<<10)
				for {
					n, err := far.Read(buf)
					if err != nil {
						_ = near.Close()
						return
					}
					_, _ = near.Write(buf[:n])
					if passed.Add(int64(n)) > after {
						do(near, far)
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

// announce makes a server the data port of a host until the test ends.
func announce(t *testing.T, server *direct.Server, dir string) {
	announced, stop := context.WithCancel(t.Context())
	doneCh := make(chan error, 1)
	go func() { doneCh <- server.Announce(announced, dir) }()
	t.Cleanup(func() { stop(); require.NoError(t, <-doneCh) })
	until(t, func() bool { return direct.Find(dir, "127.0.0.1") != nil })
}

// TestADataPortFailsInTheMiddle: the data port of the node ends its connections in the middle, is silent from there on, or is killed. The value is
// right, once for all processes of the receiving host, and the bytes that had arrived are not sent again.
func TestADataPortFailsInTheMiddle(t *testing.T) {
	const size = 24 << 20
	for name, how := range map[string]func(near, far net.Conn){
		"ends":   func(near, far net.Conn) { _ = near.Close(); _ = far.Close() },
		"silent": func(near, far net.Conn) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			here, there := shortDir(t), shortDir(t)
			b := openStraight(t, here)
			ownerMemory, readerMemory := newSharedMemory(t, here), newSharedMemory(t, there)
			regions := direct.NewRegions(shm.Config{Dir: here})
			t.Cleanup(regions.Close)
			server, err := direct.Serve(direct.Config{Listen: "127.0.0.1:0", OpenFunc: regions.Open})
			require.NoError(t, err)
			t.Cleanup(server.Close)
			server.Addresses = []string{cutRelay(t, server.Addresses[0], size/2, how)}
			announce(t, server, here)

			owner, reader := endpoint(t, b), endpoint(t, dialStraight(t, b, there))
			body := ownerMemory.Make(size)
			copy(body, pattern(size, 3))
			ref, err := owner.References().Put(body, ownerMemory, nil)
			require.NoError(t, err)
			reader.References().Retain(ref)
			v, err := value(t, reader, ref, readerMemory)
			require.NoError(t, err)
			require.Equal(t, checksum(pattern(size, 3)), checksum(v.Body))
			values.FreeBody(readerMemory, v.Body)
			received := reader.Traffic().Received
			require.Positive(t, received[values.PathDirect])
			require.Positive(t, received[values.PathChunks])
			require.Less(t, received[values.PathChunks], uint64(size))
			reader.References().Release(ref)
			owner.References().Release(ref)
			until(t, func() bool { return owner.Values().Uploads() == 0 && ownerMemory.arena.Stats().InUse == 0 })
		})
	}
}

// TestTheDataPortOfTheNodeServes: a process of its own reads the bodies in the memory of its host. When it is killed, the owner's process serves.
func TestTheDataPortOfTheNodeServes(t *testing.T) {
	t.Parallel()
	const size = 12 << 20
	here, there := shortDir(t), shortDir(t)
	b := openStraight(t, here)
	ownerMemory, readerMemory := newSharedMemory(t, here), newSharedMemory(t, there)
	owner := endpoint(t, b)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), dataPortEnv+"="+here)
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = stdin.Close(); _ = cmd.Wait() })
	until(t, func() bool { return direct.Find(here, "127.0.0.1") != nil })
	require.Nil(t, direct.Find(here, "10.0.0.1"), "other machines do not reach it")

	body := ownerMemory.Make(size)
	copy(body, pattern(size, 4))
	ref, err := owner.References().Put(body, ownerMemory, nil)
	require.NoError(t, err)
	// A client gives a port a second to answer, which a busy machine may miss, and then leaves it alone for a minute: the next one tries again.
	getStraight := func() {
		t.Helper()
		until(t, func() bool {
			reader := endpoint(t, dialStraight(t, b, there))
			reader.References().Retain(ref)
			v, err := value(t, reader, ref, readerMemory)
			require.NoError(t, err)
			require.Equal(t, checksum(pattern(size, 4)), checksum(v.Body))
			values.FreeBody(readerMemory, v.Body)
			reader.References().Release(ref)
			until(t, func() bool { return readerMemory.arena.Stats().InUse == 0 }) // the host has dropped the value
			return reader.Traffic().Received[values.PathDirect] == size
		})
	}
	getStraight()
	require.Equal(t, 1, ownerMemory.arena.Stats().Readers, "the data port reads the memory")
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait() // killed
	require.Nil(t, direct.Find(here, "127.0.0.1"))
	getStraight()
	owner.References().Release(ref)
}

// TestGoProgramsShareWhatTheyReceive: several processes of a host without a memory of their own need a value, which comes to the host once.
func TestGoProgramsShareWhatTheyReceive(t *testing.T) {
	t.Parallel()
	const size, readers = 6 << 20, 3
	b := openStraight(t, "")
	owner, dir := endpoint(t, b), shortDir(t)
	ref, err := owner.References().Put(pattern(size, 6), nil, nil)
	require.NoError(t, err)
	var all []*calls.Endpoint
	gotCh := make(chan []byte, readers)
	for range readers {
		cfg := straight("")
		cfg.URLs, cfg.Values.Shared = []string{b.URL()}, bus.SharedConfig{On: true, Dir: dir}
		reader := endpoint(t, bustest.Open(t, cfg))
		all = append(all, reader)
		reader.References().Retain(ref)
		reader.References().Get(ref, nil, func(v values.Value, _ error) { gotCh <- v.Body })
	}
	for range readers {
		body := <-gotCh
		require.Equal(t, checksum(pattern(size, 6)), checksum(body))
		clear(body) // it is its own
	}
	var direct, shared uint64
	for _, reader := range all {
		received := reader.Traffic().Received
		direct, shared = direct+received[values.PathDirect], shared+received[values.PathShared]
	}
	require.EqualValues(t, size, direct)
	require.EqualValues(t, (readers-1)*size, shared)
}
