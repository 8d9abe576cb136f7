package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"troupe/roles"
)

// demoStep is what one step came to, as --json prints it.
type demoStep struct {
	Step       int            `json:"step"`
	Reward     float64        `json:"reward"`      // mean, of 1
	KL         float64        `json:"kl"`          // how far the policy has gone from the reference
	CriticLoss float64        `json:"critic_loss"` // before its update
	Drift      float64        `json:"drift"`       // greatest difference of log-probabilities between actor_train and actor_infer
	Busy       int            `json:"busy"`        // workers of actor_train that answered health in the middle of train_step
	Sample     string         `json:"sample"`
	Millis     float64        `json:"ms"`
	Calls      []demoCall     `json:"calls"` // since the step before
	Checkpoint checkpointInfo `json:"checkpoint,omitzero"`
}

// demoShow tells the story: the start and the first step call by call, then a line a step. With --json it keeps the calls
// and prints an object a step.
type demoShow struct {
	c      *cli
	out    io.Writer // nowhere with --json
	began  time.Time
	calls  []demoCall // since the last step
	detail bool       // every call is told
	shown  int        // steps
	first  demoStep
	last   demoStep
	count  int // calls
	roles  int
}

func newDemoShow(c *cli) *demoShow {
	s := &demoShow{c: c, out: c.out, began: time.Now(), detail: true}
	if c.json {
		s.out = io.Discard
	}
	return s
}

func (s *demoShow) printf(format string, args ...any) { _, _ = fmt.Fprintf(s.out, format, args...) }

// created tells of a role that is ready.
func (s *demoShow) created(c *roles.Cluster, took time.Duration) {
	if s.roles++; s.roles == 1 {
		s.printf("A toy policy learns the alphabet. Five roles, all of it in this process, on an embedded NATS server.\n\n")
		s.printf("%-12s %-10s %7s  %-21s %s\n", "role", "class", "workers", "mesh", "ready in")
	}
	r := c.Record()
	mesh := fmt.Sprintf("dp %d × tp %d × pp %d", r.Mesh.DP, r.Mesh.TP, r.Mesh.PP)
	s.printf("%-12s %-10s %7d  %-21s %5.1f ms\n", r.Name, r.Class, r.World, mesh, millis(took))
}

const callLine = "  %-12s %-11s %-20s %-41s %8s %8s %8s\n"

// section begins a part of the story.
func (s *demoShow) section(title string) {
	if !s.detail {
		return
	}
	s.printf("\n%s\n", title)
	if title == sectionReady {
		s.printf(callLine, "method", "of role", "mode", "what went to which ranks", "sent", "received", "took")
	}
}

const sectionReady = "getting ready"

func (s *demoShow) called(f *inFlight) {
	call := f.over()
	s.calls = append(s.calls, call)
	if s.detail {
		s.printf(callLine, call.Method, call.Role, call.words(), call.route(), size(int(call.Sent)), size(call.Received), fmt.Sprintf("%.1f ms", call.Millis))
	}
}

// aside adds to the line above.
func (s *demoShow) aside(format string, args ...any) {
	if s.detail {
		s.printf("  %-12s ↳ %s\n", "", fmt.Sprintf(format, args...))
	}
}

// together tells how long calls took that were in flight at once.
func (s *demoShow) together(calls []*inFlight) {
	var end time.Time
	sum := 0.0
	for _, f := range calls {
		took := f.over().Millis
		sum += took
		if at := f.began.Add(time.Duration(took * float64(time.Millisecond))); at.After(end) {
			end = at
		}
	}
	s.aside("%d roles at once: %.1f ms from the first call to the last answer; their times add up to %.1f ms", len(calls), millis(end.Sub(calls[0].began)), sum)
}

// synced tells of weights that workers sent to other workers, the first time.
func (s *demoShow) synced(shares []int) {
	total := 0
	for _, n := range shares {
		total += n
	}
	s.aside("a role is a value: %d workers were sent it and passed it their shares of the weights, %s, each published once", len(shares), size(total))
}

func (s *demoShow) healthy(h healthSeen) {
	s.called(h.call)
	s.aside("health never waits behind work: %d of %d workers answered in the middle of train_step", h.busy, h.workers)
}

// stepped ends a step.
func (s *demoShow) stepped(step demoStep) error {
	step.Calls, s.calls = s.calls, nil
	if s.shown == 0 {
		s.first = step
		s.printf("\n%4s  %-27s %7s %12s %9s   %s\n", "step", "mean reward", "kl", "critic loss", "took", "a prompt and its answer")
	}
	s.shown++
	s.last, s.detail = step, false
	s.count += len(step.Calls)
	if s.c.json {
		return s.c.printJSON(step)
	}
	s.printf("%4d  %5.3f %-21s %7.2f %12.3f %6.1f ms   %s\n", step.Step, step.Reward, bar(step.Reward), step.KL, step.CriticLoss, step.Millis, step.Sample)
	return nil
}

// end sums up.
func (s *demoShow) end(d *demo) {
	driver, inside := d.head.Conn().Stats(), d.inside.Conn().Stats()
	ck := s.last.Checkpoint
	s.printf("\nThe policies of actor_train and actor_infer agree to %.0e in every log-probability.\n", s.last.Drift)
	s.printf("RANK_ZERO gathered a checkpoint from its replica: %s of weights, hash %s.\n", size(ck.Bytes), ck.Hash)
	s.printf("%d calls in %.2f s: the driver sent %s and received %s, the workers sent %s.\n",
		s.count, time.Since(s.began).Seconds(), size(int(driver.OutBytes)), size(int(driver.InBytes)), size(int(inside.OutBytes)))
}

// words is how the call was made.
func (c demoCall) words() string {
	switch {
	case strings.HasPrefix(c.Method, "@"):
		return "control lane"
	case c.Mode == "":
		return "some ranks"
	}
	return c.Mode
}

// route says what went to which ranks. With more than two receivers of rows, that they get them in order.
func (c demoCall) route() string {
	var words []string
	for _, p := range c.Parts {
		switch {
		case p.Empty:
			words = append(words, "none → "+rankList(p.Ranks))
		case p.Rows > 0 && len(c.Parts) <= 3:
			words = append(words, fmt.Sprintf("%d-%d → %s", p.From, p.From+p.Rows-1, rankList(p.Ranks)))
		default:
			words = append(words, rankList(p.Ranks))
		}
	}
	switch first := c.Parts[0]; {
	case first.Rows > 0 && len(c.Parts) <= 3:
		return "rows " + strings.Join(words, "; ")
	case first.Rows > 0:
		return fmt.Sprintf("%d rows each → %s", first.Rows, strings.Join(words, " | "))
	case len(c.Parts) > 1:
		return "one each → " + strings.Join(words, " | ")
	case c.Argument != "":
		return c.Argument + " → " + words[0]
	}
	return "the same → " + words[0]
}

// rankList writes ranks shortly: "0-3" or "0,1,4,5".
func rankList(ranks []int) string {
	n := len(ranks)
	if n > 2 && ranks[n-1]-ranks[0] == n-1 {
		return fmt.Sprintf("%d-%d", ranks[0], ranks[n-1])
	}
	words := make([]string, n)
	for i, r := range ranks {
		words[i] = strconv.Itoa(r)
	}
	return strings.Join(words, ",")
}

func bar(share float64) string { return strings.Repeat("█", int(share*20+0.5)) }

func size(bytes int) string {
	switch {
	case bytes < 1<<10:
		return fmt.Sprintf("%d B", bytes)
	case bytes < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(bytes)/(1<<10))
	}
	return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
