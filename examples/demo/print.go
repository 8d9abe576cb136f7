package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"troupe"
)

// stepRecord is one training step, as -json prints it.
type stepRecord struct {
	Step       int            `json:"step"`
	Reward     float64        `json:"reward"`      // mean; 1 is the most
	KL         float64        `json:"kl"`          // distance of the policy from the reference
	CriticLoss float64        `json:"critic_loss"` // before its update
	Drift      float64        `json:"drift"`       // greatest difference of log-probabilities between actor_train and actor_infer
	Busy       int            `json:"busy"`        // workers of actor_train that answered health during train_step
	Sample     string         `json:"sample"`
	Millis     float64        `json:"ms"`
	Calls      []callRecord   `json:"calls"` // since the step before
	Checkpoint checkpointInfo `json:"checkpoint,omitzero"`
}

// printer prints the start and the first step call by call, then one line for each step. With -json it prints one object
// for each step.
type printer struct {
	out    io.Writer // discards with -json
	json   *json.Encoder
	began  time.Time
	calls  []callRecord // since the last step
	detail bool         // print every call
	count  int          // of calls
	last   stepRecord
}

func newPrinter(out io.Writer, asJSON bool) *printer {
	p := &printer{out: out, began: time.Now(), detail: true}
	if asJSON {
		p.out, p.json = io.Discard, json.NewEncoder(out)
		p.json.SetEscapeHTML(false)
	}
	return p
}

func (p *printer) printf(format string, args ...any) { _, _ = fmt.Fprintf(p.out, format, args...) }

func (p *printer) begin() {
	p.printf("A toy policy learns the alphabet. Five roles, all of it in this process, on an embedded NATS server.\n\n")
	p.printf("%-12s %-10s %7s  %-21s %s\n", "role", "class", "workers", "mesh", "ready in")
}

func (p *printer) created(c *troupe.Cluster, took time.Duration) {
	r := c.Record()
	mesh := fmt.Sprintf("dp %d × tp %d × pp %d", r.Mesh.DP, r.Mesh.TP, r.Mesh.PP)
	p.printf("%-12s %-10s %7d  %-21s %5.1f ms\n", r.Name, r.Class, r.World, mesh, millis(took))
}

const callLine = "  %-12s %-11s %-20s %-41s %8s %8s %8s\n"

// section prints the title of the calls that follow.
func (p *printer) section(title string) {
	if p.detail {
		p.printf("\n%s\n", title)
	}
}

func (p *printer) callHeader() {
	p.printf(callLine, "method", "of role", "mode", "what went to which ranks", "sent", "received", "took")
}

func (p *printer) called(f *pendingCall) {
	c := f.finish()
	p.calls = append(p.calls, c)
	if p.detail {
		p.printf(callLine, c.Method, c.Role, c.how(), c.route(), size(int(c.Sent)), size(c.Received), fmt.Sprintf("%.1f ms", c.Millis))
	}
}

// remark adds a line to the call above.
func (p *printer) remark(format string, args ...any) {
	if p.detail {
		p.printf("  %-12s ↳ %s\n", "", fmt.Sprintf(format, args...))
	}
}

// together prints how long calls took that were in flight at the same time.
func (p *printer) together(calls []*pendingCall) {
	var end time.Time
	sum := 0.0
	for _, f := range calls {
		took := f.finish().Millis
		sum += took
		if at := f.began.Add(time.Duration(took * float64(time.Millisecond))); at.After(end) {
			end = at
		}
	}
	p.remark("%d roles at once: %.1f ms from the first call to the last answer; their times add up to %.1f ms", len(calls), millis(end.Sub(calls[0].began)), sum)
}

// stepped ends a step.
func (p *printer) stepped(step stepRecord) error {
	step.Calls, p.calls = p.calls, nil
	if p.detail {
		p.printf("\n%4s  %-27s %7s %12s %9s   %s\n", "step", "mean reward", "kl", "critic loss", "took", "a prompt and its answer")
	}
	p.last, p.detail = step, false
	p.count += len(step.Calls)
	if p.json != nil {
		return p.json.Encode(step)
	}
	p.printf("%4d  %5.3f %-21s %7.2f %12.3f %6.1f ms   %s\n", step.Step, step.Reward, bar(step.Reward), step.KL, step.CriticLoss, step.Millis, step.Sample)
	return nil
}

func (p *printer) end(d *driver) {
	driver, workers := d.bus.Conn().Stats(), d.workerBus.Conn().Stats()
	ck := p.last.Checkpoint
	p.printf("\nThe log-probabilities of actor_train and actor_infer differ by %.1g at most.\n", p.last.Drift)
	p.printf("RANK_ZERO gathered a checkpoint from its replica: %s of weights, hash %s.\n", size(ck.Bytes), ck.Hash)
	p.printf("%d calls in %.2f s: the driver sent %s and received %s, the workers sent %s.\n",
		p.count, time.Since(p.began).Seconds(), size(int(driver.OutBytes)), size(int(driver.InBytes)), size(int(workers.OutBytes)))
}

// how is the mode of the call in words.
func (c callRecord) how() string {
	switch {
	case strings.HasPrefix(c.Method, "@"):
		return "control lane"
	case c.Mode == "":
		return "some ranks"
	}
	return c.Mode
}

// route is what went to which ranks. More than three parts share one text.
func (c callRecord) route() string {
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

// rankList is "0-3" or "0,1,4,5".
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
