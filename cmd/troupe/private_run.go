package main

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

// privateRun is a run of a driver that started a private head, as the driver describes it in run.json in a folder of its own. The
// workers' output lies beside it and stays when the run is over; the driver removes all but the last few runs.
type privateRun struct {
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
func (r privateRun) running() bool { return !r.Ended && headFile{r.HeadFile}.running() }

// privateRuns lists the known runs of this user, the newest first. A folder without a readable run.json is left out.
func privateRuns(env func(string) string) []privateRun {
	dir, err := nodes.StateDir(env)
	if err != nil {
		return nil
	}
	paths, _ := filepath.Glob(filepath.Join(dir, "runs", "*", "run.json")) // the pattern is valid
	var all []privateRun
	for _, path := range paths {
		var r privateRun
		data, err := os.ReadFile(path)
		if err != nil || json.Unmarshal(data, &r) != nil {
			continue
		}
		r.dir = filepath.Dir(path)
		r.ID = filepath.Base(r.dir)
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b privateRun) int { return b.Since.Compare(a.Since) })
	return all
}

func runningRuns(env func(string) string) []privateRun {
	return slices.DeleteFunc(privateRuns(env), func(r privateRun) bool { return !r.running() })
}

// chosenRun is the run of --run; nil if the flag is not set.
func (c *cli) chosenRun() (*privateRun, error) {
	if c.run == "" {
		return nil, nil
	}
	all := privateRuns(c.env)
	i := slices.IndexFunc(all, func(r privateRun) bool { return r.ID == c.run || strconv.Itoa(r.DriverPID) == c.run })
	if i < 0 {
		var known []string
		for _, r := range all {
			known = append(known, r.ID)
		}
		return nil, usagef("--run %s: there is no such run; known are: %s", c.run, strings.Join(known, ", "))
	}
	return &all[i], nil
}

// privateRun is the run that --run names, or the newest that runs if no URL is given and no other head runs; nil: neither.
func (c *cli) privateRun(urls string) (*privateRun, error) {
	run, err := c.chosenRun()
	switch {
	case err != nil:
		return nil, err
	case run != nil && urls != "":
		return nil, usagef("--run %s names a head, and so does --url or TROUPE_URL: give one of them", c.run)
	case run != nil && !run.running():
		return nil, bus.Errorf(bus.CodeUnavailable, "the run %s of %s is over; `troupe logs` has its output", run.ID, run.Driver)
	case run != nil:
		return run, nil
	}
	if head, err := readHead(c.env); urls != "" || c.ownHead || err == nil && head.running() {
		return nil, nil
	}
	all := runningRuns(c.env)
	if len(all) == 0 {
		return nil, nil
	}
	if len(all) > 1 {
		c.warnf("troupe: %d private heads run; this is the newest, of %s; choose with --run (see `troupe status`)\n", len(all), all[0].Driver)
	}
	return &all[0], nil
}

// useRun makes the head of a run the target.
func (s *server) useRun(c *cli, run *privateRun) {
	s.run = run
	s.bus = bus.Config{URLs: strings.Split(run.URL, ","), Name: "troupe-cli", Logger: c.logger(slog.LevelError)}
	run.Apply(&s.bus)
	if c.namespace == "" && c.env("TROUPE_NAMESPACE") == "" && run.Namespace != "" {
		s.namespace, s.named = run.Namespace, run.Namespace != "default"
	}
}

// endedRun is a run that is over, whose logs are to be read: that of --run, or, if no head runs, the last with the role.
func (c *cli) endedRun(role string) (*privateRun, error) {
	if run, err := c.chosenRun(); err != nil || run != nil && !run.running() {
		return run, err
	}
	if c.run != "" || c.url != "" || c.env("TROUPE_URL") != "" || len(runningRuns(c.env)) > 0 {
		return nil, nil
	}
	if head, err := readHead(c.env); err == nil && head.running() {
		return nil, nil
	}
	for _, run := range privateRuns(c.env) {
		if len(run.logFiles(nodes.LogQuery{Role: role, Rank: -1})) > 0 {
			return &run, nil
		}
	}
	return nil, nil
}

// logFiles are the log files of a role, NAMESPACE/ROLE/INCARNATION/RANK.GEN.log with rotated ones beside them.
func (r privateRun) logFiles(q nodes.LogQuery) []string {
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

// keptLogs prints the kept output of a run.
func (c *cli) keptLogs(run privateRun, q nodes.LogQuery, keep func(nodes.Line) bool, tail int) error {
	if q.Follow {
		return usagef("the run %s of %s is over: leave out --follow", run.ID, run.Driver)
	}
	q.Namespace = c.namespace
	var lines []nodes.Line
	for _, path := range run.logFiles(q) {
		more, err := nodes.ReadLogFile(path)
		if err != nil {
			return err
		}
		for _, l := range more {
			if l.ID.Role = q.Role; keep(l) && !l.At.Before(q.Since) {
				lines = append(lines, l)
			}
		}
	}
	slices.SortStableFunc(lines, func(a, b nodes.Line) int { return a.At.Compare(b.At) })
	if tail >= 0 {
		lines = lines[max(0, len(lines)-tail):]
	}
	for _, l := range lines {
		if err := c.printLine(l); err != nil {
			return err
		}
	}
	return nil
}
