package cli

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"troupe/bus"
	"troupe/nodes"
)

// PrivateRun is a run of a driver that started a private head, as the driver describes it in run.json in a folder of its own. The
// workers' output lies beside it and stays when the run is over; the driver removes all but the last few runs.
type PrivateRun struct {
	nodes.HeadFile
	ID        string    `json:"id"`
	Driver    string    `json:"driver"`
	DriverPID int       `json:"driver_pid"`
	Namespace string    `json:"namespace"`
	Since     time.Time `json:"since"`
	Ended     bool      `json:"ended,omitempty"`

	dir string
}

// running reports whether the run's head may still answer.
func (r PrivateRun) running() bool { return !r.Ended && HeadFile{r.HeadFile}.Running() }

// privateRuns lists the known runs of this user, the newest first. A folder without a readable run.json is left out.
func privateRuns(env func(string) string) []PrivateRun {
	dir, err := nodes.StateDir(env)
	if err != nil {
		return nil
	}
	paths, _ := filepath.Glob(filepath.Join(dir, "runs", "*", "run.json")) // the pattern is valid
	var all []PrivateRun
	for _, path := range paths {
		var r PrivateRun
		data, err := os.ReadFile(path)
		if err != nil || json.Unmarshal(data, &r) != nil {
			continue
		}
		r.dir = filepath.Dir(path)
		r.ID = filepath.Base(r.dir)
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b PrivateRun) int { return b.Since.Compare(a.Since) })
	return all
}

func RunningRuns(env func(string) string) []PrivateRun {
	return slices.DeleteFunc(privateRuns(env), func(r PrivateRun) bool { return !r.running() })
}

// chosenRun is the run of --run; nil if the flag is not set.
func (c *CLI) chosenRun() (*PrivateRun, error) {
	if c.run == "" {
		return nil, nil
	}
	all := privateRuns(c.Env)
	i := slices.IndexFunc(all, func(r PrivateRun) bool { return r.ID == c.run || strconv.Itoa(r.DriverPID) == c.run })
	if i < 0 {
		var known []string
		for _, r := range all {
			known = append(known, r.ID)
		}
		return nil, Usagef("--run %s: there is no such run; known are: %s", c.run, strings.Join(known, ", "))
	}
	return &all[i], nil
}

// privateRun is the run that --run names, or the newest that runs if no URL is given and no other head runs; nil: neither.
func (c *CLI) privateRun(urls string) (*PrivateRun, error) {
	run, err := c.chosenRun()
	switch {
	case err != nil:
		return nil, err
	case run != nil && urls != "":
		return nil, Usagef("--run %s names a head, and so does --url or TROUPE_URL: give one of them", c.run)
	case run != nil && !run.running():
		return nil, bus.Errorf(bus.CodeUnavailable, "the run %s of %s is over; `troupe logs` has its output", run.ID, run.Driver)
	case run != nil:
		return run, nil
	}
	if head, err := ReadHead(c.Env); urls != "" || c.OwnHead || err == nil && head.Running() {
		return nil, nil
	}
	all := RunningRuns(c.Env)
	if len(all) == 0 {
		return nil, nil
	}
	if len(all) > 1 {
		c.Warnf("troupe: %d private heads run; this is the newest, of %s; choose with --run (see `troupe status`)\n", len(all), all[0].Driver)
	}
	return &all[0], nil
}

// useRun makes the head of a run the target.
func (s *Server) useRun(c *CLI, run *PrivateRun) {
	s.Run = run
	s.Bus = bus.Config{URLs: strings.Split(run.URL, ","), Name: "troupe-cli", Logger: c.Logger(slog.LevelError)}
	run.Apply(&s.Bus)
	if c.Namespace == "" && c.Env("TROUPE_NAMESPACE") == "" && run.Namespace != "" {
		s.Namespace, s.Named = run.Namespace, run.Namespace != "default"
	}
}

// EndedRun is a run that is over, whose logs are to be read: that of --run, or, if no head runs, the last with the role.
func (c *CLI) EndedRun(role string) (*PrivateRun, error) {
	if run, err := c.chosenRun(); err != nil || run != nil && !run.running() {
		return run, err
	}
	if c.run != "" || c.URL != "" || c.Env("TROUPE_URL") != "" || len(RunningRuns(c.Env)) > 0 {
		return nil, nil
	}
	if head, err := ReadHead(c.Env); err == nil && head.Running() {
		return nil, nil
	}
	for _, run := range privateRuns(c.Env) {
		if len(run.LogFiles(nodes.LogQuery{Role: role, Rank: -1})) > 0 {
			return &run, nil
		}
	}
	return nil, nil
}

// LogFiles are the log files of a role, NAMESPACE/ROLE/INCARNATION/RANK.GEN.log with rotated ones beside them.
func (r PrivateRun) LogFiles(q nodes.LogQuery) []string {
	namespace, rank := "*", "*"
	if q.Namespace != "" {
		namespace = q.Namespace
	}
	if q.Rank >= 0 {
		rank = strconv.Itoa(q.Rank)
	}
	paths, _ := filepath.Glob(filepath.Join(r.dir, "logs", namespace, q.Role, "*", rank+".*.log*")) // names have no pattern characters
	return paths
}
