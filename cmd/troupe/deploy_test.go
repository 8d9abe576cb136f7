package main

import (
	"encoding/json"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/metrics"
)

const deployDir = "../../deploy"

// exportedMetrics are the names that a head tells Prometheus, with those that Prometheus derives of histograms.
func exportedMetrics() map[string]bool {
	names := map[string]bool{}
	for _, name := range metrics.Names() {
		if name == "troupe_role_calls_seconds" {
			names[name+"_bucket"], names[name+"_count"], names[name+"_sum"] = true, true, true
			continue
		}
		names[name] = true
	}
	return names
}

// The dashboard and the alerts ask for metrics that exist.
func TestMonitoringUsesExportedMetrics(t *testing.T) {
	exported := exportedMetrics()
	used := map[string]bool{}
	use := func(where, expr string) {
		found := regexp.MustCompile(`troupe_[a-z0-9_]+`).FindAllString(expr, -1)
		require.NotEmpty(t, found, "%s: %s", where, expr)
		for _, name := range found {
			used[name] = true
			require.True(t, exported[name], "%s uses %s, which no head exports; there are %v", where, name, slices.Sorted(maps.Keys(exported)))
		}
	}
	var alerts struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr string
				Annotations map[string]string
				Labels      map[string]string
			}
		}
	}
	data, err := os.ReadFile(filepath.Join(deployDir, "monitoring", "alerts.yaml"))
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(data, &alerts))
	require.Len(t, alerts.Groups, 1)
	for _, r := range alerts.Groups[0].Rules {
		use(r.Alert, r.Expr)
		require.NotEmpty(t, r.Annotations["summary"], r.Alert)
		require.NotEmpty(t, r.Annotations["action"], "%s says what to do", r.Alert)
		require.Contains(t, []string{"info", "warning", "critical"}, r.Labels["severity"], r.Alert)
	}
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	data, err = os.ReadFile(filepath.Join(deployDir, "monitoring", "grafana.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, &board))
	for _, p := range board.Panels {
		require.NotEmpty(t, p.Targets, p.Title)
		for _, target := range p.Targets {
			use(p.Title, target.Expr)
		}
	}
	require.Greater(t, len(used), 15)
}

// Every command line in the units, manifests, the image and the scripts has flags that the program knows.
func TestDeploymentsUseKnownFlags(t *testing.T) {
	root := newRoot(&cli.CLI{Out: os.Stdout, Err: os.Stderr, Env: func(string) string { return "" }})
	lines := map[string]string{}
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(deployDir, name))
		require.NoError(t, err)
		return string(data)
	}
	for _, unit := range []string{"systemd/troupe-head.service", "systemd/troupe-head-member.service", "systemd/troupe-agent.service"} {
		found := regexp.MustCompile(`(?m)^ExecStart=/usr/local/bin/troupe (.*)$`).FindStringSubmatch(read(unit))
		require.Len(t, found, 2, unit)
		lines[unit] = found[1]
	}
	words := func(list string) string {
		list = strings.NewReplacer(`"`, "", ",", " ", "[", "", "]", "").Replace(list)
		return strings.TrimPrefix(strings.TrimSpace(list), "troupe ")
	}
	for _, name := range []string{"kubernetes/head.yaml", "kubernetes/three-heads.yaml", "kubernetes/job.yaml"} {
		for i, found := range regexp.MustCompile(`(?m)^\s*(?:args|command): (\[.*\])$`).FindAllStringSubmatch(read(name), -1) {
			lines[name+" "+strconv.Itoa(i)] = words(found[1])
		}
		for _, doc := range strings.Split(read(name), "\n---\n") {
			var any map[string]any
			require.NoError(t, yaml.Unmarshal([]byte(doc), &any), name)
			require.NotEmpty(t, any["kind"], name)
		}
	}
	found := regexp.MustCompile(`(?m)^CMD (\[.*\])$`).FindStringSubmatch(read("Dockerfile"))
	require.Len(t, found, 2)
	lines["Dockerfile"] = words(found[1])
	lines["slurm/job.sh"] = strings.TrimPrefix(regexp.MustCompile(`(?m)^srun troupe (.*)$`).FindString(read("slurm/job.sh")), "srun troupe ")
	require.GreaterOrEqual(t, len(lines), 6)
	for where, line := range lines {
		args := strings.Fields(line)
		cmd, rest, err := root.Find(args)
		require.NoError(t, err, "%s: %s", where, line)
		require.NotEqual(t, root, cmd, "%s: %s", where, line)
		if i := slices.Index(rest, "--"); i >= 0 {
			rest = rest[:i]
		}
		require.NoError(t, cmd.ParseFlags(rest), "%s: %s", where, line)
	}
}

// A head tells systemd when it is ready, and when it is ending.
func TestHeadNotifiesSystemd(t *testing.T) {
	u := newShell(t)
	path := filepath.Join(t.TempDir(), "notify")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	require.NoError(t, err)
	defer func() { require.NoError(t, socket.Close()) }()
	require.NoError(t, socket.SetReadDeadline(time.Now().Add(time.Minute)))
	u.env["NOTIFY_SOCKET"] = path
	cmd, _ := u.process("up", "--listen", "127.0.0.1:0", "--store", t.TempDir(), "--no-agent")
	buf := make([]byte, 256)
	n, err := socket.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "READY=1", string(buf[:n]))
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	n, err = socket.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "STOPPING=1", string(buf[:n]))
	require.NoError(t, cmd.Wait())
}
