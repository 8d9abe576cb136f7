package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/cmd/troupe/cli"
	"troupe/placement"
)

// memberHead is one of three heads in this process.
type memberHead struct {
	*shell
	t     *testing.T
	words []string // of up
	errs  *screen
	out   *screen
	stop  func()
}

// clusterAddresses are three addresses on loopback whose next port is free too.
func clusterAddresses(t *testing.T) (all []string) {
	for i := range 3 {
		all = append(all, fmt.Sprintf("127.0.%d.1:%d", 11+i, bustest.FreePort(t)))
	}
	return all
}

func newMember(t *testing.T, store string, words ...string) *memberHead {
	name := "n" + filepath.Base(store)
	m := &memberHead{shell: newShell(t), t: t}
	m.words = append([]string{"up", "--json", "--store", store, "--gpus", "sim:1x2", "--name", name, "--metrics", "127.0.0.1:0"}, words...)
	return m
}

// start runs the head until the test ends or stop is called. It does not wait.
func (m *memberHead) start() {
	ctx, cancel := context.WithCancel(context.Background())
	out, errs := &screen{}, &screen{}
	m.out, m.errs = out, errs // of this start
	doneCh := make(chan int, 1)
	go func() {
		doneCh <- execute(ctx, m.words, &cli.CLI{Out: out, Err: errs, Env: m.getenv})
		_, _ = out.Write([]byte("the head has ended\n")) // nothing waits for its first line any more
	}()
	m.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case code := <-doneCh:
			assert.Zero(m.t, code, errs.String())
		case <-time.After(2 * time.Minute):
			assert.Fail(m.t, "troupe up does not end")
		}
	})
	m.t.Cleanup(m.stop)
}

// ready waits until the head says so.
func (m *memberHead) ready() (head readyHead) {
	line := m.out.line(m.t, m.errs.String)
	require.NoError(m.t, json.Unmarshal([]byte(line), &head), "%s: %s", line, m.errs.String())
	return head
}

func pageText(t *testing.T, url string) string {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(url)
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(body)
}

func (m *memberHead) says(text string) {
	m.t.Helper()
	require.Eventually(m.t, func() bool { return strings.Contains(m.errs.String(), text) }, 2*time.Minute, 5*time.Millisecond, text)
}

// Three heads form a cluster by the bundle of the first one: the first says for whom it waits, they have one identity, each serves the nodes of
// all, a member that ends, or that returns with an empty disk, needs no more than the command that it had, and another one is replaced.
func TestThreeHeadsAreOneCluster(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	t.Parallel()
	at, dir := clusterAddresses(t), t.TempDir()
	store := func(i int) string { return filepath.Join(dir, fmt.Sprint("store", i)) }
	file := filepath.Join(dir, "bundle")
	members := []*memberHead{newMember(t, store(0), "--cluster", strings.Join(at, ","), "--member", at[0], "--init", "--bundle", file)}
	members[0].start()
	members[0].says("waiting for " + at[1] + ", " + at[2])
	for i := 1; i < 3; i++ {
		members = append(members, newMember(t, store(i), "--bundle", file, "--member", at[i]))
		members[i].start()
	}
	var heads []readyHead
	for i, m := range members {
		heads = append(heads, m.ready())
		require.Len(t, strings.Split(heads[i].URL, ","), 3, "every address is named")
		require.True(t, strings.HasPrefix(heads[i].URL, "tls://"+at[i]), heads[i].URL)
		require.Equal(t, heads[0].Fingerprint, heads[i].Fingerprint)
		require.FileExists(t, filepath.Join(store(i), "cluster.json"))
	}
	require.Contains(t, members[2].output("wait", "--nodes", "3", "--gpus", "6"), "3 nodes")

	b, err := bus.Open(t.Context(), heads[1].access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	state, err := b.ServerState(t.Context())
	require.NoError(t, err)
	for _, s := range state.Streams {
		require.Equal(t, 3, s.Replicas, s.Name)
	}
	client, err := placement.NewClient(b, "run")
	require.NoError(t, err)
	defer client.Close()
	_, err = client.Reserve(t.Context(), placement.Request{ID: "kept", Holder: "test", Bundles: []placement.Bundle{{Node: "nstore1", Devices: 1000}}})
	require.NoError(t, err)

	require.Contains(t, members[1].output("cluster", "status"), "leads")
	require.Eventually(t, func() bool { // on a busy machine a member may lose its leader for a moment
		var pages []string
		for _, h := range heads {
			pages = append(pages, pageText(t, "http://"+h.Metrics+"/readyz"))
		}
		slices.Sort(pages)
		return slices.Equal(pages, []string{"ready\n", "ready, standby\n", "ready, standby\n"})
	}, time.Minute, 100*time.Millisecond, "one leads, two stand by")
	members[0].stop()
	require.Contains(t, members[1].output("status"), "one more loss stops grants")
	_, err = client.Reserve(t.Context(), placement.Request{ID: "next", Holder: "test", Bundles: []placement.Bundle{{Node: "nstore1", Devices: 1000}}})
	require.NoError(t, err, "two of three go on")
	require.NoError(t, os.RemoveAll(store(0)))
	members[0].start()
	require.Equal(t, heads[0].HeadFile.Fingerprint, members[0].ready().Fingerprint)
	list, err := client.List(t.Context())
	require.NoError(t, err)
	require.Len(t, list.Records, 2)

	members[2].stop()
	fourth := fmt.Sprintf("127.0.14.1:%d", bustest.FreePort(t))
	require.Contains(t, members[1].fails(1, "cluster", "replace", at[2]+"="+fourth), "does not run")
	members = append(members, newMember(t, store(3), "--bundle", file, "--member", fourth, "--cluster", strings.Join([]string{at[0], at[1], fourth}, ",")))
	members[3].start()
	members[3].ready()
	data, err := os.ReadFile(filepath.Join(store(0), "cluster.json")) // a command was interrupted: one member knows, and nothing is removed
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(store(0), "cluster.json"), []byte(strings.ReplaceAll(string(data), at[2], fourth)), 0o600))
	for range 2 {
		require.Contains(t, members[1].output("cluster", "replace", at[2]+"="+fourth), "is replaced")
	}
	require.NotContains(t, members[1].output("cluster", "status"), at[2])
	require.Eventually(t, func() bool {
		state, err := b.ServerState(t.Context())
		for _, s := range state.Streams {
			if s.Current() < 3 {
				return false
			}
		}
		return err == nil && len(state.Streams) > 0
	}, 2*time.Minute, 50*time.Millisecond, "the new member has every copy")
}

// A head alone becomes three by a backup: what it had, and its token, stay.
func TestOneHeadBecomesThree(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	t.Parallel()
	u, at, dir := newShell(t), clusterAddresses(t), t.TempDir()
	file, saved := filepath.Join(dir, "bundle"), filepath.Join(dir, "one.backup")
	alone, stop := u.up("--store", filepath.Join(dir, "alone"), "--gpus", "sim:1x2", "--name", "box")
	b, err := bus.Open(t.Context(), alone.access())
	require.NoError(t, err)
	client, err := placement.NewClient(b, "run")
	require.NoError(t, err)
	_, err = client.Reserve(t.Context(), placement.Request{ID: "kept", Holder: "test", Bundles: []placement.Bundle{{Devices: 1000}}})
	require.NoError(t, err)
	client.Close()
	require.NoError(t, b.Close())
	u.output("backup", "-o", saved, "--secrets") // while the agent runs, whose end in order ends what is reserved on its node
	stop()

	words := []string{"--cluster", strings.Join(at, ","), "--bundle", file, "--no-agent", "--member"}
	var members []*memberHead
	for i := range 3 {
		more := append(slices.Clone(words), at[i])
		if i == 0 {
			more = append(more, "--init", "--restore", saved)
		}
		members = append(members, newMember(t, filepath.Join(dir, fmt.Sprint("store", i)), more...))
		members[i].start()
		require.Eventually(t, func() bool { _, err := os.Stat(file); return err == nil }, 2*time.Minute, 5*time.Millisecond)
	}
	before, err := os.ReadFile(alone.TokenFile)
	require.NoError(t, err)
	for _, m := range members {
		after, err := os.ReadFile(m.ready().TokenFile)
		require.NoError(t, err)
		require.Equal(t, string(before), string(after))
	}
	if !strings.Contains(members[2].output("reservations", "--all"), "kept") { // as no agent runs it, it was dropped after a while
		require.Contains(t, members[2].output("events"), "reservation kept is dropped")
	}
	b, err = bus.Open(t.Context(), members[1].ready().access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	state, err := b.ServerState(t.Context())
	require.NoError(t, err)
	for _, s := range state.Streams {
		require.Equal(t, 3, s.Replicas, s.Name)
	}
}

// What is not a cluster of three, and a store that would be lost, are refused with the remedy.
func TestClusterIsRefused(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	dir := t.TempDir()
	require.Contains(t, u.fails(2, "up", "--cluster", "a,b", "--init"), "two are less available than one")
	require.Contains(t, u.fails(2, "up", "--cluster", "a,b,a"), "twice")
	require.Contains(t, u.fails(2, "up", "--cluster", "a,b,c:x"), "HOST:PORT")
	require.Contains(t, u.fails(2, "up", "--cluster", "a.invalid,b.invalid,c.invalid"), "--init")
	require.Contains(t, u.fails(2, "up", "--cluster", "a.invalid,b.invalid,c.invalid", "--init"), "--member")
	require.Contains(t, u.fails(2, "up", "--bundle", filepath.Join(dir, "none")), "no such file")
	require.Contains(t, u.fails(2, "up", "--nats", "nats://h", "--init"), "--nats")
	_, stop := u.up("--store", filepath.Join(dir, "alone"), "--no-agent")
	stop()
	refused := u.fails(2, "up", "--cluster", "a,b,c", "--member", "a", "--init", "--store", filepath.Join(dir, "alone"))
	require.Contains(t, refused, "troupe backup --store")
	require.Contains(t, refused, "--restore")
	_, stop = u.up("--store", filepath.Join(dir, "alone"), "--no-agent")
	stop()
}
