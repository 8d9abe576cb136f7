package bustest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Hosts are this machine and a second one behind a link that can be cut: a network namespace where the machine allows it,
// otherwise this machine again, without a link to cut.
type Hosts struct {
	t         testing.TB
	Apart     bool   // the second one is a network namespace
	Near      string // an address of this machine that the other reaches
	namespace string
	cable     string
}

// NewHosts makes the second host, which ends with the test.
func NewHosts(t testing.TB) *Hosts {
	t.Helper()
	var err error
	for try := range 5 {
		h := &Hosts{t: t}
		if err = h.connect((os.Getpid()+40*try)%200 + 20); err == nil {
			t.Log("the other host is a network namespace")
			h.Apart = true
			return h
		}
	}
	t.Logf("both hosts are this machine, because it has no network namespaces to give: %v", err)
	return &Hosts{t: t, Near: "127.0.0.1"}
}

// connect makes the namespace and the link of that number.
func (h *Hosts) connect(n int) error {
	h.Near, h.namespace, h.cable = fmt.Sprintf("10.77.%d.1", n), fmt.Sprintf("troupe%d", n), fmt.Sprintf("tr%da", n)
	far := fmt.Sprintf("tr%db", n)
	if err := h.ip("netns add " + h.namespace); err != nil {
		return err
	}
	h.t.Cleanup(func() {
		if err := h.ip("netns del " + h.namespace); err != nil && h.Apart {
			h.t.Errorf("remove the second host: %v", err)
		}
	})
	return h.ip("link add "+h.cable+" type veth peer name "+far, "link set "+far+" netns "+h.namespace,
		"addr add "+h.Near+"/24 dev "+h.cable, "link set "+h.cable+" up",
		fmt.Sprintf("-n %s addr add 10.77.%d.2/24 dev %s", h.namespace, n, far), fmt.Sprintf("-n %s link set %s up", h.namespace, far),
		"-n "+h.namespace+" link set lo up")
}

func (h *Hosts) ip(commands ...string) error {
	for _, words := range commands {
		out, err := exec.Command("ip", strings.Fields(words)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip %s: %w: %s", words, err, out)
		}
	}
	return nil
}

// Cut takes the link down, and Heal up again.
func (h *Hosts) Cut()  { h.set("down") }
func (h *Hosts) Heal() { h.set("up") }

func (h *Hosts) set(state string) {
	h.t.Helper()
	if err := h.ip("link set " + h.cable + " " + state); err != nil {
		h.t.Fatal(err)
	}
}

// Command is exec.Command on the second host.
func (h *Hosts) Command(name string, args ...string) *exec.Cmd {
	if !h.Apart {
		return exec.Command(name, args...)
	}
	return exec.Command("ip", append([]string{"netns", "exec", h.namespace, name}, args...)...)
}

// CommandIn is Command with a directory that is empty there, whatever it has on this machine: another mount namespace.
func (h *Hosts) CommandIn(dir, name string, args ...string) *exec.Cmd {
	if !h.Apart {
		return h.Command(name, args...)
	}
	script := `mount -t tmpfs -o mode=0700 none "$0" && exec "$@"`
	return h.Command("unshare", append([]string{"--mount", "sh", "-c", script, dir, name}, args...)...)
}

// SentToSecond counts the bytes that the link has carried to the second host, and ReceivedFromSecond those from there.
func (h *Hosts) SentToSecond() int64       { return h.carried("tx_bytes") }
func (h *Hosts) ReceivedFromSecond() int64 { return h.carried("rx_bytes") }

func (h *Hosts) carried(direction string) int64 {
	h.t.Helper()
	text, err := os.ReadFile(filepath.Join("/sys/class/net", h.cable, "statistics", direction))
	if err != nil {
		h.t.Fatal(err)
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		h.t.Fatal(err)
	}
	return n
}
