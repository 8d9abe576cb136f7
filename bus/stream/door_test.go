package stream_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/stream"
)

const doorToken = "the-token-of-the-head"

// door is a head that serves teams.
type door struct {
	t    *testing.T
	head *bus.Bus
}

var shared = stream.Config{Name: "news", Subject: "troupe.@events.*", MaxBytes: 1 << 20, Lossy: true}

func openDoor(t *testing.T) door { return openDoorOf(t, 0) }

// openDoorOf is openDoor of a head with so many bytes of store.
func openDoorOf(t *testing.T, store int64) door {
	d := door{t, bustest.Open(t, bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0", Token: doorToken, MaxStore: store}})}
	d.head.AcceptCredentials(nil, nil)
	stop, err := stream.Door{
		Of:  bus.TeamCredential,
		Bus: d.head, Serves: func() bool { return true },
		SubjectFunc: func(namespace, name string) (string, bool) {
			rest, ok := strings.CutPrefix(name, "test_"+namespace+"@")
			return "troupe." + namespace + ".@pipeline." + rest + ".stored.>", ok && bus.CheckName("name", rest) == nil
		},
		Shared: []stream.SharedStream{{Config: shared, SubjectFunc: bus.Events}},
		Objects: []stream.SharedObjects{{Config: stream.ObjectStoreConfig{Name: "things", MaxBytes: 64 << 20}, CheckFunc: func(namespace, object string) (string, error) {
			if sum, hashed := strings.CutPrefix(object, "hash-"); hashed {
				return sum, nil
			}
			if !strings.HasPrefix(object, namespace+".") {
				return "", bus.Errorf(bus.CodeRefused, "%s is not one of %s", object, namespace)
			}
			return "", nil
		}}},
	}.Start()
	require.NoError(t, err)
	t.Cleanup(stop)
	return d
}

// team is a connection with the credential of a namespace.
func (d door) team(namespace string) *bus.Bus {
	text, _, err := bus.Credential{Kind: bus.TeamCredential, Namespace: namespace}.Issue(doorToken)
	require.NoError(d.t, err)
	return bustest.Open(d.t, bus.Config{URLs: []string{d.head.URL()}, Token: text, OnError: func(error) {}})
}

func ownConfig(namespace, name string) stream.Config {
	return stream.Config{Name: "test_" + namespace + "@" + name, Subject: "troupe." + namespace + ".@pipeline." + name + ".stored.>", MaxBytes: 64 << 20, Replace: true}
}

// openOwn is a team at a door, and a stream of its own.
func openOwn(t *testing.T) (*bus.Bus, *stream.Stream) {
	b := openDoor(t).team("red")
	s, err := stream.Create(testContext(t), b, ownConfig("red", "p"))
	require.NoError(t, err)
	return b, s
}

func own(word, data string) *bus.Msg { return message("troupe.red.@pipeline.p.stored."+word, data) }

// A team stores and reads in its own streams as a process with the head's token does.
func TestTeamStoresAndReads(t *testing.T) {
	t.Parallel()
	b, s := openOwn(t)
	ctx := testContext(t)
	_, err := stream.Find(ctx, b, "test_red@none")
	require.ErrorIs(t, err, bus.ErrNotFound)

	ack, err := stream.Append(ctx, b, []*bus.Msg{own("a", "one")}, "")
	require.NoError(t, err)
	require.EqualValues(t, 1, ack.Seq)
	batch := []*bus.Msg{own("a", "two"), own("b", "three"), own("a", "four")}
	stream.ExpectLast(batch[0], 1)
	ack, err = stream.Append(ctx, b, batch, "first")
	require.NoError(t, err)
	require.EqualValues(t, 4, ack.Seq)
	late := []*bus.Msg{own("a", "five"), own("a", "six")}
	stream.ExpectLast(late[0], 2)
	_, err = stream.Append(ctx, b, late, "second")
	require.ErrorIs(t, err, bus.ErrConflict)

	require.Equal(t, []string{"one", "two", "three", "four"}, read(t, s, stream.ReadOptions{}))
	require.Equal(t, []string{"two", "four"}, read(t, s, stream.ReadOptions{Subject: "troupe.red.@pipeline.p.stored.a", From: 2}))
	m, err := s.Get(ctx, 3)
	require.NoError(t, err)
	require.Equal(t, "three", string(m.Data))
	m, err = s.GetNext(ctx, "troupe.red.@pipeline.p.stored.a", 3)
	require.NoError(t, err)
	require.EqualValues(t, 4, m.Seq)
	state, err := s.State(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 4, state.Messages)

	replaced := own("b", "new")
	replaced.Header = stream.Replacing(time.Hour)
	replaced.Header["Troupe-Item"] = []string{"label"}
	_, err = stream.Append(ctx, b, []*bus.Msg{replaced}, "")
	require.NoError(t, err)
	m, err = s.Get(ctx, 5)
	require.NoError(t, err)
	require.Equal(t, "label", m.Header.Get("Troupe-Item"))
	require.Empty(t, m.Header.Get("Troupe-To"))
	_, err = s.Get(ctx, 3)
	require.ErrorIs(t, err, bus.ErrNotFound, "it was replaced")
	require.NoError(t, s.DeleteMessages(ctx, []uint64{1, 2, 77}))
	require.Equal(t, []string{"four", "new"}, read(t, s, stream.ReadOptions{}))
	require.NoError(t, s.Purge(ctx, "troupe.red.@pipeline.p.stored.a", 0))
	require.Equal(t, []string{"new"}, read(t, s, stream.ReadOptions{}))
	names, err := stream.Names(ctx, b, "test_")
	require.NoError(t, err)
	require.Equal(t, []string{"test_red@p"}, names)
	require.NoError(t, stream.Delete(ctx, b, "test_red@p"))
	require.NoError(t, stream.Delete(ctx, b, "test_red@p"))
	_, err = stream.Find(ctx, b, "test_red@p")
	require.ErrorIs(t, err, bus.ErrNotFound)
	_, err = stream.Append(ctx, b, []*bus.Msg{own("a", "lost")}, "")
	require.ErrorContains(t, err, "no stream stores")
}

// Messages of every size, many of them, are read as they were stored.
func TestTeamReadsLargeMessages(t *testing.T) {
	t.Parallel()
	b, s := openOwn(t)
	ctx := testContext(t)
	random := rand.New(rand.NewPCG(1, 2))
	var want [][]byte
	for i := range 120 {
		size := random.IntN(2000)
		if i%10 == 0 {
			size = random.IntN(b.MaxPayload() - 4096)
		}
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(random.Uint32())
		}
		want = append(want, data)
		_, err := stream.Append(ctx, b, []*bus.Msg{{Subject: "troupe.red.@pipeline.p.stored.x", Data: data}}, "")
		require.NoError(t, err)
	}
	i := 0
	require.NoError(t, s.Each(ctx, stream.ReadOptions{}, func(m stream.Message) error {
		require.True(t, bytes.Equal(want[i], m.Data), "message %d has %d bytes instead of %d", i, len(m.Data), len(want[i]))
		i++
		return nil
	}))
	require.Len(t, want, i)

	ctx, cancel := context.WithCancel(ctx)
	i = 118
	err := s.Follow(ctx, stream.ReadOptions{From: 119, HeadersOnly: true}, func(m stream.Message) error {
		if i++; i == 120 {
			_, err := stream.Append(ctx, b, []*bus.Msg{own("x", "later")}, "")
			require.NoError(t, err)
		}
		require.EqualValues(t, i, m.Seq)
		if i == 121 {
			cancel()
		}
		return nil
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 121, i)
}

// Writes without a wait are stored in order, each after the one before, and acknowledged in order.
func TestTeamAppendsInOrder(t *testing.T) {
	t.Parallel()
	d := openDoor(t)
	b := d.team("red")
	_, err := stream.Create(testContext(t), b, ownConfig("red", "p"))
	require.NoError(t, err)
	inbox, acks := b.NewInbox(), make(chan *bus.Msg, 512)
	sub, err := b.SubscribeChan(inbox+".*", acks)
	require.NoError(t, err)
	defer func() { _ = sub.Unsubscribe() }()
	last := uint64(0)
	for i := range 100 {
		msgs := []*bus.Msg{own("a", fmt.Sprint(i))}
		if i%3 == 0 {
			msgs = append(msgs, own("b", "more"), own("b", "still more"))
		}
		stream.ExpectLast(msgs[0], last)
		last += uint64(len(msgs))
		require.NoError(t, stream.AppendAsync(b, msgs, fmt.Sprint("batch-", i), fmt.Sprintf("%s.%d", inbox, last)))
	}
	for range 100 {
		m := <-acks
		ack, err := stream.ParseAck(m)
		require.NoError(t, err)
		require.True(t, strings.HasSuffix(m.Subject, fmt.Sprint(".", ack.Seq)), m.Subject)
	}
}

// A team reaches nothing of another namespace, and nothing of the head's.
func TestHostileTeamOfStreams(t *testing.T) {
	t.Parallel()
	d := openDoor(t)
	ctx := testContext(t)
	good, evil := d.team("good"), d.team("evil")
	victim, err := stream.Create(ctx, good, ownConfig("good", "p"))
	require.NoError(t, err)
	_, err = stream.Append(ctx, good, []*bus.Msg{message("troupe.good.@pipeline.p.stored.a", "secret")}, "")
	require.NoError(t, err)
	private, err := stream.Create(ctx, d.head, stream.Config{Name: "private", Subject: "private.>", MaxBytes: 1 << 20})
	require.NoError(t, err)
	mine, err := stream.Create(ctx, evil, ownConfig("evil", "p"))
	require.NoError(t, err)

	refused := func(err error, what string) {
		t.Helper()
		require.ErrorIs(t, err, bus.ErrRefused, what)
	}
	for _, name := range []string{"test_good@p", "private", "news.x", "", "test_evil@", "test_evil@a.b", "KV_troupe_credentials", "OBJ_things"} {
		_, err := stream.Find(ctx, evil, name)
		refused(err, name)
		refused(stream.Delete(ctx, evil, name), name)
		cfg := ownConfig("evil", "q")
		cfg.Name = name
		_, err = stream.Create(ctx, evil, cfg)
		refused(err, name)
	}
	for _, subject := range []string{"troupe.good.@pipeline.p.stored.>", ">", "troupe.evil.>", "troupe.evil.@pipeline.q.>", "$KV.>", "troupe.@nodes.>"} {
		cfg := ownConfig("evil", "q")
		cfg.Subject = subject
		_, err := stream.Create(ctx, evil, cfg)
		refused(err, subject)
	}
	for _, bytes := range []int64{0, -1} {
		cfg := ownConfig("evil", "q")
		cfg.MaxBytes = bytes
		_, err := stream.Create(ctx, evil, cfg)
		require.ErrorIs(t, err, bus.ErrInvalid)
	}
	for _, subject := range []string{
		"troupe.good.@pipeline.p.stored.a", "private.x", "troupe.evil.@pipeline.p.ask.x", "troupe.evil.@pipeline.p.stored.*", "troupe.evil.@pipeline.p.stored.a private.x 3",
		"troupe.evil.@pipeline.p.stored..a", "troupe.evil.@pipeline.p.stored", "troupe.evil.actor.one.log.0", "$KV.troupe_registry.good.x",
	} {
		_, err := stream.Append(ctx, evil, []*bus.Msg{message(subject, "x")}, "")
		require.ErrorContains(t, err, "does not permit", subject)
		_, err = stream.Append(ctx, evil, []*bus.Msg{message("troupe.evil.@pipeline.p.stored.a", "x"), message(subject, "x")}, "batch")
		require.Error(t, err, subject)
	}
	for header, value := range map[string]string{"Nats-Rollup": "all", "Nats-Msg-Id": "x", "Nats-Batch-Id": "y", "nats-schedule": "@every 1s", "Nats-Expected-Stream": "private"} {
		m := message("troupe.evil.@pipeline.p.stored.a", "x")
		m.Header = bus.Header{header: {value}}
		_, err := stream.Append(ctx, evil, []*bus.Msg{m}, "")
		require.ErrorContains(t, err, "does not permit the header", header)
	}
	require.Empty(t, read(t, mine, stream.ReadOptions{}))
	require.Equal(t, []string{"secret"}, read(t, victim, stream.ReadOptions{}))
	state, err := private.State(ctx)
	require.NoError(t, err)
	require.Zero(t, state.Messages)

	_, err = stream.Open(ctx, d.head, shared)
	require.NoError(t, err)
	for _, namespace := range []string{"good", "evil", "good"} {
		_, err := stream.Append(ctx, d.head, []*bus.Msg{message(bus.Events(namespace), "of "+namespace)}, "")
		require.NoError(t, err)
	}
	news, err := stream.Open(ctx, evil, shared)
	require.NoError(t, err)
	require.Equal(t, []string{"of evil"}, read(t, news, stream.ReadOptions{Subject: bus.Events("evil")}))
	for _, subject := range []string{"", bus.Events("good"), bus.Events("*"), "troupe.@events.>", ">"} {
		refused(news.Each(ctx, stream.ReadOptions{Subject: subject}, func(stream.Message) error { return nil }), subject)
		_, err := news.GetNext(ctx, subject, 1)
		require.Error(t, err, subject)
	}
	_, err = news.Get(ctx, 1)
	require.Error(t, err, "another's by its number")
	_, err = news.State(ctx)
	refused(err, "how much there is of all")
	refused(news.DeleteMessages(ctx, []uint64{1}), "deletion")
	refused(news.Purge(ctx, "", 0), "purge")
	refused(stream.Delete(ctx, evil, shared.Name), "deletion of all")
	names, err := stream.Names(ctx, evil, "")
	require.NoError(t, err)
	require.Equal(t, []string{"test_evil@p"}, names)

	nc, err := nats.Connect(d.head.URL(), nats.Token(evilText(t)), nats.NoReconnect(), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	require.NoError(t, err)
	defer nc.Close()
	require.NoError(t, nc.PublishRequest("troupe.evil.@pipeline.p.stored.a", "private.ack", []byte("x")), "the server drops it")
	require.NoError(t, nc.Flush())
	require.Empty(t, read(t, mine, stream.ReadOptions{}))
}

func evilText(t *testing.T) string {
	text, _, err := bus.Credential{Kind: bus.TeamCredential, Namespace: "evil"}.Issue(doorToken)
	require.NoError(t, err)
	return text
}

// A team that has used its share of the store stores no more until it removes something; another is not disturbed.
func TestTeamStoresItsShare(t *testing.T) {
	t.Parallel()
	d := openDoorOf(t, 64<<20)
	ctx := testContext(t)
	red, blue := d.team("red"), d.team("blue")
	cfg := ownConfig("red", "p")
	cfg.MaxBytes = 30 << 20
	s, err := stream.Create(ctx, red, cfg)
	require.NoError(t, err)
	other := ownConfig("blue", "p")
	other.MaxBytes = 20 << 20
	_, err = stream.Create(ctx, blue, other)
	require.NoError(t, err)
	for i := range 34 { // 17 MiB, and 16 are a quarter
		if _, err = stream.Append(ctx, red, []*bus.Msg{own("a", strings.Repeat("x", 512<<10))}, ""); i < 31 || !errors.Is(err, bus.ErrNoSpace) {
			require.NoError(t, err)
		}
	}
	write := func() error {
		_, err := stream.Append(ctx, red, []*bus.Msg{own("a", "x")}, "")
		return err
	}
	require.Eventually(t, func() bool { return errors.Is(write(), bus.ErrNoSpace) }, time.Minute, 100*time.Millisecond)
	require.ErrorContains(t, write(), "at most 16 are permitted")
	cfg.Name, cfg.Subject = ownConfig("red", "q").Name, ownConfig("red", "q").Subject
	_, err = stream.Create(ctx, red, cfg)
	require.ErrorIs(t, err, bus.ErrNoSpace)
	_, err = stream.Append(ctx, blue, []*bus.Msg{message("troupe.blue.@pipeline.p.stored.a", "x")}, "")
	require.NoError(t, err)
	require.NoError(t, s.Purge(ctx, "", 0))
	require.Eventually(t, func() bool { return write() == nil }, time.Minute, 100*time.Millisecond)
}

// Objects of a team are stored and read in parts; a name that is a hash is that of the content.
func TestTeamObjects(t *testing.T) {
	t.Parallel()
	d := openDoor(t)
	ctx := testContext(t)
	b := d.team("red")
	cfg := stream.ObjectStoreConfig{Name: "things", MaxBytes: 64 << 20}
	s, err := stream.OpenObjectStore(ctx, b, cfg)
	require.NoError(t, err)
	for _, size := range []int{0, 1, b.MaxPayload() / 2, 5 << 20} {
		data := bytes.Repeat([]byte("0123456789abcde"), size/15+1)[:size]
		require.NoError(t, s.Put(ctx, "red.x", data))
		got, err := s.Get(ctx, "red.x")
		require.NoError(t, err)
		require.True(t, bytes.Equal(data, got))
		n, err := s.Size(ctx, "red.x")
		require.NoError(t, err)
		require.EqualValues(t, size, n)
	}
	data := bytes.Repeat([]byte("a folder "), 100_000)
	sum := sha256.Sum256(data)
	name := "hash-" + hex.EncodeToString(sum[:])
	require.NoError(t, s.Put(ctx, name, data))
	require.ErrorIs(t, s.Put(ctx, "hash-"+strings.Repeat("0", 64), data), bus.ErrInvalid, "another content")
	direct, err := stream.OpenObjectStore(ctx, d.head, cfg)
	require.NoError(t, err)
	got, err := direct.Get(ctx, name)
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
	_, err = direct.Get(ctx, "hash-"+strings.Repeat("0", 64))
	require.ErrorIs(t, err, bus.ErrNotFound)

	require.ErrorIs(t, s.Put(ctx, "red.big", make([]byte, 12<<20)), bus.ErrNoSpace, "a quarter of the store is 16 MiB")
	require.NoError(t, s.Put(ctx, "red.y", make([]byte, 1<<20)))
	blue, err := stream.OpenObjectStore(ctx, d.team("blue"), cfg)
	require.NoError(t, err)
	require.NoError(t, blue.Put(ctx, "blue.x", make([]byte, 12<<20)))

	_, err = s.Get(ctx, "red.none")
	require.ErrorIs(t, err, bus.ErrNotFound)
	_, err = s.Get(ctx, "blue.x")
	require.ErrorIs(t, err, bus.ErrRefused)
	require.ErrorIs(t, s.Put(ctx, "blue.x", data), bus.ErrRefused)
	other, err := stream.OpenObjectStore(ctx, b, stream.ObjectStoreConfig{Name: "secrets"})
	require.NoError(t, err)
	_, err = other.Get(ctx, "red.x")
	require.ErrorIs(t, err, bus.ErrRefused)
	if _, err = other.Size(ctx, "red.x"); !errors.Is(err, bus.ErrRefused) {
		t.Fatal(err)
	}
}
