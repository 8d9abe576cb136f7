package main

import (
	"encoding/json"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/roles"
	"troupe/weights"
	"troupe/weights/versions"
)

// TestWeightsStatus: all names, one name in another namespace, and one that nobody has bound; and the metrics.
func TestWeightsStatus(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--listen", "127.0.0.1:0", "--gpus", "none", "--metrics", "127.0.0.1:0")
	b, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	require.Equal(t, "no process has bound weights\n", u.output("weights", "status"))
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Namespace: "run", Name: "anna"})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close(t.Context())) }()
	client, err := weights.NewClient(weights.ClientConfig{
		Bus: b, Namespace: "run", Session: rt.Session(), References: rt.References(),
		Member: versions.Member{Role: "train", Incarnation: "1", World: 2, Host: "h"},
	})
	require.NoError(t, err)
	defer client.Close()
	w, err := client.Open("policy")
	require.NoError(t, err)
	data := make([]float32, 1<<20)
	one := []weights.Tensor{{Name: "a", DType: "float32", ItemSize: 4, Shape: []int64{1 << 20}, Pointer: unsafe.Pointer(&data[0]), Strides: []int64{4}}}
	require.NoError(t, w.Bind(t.Context(), versions.Publish, one))
	require.NoError(t, w.Bind(t.Context(), versions.Take, one))
	v, err := w.Publish(t.Context(), 7, weights.Full, []int{0})
	require.NoError(t, err)
	_, err = w.Stage(t.Context(), v)
	require.NoError(t, err)
	require.NoError(t, w.Commit(t.Context(), v))

	var st versions.Status
	require.Eventually(t, func() bool {
		require.NoError(t, json.Unmarshal([]byte(u.output("weights", "status", "policy", "--json")), &st))
		return st.Current == 1
	}, 2*time.Minute, 10*time.Millisecond, "the report of the commit arrives")
	require.Len(t, st.Members, 2)
	text := u.output("weights", "status", "policy")
	require.Contains(t, text, "policy: 1 tensors, published by train; 1 of 1 receivers have the newest version")
	require.Regexp(t, `1\.7 +complete .* 4 MiB`, text)
	require.Regexp(t, `train\[0\] +takes +1\.7 .*process 4 MiB`, text)
	require.Regexp(t, `run +policy +train +1\.7 +1 of 1`, u.output("weights", "status"))
	metrics := scrape(t, head.Metrics)
	for _, line := range []string{
		`troupe_weights_step{namespace="run",weights="policy"} 7`, `troupe_weights_receivers{kind="current",namespace="run",weights="policy"} 1`,
		`troupe_weights_taken_bytes{namespace="run",way="process",weights="policy"} 4.194304e+06`, `troupe_weights_lag_versions{namespace="run",weights="policy"} 0`,
	} {
		require.Contains(t, metrics, line)
	}
	var all []weights.Overview
	require.NoError(t, json.Unmarshal([]byte(u.output("weights", "status", "--namespace", "other", "--json")), &all))
	require.Empty(t, all)
	require.Equal(t, "no process of namespace default has bound weights \"reward\"\n", u.output("weights", "status", "reward"))
}
