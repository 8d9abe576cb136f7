package bustest

import (
	"fmt"
	"strings"
)

// Firewall has the packets between this machine and the second host, except those of connections to a TCP port of this machine, dropped on their way
// here, or refused on their way there, until lift is called. The hosts are Apart.
func (h *Hosts) Firewall(port string, refuse bool) (lift func()) {
	h.t.Helper()
	far := strings.TrimSuffix(h.Near, ".1") + ".2"
	place, allowed, others := "-n "+h.namespace+" ", "ipproto tcp dport "+port, "ipproto tcp blackhole"
	if refuse {
		place, allowed, others = "", "to "+far+" ipproto tcp sport "+port, "to "+far+" ipproto tcp prohibit"
	}
	rules := []string{fmt.Sprintf("%s lookup main pref 4", allowed), fmt.Sprintf("%s pref 5", others)}
	for _, rule := range rules {
		if err := h.ip(place + "rule add " + rule); err != nil {
			h.t.Fatal(err)
		}
	}
	return func() {
		for _, rule := range rules {
			if err := h.ip(place + "rule del " + rule); err != nil {
				h.t.Error(err)
			}
		}
	}
}

// Slow bounds what the link carries from the second host, in Mbit/s, until the test ends. It may be called again. The hosts are Apart.
func (h *Hosts) Slow(mbit int) {
	h.t.Helper()
	n := strings.TrimPrefix(h.namespace, "troupe")
	words := fmt.Sprintf("qdisc replace dev tr%sb root tbf rate %dmbit burst 128kb latency 400ms", n, mbit)
	if out, err := h.Command("tc", strings.Fields(words)...).CombinedOutput(); err != nil {
		h.t.Fatalf("tc %s: %v: %s", words, err, out)
	}
}
