package bus_test

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
	"troupe/bus/stream"
)

const headToken = "the-token-of-the-head"

// withCredentials is the bus of a head whose server accepts credentials.
func withCredentials(t *testing.T) *bus.Bus {
	b := bustest.Open(t, bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0", Token: headToken}})
	b.AcceptCredentials(nil, nil)
	return b
}

func issue(t *testing.T, c bus.Credential) (string, bus.Credential) {
	t.Helper()
	text, c, err := c.Issue(headToken)
	require.NoError(t, err)
	return text, c
}

// attacker is a bare connection, which keeps to no rule of this package.
func attacker(t *testing.T, b *bus.Bus, text string) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(b.URL(), nats.Token(text), nats.NoReconnect(), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	require.NoError(t, err)
	t.Cleanup(nc.Close)
	return nc
}

// foreign are subjects outside the rows of a worker and of a team of namespace evil.
func foreign(id string) []string {
	good := bus.Address{Namespace: "good", Role: "actor", Incarnation: "one"}
	subjects := []string{
		good.All(), good.Rank(0), good.Slice("m", 0), good.Control(), good.ControlRank(0), good.Sequencer(), good.Life(), good.Exit(), good.Output(), good.Log(0),
		bus.ReplySubject("good", "SESSION", "in"), bus.Subject("good", "reply", "SESSION", "body"),
		bus.NodeDo("box"), bus.NodesEnd(), bus.NodeAsk("box"), bus.NodeAsk(""), bus.NodeBeat("box"), bus.NodesHead(), bus.NodesHeadReplace(), bus.NodesHeadOrder(),
		bus.Events("good"), bus.Events("evil"), bus.Events(""), bus.Audit("good"), bus.Audit("evil"), bus.Audit(""), "troupe.@placement.ask", "troupe.@placement.request.good", "troupe.@placement.request.@operator",
		"troupe.@placement.event.good", "troupe.@doors.good." + id + ".kv", "troupe.@doors.evil.SOMEOTHER.kv", "troupe.@doors.evil.SOMEOTHER.nodes.box", "troupe.@nodes.reply.SESSION.in", "troupe", "troupe.evil",
		"$KV.secret.good.key", "$O.bucket.C.x", "$JS.ACK.KV_secret.c.1.1.1.1.1", "$SYS.REQ.SERVER.PING", "_INBOX.of.others", "_INBOX_" + id, "_R_.x", "anything", "@none.x",
	}
	for _, api := range []string{
		"INFO", "STREAM.CREATE.new", "STREAM.UPDATE.KV_secret", "STREAM.INFO.KV_secret", "STREAM.NAMES", "STREAM.LIST", "STREAM.DELETE.KV_secret", "STREAM.PURGE.KV_secret",
		"STREAM.MSG.GET.KV_secret", "STREAM.MSG.DELETE.KV_secret", "STREAM.SNAPSHOT.KV_secret", "STREAM.RESTORE.KV_secret", "DIRECT.GET.KV_secret", "DIRECT.GET.KV_secret.$KV.secret.good.key",
		"CONSUMER.CREATE.KV_secret", "CONSUMER.CREATE.KV_secret.c.$KV.secret.>", "CONSUMER.DURABLE.CREATE.KV_secret.c", "CONSUMER.INFO.KV_secret.c", "CONSUMER.DELETE.KV_secret.c",
		"CONSUMER.MSG.NEXT.KV_secret.c", "CONSUMER.NAMES.KV_secret", "CONSUMER.PAUSE.KV_secret.c",
	} {
		subjects = append(subjects, "$JS.API."+api)
	}
	return subjects
}

// said are the subjects in their own namespace on which agents speak, the one on which drivers resize roles or have the head create them, and those
// that streams store.
func said(kind bus.CredentialKind) []string {
	own := bus.Address{Namespace: "evil", Role: "actor", Incarnation: "one"}
	drivers := own.Prefix() + ".owner"
	if kind == bus.TeamCredential {
		drivers = "troupe.evil.@sessions"
	}
	return []string{
		own.Log(0), own.Exit(), own.Output(), drivers,
		"troupe.evil.@pipeline.p.stored.state", "troupe.evil.@pipeline.p.body.s.0", "troupe.evil.@rollouts.r.stored", "troupe.evil.@rollouts.r.body.g",
	}
}

// outside are the subjects that a hostile process with a credential of a kind tries: to publish, and to hear.
func outside(c bus.Credential) (publish, hear []string) {
	all := foreign(c.ID)
	if c.Kind != bus.AgentCredential {
		return append(all, said(c.Kind)...), all
	}
	own := bus.Address{Namespace: "good", Role: "actor", Incarnation: "one"} // agents say how workers of any namespace end
	for _, subject := range all {
		switch subject {
		case own.Exit(), own.Output(), bus.NodesHead(), "_INBOX.of.others", bus.ReplySubject(bus.NodesNamespace, "SESSION", "in"):
			hear = append(hear, subject)
		case bus.NodesEnd(), bus.NodeAsk(""):
			publish = append(publish, subject)
		default:
			publish, hear = append(publish, subject), append(hear, subject)
		}
	}
	publish = append(publish, bus.NodeBeat("mine-2"), bus.NodeBeat("mine"), "troupe.@doors.@nodes."+c.ID+".kv.mine.2.OTHERHOST", "troupe.@doors.@nodes."+c.ID+".kv.box.1.HOST", "troupe.@doors.@nodes.OTHER.kv.mine.2.HOST", own.Log(0))
	return publish, append(hear, bus.NodeDo("mine"), "troupe.good.@host.OTHERHOST", bus.ReplySubject(bus.NodesNamespace, "OTHER", "in"))
}

// A hostile worker, driver or agent publishes to everything outside its row, and subscribes to everything outside: nothing arrives, everything is counted.
// The same attempts with the head's token arrive.
func TestHostileCredential(t *testing.T) {
	t.Parallel()
	for _, kind := range []bus.CredentialKind{bus.WorkerCredential, bus.TeamCredential, bus.AgentCredential} {
		t.Run(string(kind), func(t *testing.T) { hostile(t, kind) })
	}
}

func hostile(t *testing.T, kind bus.CredentialKind) {
	b := withCredentials(t)
	want, marker, own := bus.Credential{Kind: kind, Namespace: "evil"}, "troupe.evil.marker", "troupe.evil.actor.one.rank.0"
	if kind == bus.AgentCredential {
		want, marker, own = bus.Credential{Kind: kind, Node: "mine", Nodes: 2, Host: "HOST"}, bus.NodeBeat("mine-0"), bus.NodeDo("mine-1")
	}
	text, c := issue(t, want)
	forbidden, unheard := outside(c)

	var mu sync.Mutex
	heard := map[string]string{}
	watch, err := b.Conn().Subscribe(">", func(m *nats.Msg) {
		if sender := string(m.Data); sender == "worker" || sender == "head" {
			mu.Lock()
			heard[m.Subject] = sender
			mu.Unlock()
		}
	})
	require.NoError(t, err)
	require.NoError(t, b.Conn().Flush())
	evil, head := attacker(t, b, text), attacker(t, b, headToken)
	everyone := func(sender string, nc *nats.Conn) {
		for _, subject := range append([]string{marker}, forbidden...) {
			require.NoError(t, nc.Publish(subject, []byte(sender)))
		}
		require.NoError(t, nc.Flush())
		require.Eventually(t, func() bool { // the marker may be first
			require.NoError(t, b.Conn().Flush())
			mu.Lock()
			defer mu.Unlock()
			return heard[marker] == sender
		}, time.Minute, time.Millisecond)
	}
	before := b.Denied()
	everyone("worker", evil)
	require.NoError(t, evil.Publish(marker, []byte("worker"))) // on the same connection: what was before it has been handled
	require.NoError(t, evil.Flush())
	require.NoError(t, b.Conn().Flush())
	mu.Lock()
	for _, subject := range forbidden {
		require.NotContains(t, heard, subject)
	}
	mu.Unlock()
	require.EqualValues(t, len(forbidden), b.Denied()-before, "all are counted")
	everyone("head", head)
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return heard[bus.NodeDo("box")] == "head" && heard["$JS.API.STREAM.DELETE.KV_secret"] == "head"
	}, time.Minute, time.Millisecond, "with the token the same attempts arrive")
	require.NoError(t, watch.Unsubscribe())

	got := make(chan *nats.Msg, 1024)
	wide := append(slices.Clone(unheard), ">", "*.>", "troupe.>", "troupe.*.>", "troupe.*.*.*.rank.*", "troupe.*.reply.>", "_INBOX.>", "_INBOX_*.>", "$JS.>", "$KV.>", "$SYS.>", "*")
	before = b.Denied()
	for _, subject := range wide {
		_, err := evil.ChanSubscribe(subject, got)
		require.NoError(t, err) // the server refuses it later
		_, err = evil.ChanQueueSubscribe(subject, "workers", got)
		require.NoError(t, err)
	}
	require.NoError(t, evil.Flush())
	require.EqualValues(t, 2*len(wide), b.Denied()-before)
	for _, subject := range unheard {
		require.NoError(t, b.Conn().Publish(subject, nil))
	}
	mine, err := evil.SubscribeSync(own)
	require.NoError(t, err)
	require.NoError(t, evil.Flush())
	require.NoError(t, b.Conn().Publish(own, []byte("a call")))
	m, err := mine.NextMsg(time.Minute)
	require.NoError(t, err)
	require.Equal(t, "a call", string(m.Data), "its own calls arrive")
	require.Empty(t, got)
}

// What a worker may not send it cannot have another process send for it: an answer to a subject that the worker chose.
func TestAnswersGoToInboxes(t *testing.T) {
	t.Parallel()
	b := withCredentials(t)
	bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: "secret"})
	require.NoError(t, err)
	_, err = bucket.Put(t.Context(), "key", []byte("value"))
	require.NoError(t, err)
	orders, err := b.Conn().SubscribeSync(bus.NodeDo("box"))
	require.NoError(t, err)
	_, err = b.Subscribe("troupe.evil.ask", func(m *bus.Msg) { _ = b.Respond(m, nil) })
	require.NoError(t, err)
	require.NoError(t, b.Conn().Flush())

	text, _ := issue(t, bus.Credential{Kind: bus.WorkerCredential, Namespace: "evil"})
	evil := attacker(t, b, text)
	before := b.MalformedCount()
	targets := []string{bus.NodeDo("box"), "$JS.API.STREAM.DELETE.KV_secret", "$KV.secret.key", bus.NodesEnd(), "troupe.good.actor.one.all"}
	for _, target := range targets {
		require.NoError(t, evil.PublishRequest("troupe.evil.ask", target, nil))
	}
	require.NoError(t, evil.Flush())
	require.Eventually(t, func() bool { return b.MalformedCount()-before == uint64(len(targets)) }, time.Minute, time.Millisecond)
	require.NoError(t, b.Conn().Flush())
	n, _, err := orders.Pending()
	require.NoError(t, err)
	require.Zero(t, n)
	got, err := bucket.Get(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, "value", string(got.Value))

	_, err = stream.Create(t.Context(), b, stream.Config{Name: "journal", Subject: "troupe.evil.@pipeline.p.stored.>", MaxBytes: 1 << 20})
	require.NoError(t, err)
	require.NoError(t, evil.PublishRequest("troupe.evil.@pipeline.p.stored.state", "$KV.secret.key", nil))
	require.NoError(t, evil.PublishRequest("troupe.evil.ask", "$KV.secret.key", nil)) // after it: when this is refused, that was handled
	require.NoError(t, evil.Flush())
	require.Eventually(t, func() bool { return b.MalformedCount()-before == uint64(len(targets)+1) }, time.Minute, time.Millisecond)
	got, err = bucket.Get(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, "value", string(got.Value), "an acknowledgement of a stream is stored nowhere")

	worker := bustest.Open(t, bus.Config{URLs: []string{b.URL()}, Token: text})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = worker.Request(ctx, "troupe.evil.ask", nil)
	require.NoError(t, err, "an answer reaches the inbox of a credential")
}

// Credentials that are altered, of another token or kind, expired, revoked, or shown before the head knows what is revoked are refused; those
// that end while they are used are shut out within five seconds.
func TestCredentialsEnd(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t, bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0", Token: headToken}})
	worker := bus.Credential{Kind: bus.WorkerCredential, Namespace: "run"}
	good, c := issue(t, worker)
	refused := func(text, why string) {
		t.Helper()
		nc, err := nats.Connect(b.URL(), nats.Token(text), nats.NoReconnect())
		if err == nil {
			nc.Close()
		}
		require.ErrorIs(t, err, nats.ErrAuthorization, why)
	}
	refused(good, "before the head knows what is revoked")
	b.AcceptCredentials(nil, nil)
	live := attacker(t, b, good)

	words := strings.Split(good, ".")
	viewer, _ := issue(t, bus.Credential{Kind: bus.ViewerCredential})
	past := worker
	past.Expires = time.Now().Add(-time.Second)
	old, _ := issue(t, past)
	stranger, _, err := worker.Issue("another token")
	require.NoError(t, err)
	wider, _ := issue(t, bus.Credential{Kind: bus.WorkerCredential, Namespace: "other"})
	for why, text := range map[string]string{
		"none": "", "without a seal": words[0] + "." + words[1] + ".", "two words": words[0] + "." + words[1], "claims of another": words[0] + "." + strings.Split(wider, ".")[1] + "." + words[2],
		"cut": good[:len(good)-1], "longer": good + "A", "a viewer": viewer, "expired": old, "of another head": stranger, "huge": good + strings.Repeat("A", 2100),
	} {
		refused(text, why)
	}
	for _, namespace := range []string{"", "*", ">", "a.b", "@nodes", "run.>"} {
		_, _, err := bus.Credential{Kind: bus.WorkerCredential, Namespace: namespace}.Issue(headToken)
		require.ErrorIs(t, err, bus.ErrInvalid, namespace)
	}
	_, _, err = worker.Issue(good)
	require.ErrorIs(t, err, bus.ErrRefused, "a credential issues no other")

	soon := worker
	soon.Expires = time.Now().Add(2 * time.Second)
	short, _ := issue(t, soon)
	ending := attacker(t, b, short)
	at := time.Now()
	b.AcceptCredentials(map[string]struct{}{c.ID: {}}, nil)
	require.Eventually(t, live.IsClosed, 30*time.Second, time.Millisecond)
	t.Logf("shut out %v after the revocation", time.Since(at))
	refused(good, "revoked")
	require.Eventually(t, ending.IsClosed, 30*time.Second, time.Millisecond, "it has expired")
	refused(short, "expired")
}

// The credential of a worker is accepted while that of its team, or of its agent, is, and ends with it.
func TestWorkersOfATeamEndWithIt(t *testing.T) {
	t.Parallel()
	b := withCredentials(t)
	team, c := issue(t, bus.Credential{Kind: bus.TeamCredential, Namespace: "run"})
	text, _ := issue(t, bus.ForWorker(c.ID, "run"))
	refused := func(why string) {
		t.Helper()
		_, err := nats.Connect(b.URL(), nats.Token(text), nats.NoReconnect())
		require.ErrorIs(t, err, nats.ErrAuthorization, why)
	}
	refused("the team is not known")
	b.AcceptCredentials(nil, map[string]time.Time{c.ID: time.Now().Add(-time.Second)})
	refused("the team's has expired")
	b.AcceptCredentials(nil, map[string]time.Time{c.ID: {}})
	driver, worker := attacker(t, b, team), attacker(t, b, text)
	b.AcceptCredentials(map[string]struct{}{c.ID: {}}, nil)
	require.Eventually(t, func() bool { return driver.IsClosed() && worker.IsClosed() }, 30*time.Second, time.Millisecond)
	refused("the team's is revoked")
}

// One credential and its workers do not take the connections of all: more than their part are refused, until some of them have ended.
func TestCredentialHasItsPartOfTheConnections(t *testing.T) {
	t.Parallel()
	b := withCredentials(t)
	b.SetConnectionsMost(4)
	red, c := issue(t, bus.Credential{Kind: bus.TeamCredential, Namespace: "red"})
	worker, _ := issue(t, bus.ForWorker(c.ID, "red"))
	blue, _ := issue(t, bus.Credential{Kind: bus.TeamCredential, Namespace: "blue"})
	b.AcceptCredentials(nil, map[string]time.Time{c.ID: {}})
	var all []*nats.Conn
	for _, text := range []string{red, worker, worker, red} {
		all = append(all, attacker(t, b, text))
	}
	for _, text := range []string{red, worker} {
		_, err := nats.Connect(b.URL(), nats.Token(text), nats.NoReconnect())
		require.ErrorIs(t, err, nats.ErrAuthorization)
	}
	attacker(t, b, blue)
	attacker(t, b, headToken)
	all[1].Close()
	require.Eventually(t, func() bool {
		nc, err := nats.Connect(b.URL(), nats.Token(worker), nats.NoReconnect())
		if err == nil {
			t.Cleanup(nc.Close)
		}
		return err == nil
	}, time.Minute, 100*time.Millisecond, "as one has ended")
}

// docs/security.md has the table that the permissions are made from.
func TestSecurityDocument(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../docs/security.md")
	require.NoError(t, err)
	require.Contains(t, string(data), bus.CredentialTable(), "put this table into docs/security.md")
}
