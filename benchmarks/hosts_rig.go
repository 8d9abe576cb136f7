package benchmarks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// HostsConfig configures Hosts.
type HostsConfig struct {
	Program string // the troupe program
	Nodes   int    // hosts beside that of the head and the driver; zero: 2
	MiB     []int  // sizes of the values; none: 64 and 512
	Rounds  int    // zero: 10
	Plain   bool   // --data-plain of the nodes
	Mbit    int    // rate of each link, in Mbit/s; zero: no limit
}

const mostHosts = 16

// Hosts runs Between on hosts that it makes: network namespaces of this machine behind one bridge, which need root. The head and the driver are on one, and
// each node is on one of its own, with shared memory of its own. It counts the bytes on the link of the head's host.
func Hosts(ctx context.Context, cfg HostsConfig, report func(BetweenResult) error) (err error) {
	if cfg.Nodes == 0 {
		cfg.Nodes = 2
	}
	if cfg.Nodes < 2 || cfg.Nodes > mostHosts {
		return fmt.Errorf("%d hosts: between 2 and %d", cfg.Nodes, mostHosts)
	}
	dir, err := os.MkdirTemp("", "tr-hosts-") // short enough for sockets
	if err != nil {
		return err
	}
	r := &hostsRig{tag: fmt.Sprintf("tb%d", os.Getpid()%10000), dir: dir, program: cfg.Program}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.network(ctx, cfg.Nodes+1, cfg.Mbit); err != nil {
		return fmt.Errorf("network namespaces, which need root and the program ip: %w", err)
	}
	env, names, err := r.start(ctx, cfg)
	if err != nil {
		return err
	}
	args := []string{"bench", "transfer", "--json", "--nodes", strings.Join(names, ","), "--rounds", strconv.Itoa(max(cfg.Rounds, 0))}
	for _, n := range cfg.MiB {
		args = append(args, "--mib", strconv.Itoa(n))
	}
	driver, err := r.run(0, env, args...)
	if err != nil {
		return err
	}
	for last := r.headBytes(); ; {
		line, err := driver.stdout.ReadBytes('\n')
		var row BetweenResult
		if err != nil || json.Unmarshal(line, &row) != nil {
			<-driver.waitCh
			if driver.cmd.ProcessState.ExitCode() != 0 {
				return fmt.Errorf("the driver has failed: %s", driver.stderr.String())
			}
			return nil
		}
		now := r.headBytes()
		row.HeadMiB = float64(now-last) / float64(row.Rounds+1) / (1 << 20) // with the round that is not counted
		last = now
		if err := report(row); err != nil {
			return err
		}
	}
}

// hostsRig is the hosts of a run, by number; 0 is the head's.
type hostsRig struct {
	tag     string
	dir     string
	program string
	hosts   int
	started []*process
}

func (r *hostsRig) ip(ctx context.Context, commands ...string) error {
	for _, words := range commands {
		if out, err := exec.CommandContext(ctx, "ip", strings.Fields(words)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", words, err, out)
		}
	}
	return nil
}

func (r *hostsRig) name(host int) string  { return fmt.Sprintf("%sh%d", r.tag, host) }
func (r *hostsRig) outer(host int) string { return fmt.Sprintf("%so%d", r.tag, host) }
func (r *hostsRig) address(host int) string {
	return fmt.Sprintf("10.78.%d.%d", os.Getpid()%250+2, host+1)
}

func (r *hostsRig) network(ctx context.Context, hosts, mbit int) error {
	bridge := r.tag + "br"
	if err := r.ip(ctx, "link add "+bridge+" type bridge", "link set "+bridge+" up"); err != nil {
		return err
	}
	for h := range hosts {
		r.hosts = h + 1
		inner := fmt.Sprintf("%si%d", r.tag, h)
		err := r.ip(ctx, "netns add "+r.name(h), "link add "+r.outer(h)+" type veth peer name "+inner, "link set "+inner+" netns "+r.name(h),
			"link set "+r.outer(h)+" master "+bridge, "link set "+r.outer(h)+" up",
			fmt.Sprintf("-n %s addr add %s/24 dev %s", r.name(h), r.address(h), inner), "-n "+r.name(h)+" link set "+inner+" up", "-n "+r.name(h)+" link set lo up")
		if err != nil || mbit == 0 {
			if err != nil {
				return err
			}
			continue
		}
		for _, words := range []string{
			fmt.Sprintf("tc qdisc add dev %s root tbf rate %dmbit burst 256kb latency 50ms", r.outer(h), mbit),
			fmt.Sprintf("ip netns exec %s tc qdisc add dev %s root tbf rate %dmbit burst 256kb latency 50ms", r.name(h), inner, mbit),
		} {
			fields := strings.Fields(words)
			if out, err := exec.CommandContext(ctx, fields[0], fields[1:]...).CombinedOutput(); err != nil {
				return fmt.Errorf("%s: %w: %s", words, err, out)
			}
		}
	}
	return nil
}

// headBytes is what has crossed the link of the head's host, in both directions.
func (r *hostsRig) headBytes() (sum int64) {
	for _, file := range []string{"rx_bytes", "tx_bytes"} {
		text, _ := os.ReadFile(filepath.Join("/sys/class/net", r.outer(0), "statistics", file)) // no link: nothing
		n, _ := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		sum += n
	}
	return sum
}

// run starts the program on a host.
func (r *hostsRig) run(host int, env []string, args ...string) (*process, error) {
	own := filepath.Join(r.dir, strconv.Itoa(host))
	if err := os.MkdirAll(own, 0o700); err != nil {
		return nil, err
	}
	all := append(withoutTroupe(os.Environ()), "XDG_STATE_HOME="+own, "XDG_RUNTIME_DIR="+own, "TROUPE_SHM_DIR="+filepath.Join(own, "shm"))
	p, err := startProcess("ip", append(all, env...), append([]string{"netns", "exec", r.name(host), r.program}, args...)...)
	if err == nil {
		r.started = append(r.started, p)
	}
	return p, err
}

// withoutTroupe leaves the user's own head and settings alone.
func withoutTroupe(env []string) (out []string) {
	for _, v := range env {
		if !strings.HasPrefix(v, "TROUPE_") {
			out = append(out, v)
		}
	}
	return out
}

// start starts the head and the nodes. It returns the environment of a driver, and the names of the nodes.
func (r *hostsRig) start(ctx context.Context, cfg HostsConfig) (env, names []string, err error) {
	head, err := r.run(0, nil, "up", "--json", "--listen", r.address(0)+":7422", "--store", filepath.Join(r.dir, "store"), "--gpus", "none", "--name", "h")
	if err != nil {
		return nil, nil, err
	}
	var said struct {
		URL         string `json:"url"`
		TokenFile   string `json:"token_file"`
		Fingerprint string `json:"fingerprint"`
	}
	line, err := head.firstLine(ctx)
	if err == nil {
		err = json.Unmarshal(line, &said)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("start the head: %w: %s", err, head.stderr.String())
	}
	token, err := os.ReadFile(said.TokenFile)
	if err != nil {
		return nil, nil, err
	}
	env = []string{"TROUPE_URL=" + said.URL, "TROUPE_TOKEN=" + strings.TrimSpace(string(token)), "TROUPE_FINGERPRINT=" + said.Fingerprint}
	for i := range cfg.Nodes {
		name := string(rune('a' + i))
		names = append(names, name)
		args := []string{"join", said.URL, "--gpus", "none", "--name", name}
		if cfg.Plain {
			args = append(args, "--data-plain")
			env = append(env, "TROUPE_DATA_PLAIN=1")
		}
		if _, err := r.run(i+1, env, args...); err != nil {
			return nil, nil, err
		}
	}
	return env, names, r.await(ctx, env, names)
}

// await waits until the nodes are there.
func (r *hostsRig) await(ctx context.Context, env, names []string) error {
	p, err := r.run(0, env, "wait", "--nodes", strconv.Itoa(len(names)+1), "--timeout", "2m")
	if err != nil {
		return err
	}
	select {
	case <-p.waitCh:
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(3 * time.Minute):
	}
	if p.cmd.ProcessState == nil || p.cmd.ProcessState.ExitCode() != 0 {
		return fmt.Errorf("the nodes have not joined: %s", p.stderr.String())
	}
	return nil
}

// close ends the processes, the last one first, and removes the hosts.
func (r *hostsRig) close() (err error) {
	for i := len(r.started) - 1; i >= 0; i-- {
		err = errors.Join(err, r.started[i].Stop())
	}
	ctx := context.Background() // also after the caller's has ended
	for h := range r.hosts {
		err = errors.Join(err, r.ip(ctx, "netns del "+r.name(h)))
	}
	_ = r.ip(ctx, "link del "+r.tag+"br") // it may not have been made
	return errors.Join(err, os.RemoveAll(r.dir))
}
