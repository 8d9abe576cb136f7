package doctor

import (
	"cmp"
	"slices"
)

// Severity orders findings.
type Severity string

const (
	// Failure is something that does not work now.
	Failure Severity = "failure"
	// Warning is something that will not work for long, or only in part.
	Warning Severity = "warning"
)

// Finding is one problem with its evidence and the command that shows more or repairs it.
type Finding struct {
	Severity Severity `json:"severity"`
	Code     string   `json:"code"`    // stable, for scripts
	Subject  string   `json:"subject"` // such as "role default/train, rank 3"
	Text     string   `json:"text"`
	Evidence []string `json:"evidence"`
	Next     string   `json:"next"` // a command
}

// findings collects in the order in which the checks run.
type findings []Finding

func (f *findings) add(s Severity, code, subject, text, next string, evidence ...string) {
	if evidence == nil {
		evidence = []string{}
	}
	*f = append(*f, Finding{Severity: s, Code: code, Subject: subject, Text: text, Evidence: evidence, Next: next})
}

// Judge returns the findings, failures first. The same facts give the same findings.
func Judge(facts Facts) []Finding {
	var f findings
	f.head(facts)
	f.server(facts)
	for _, n := range facts.Nodes {
		f.node(facts, n)
	}
	for _, r := range facts.Roles {
		f.role(facts, r)
	}
	f.queue(facts.Waiting)
	for _, p := range facts.Pipelines {
		f.pipeline(p)
	}
	f.leases(facts.Leases)
	for _, p := range facts.Problems {
		f.add(Failure, "unreadable", p.What, "it could not be read, so that nothing is said about it", "troupe status", p.Err.Error())
	}
	slices.SortStableFunc(f, func(a, b Finding) int { return cmp.Compare(rank(a.Severity), rank(b.Severity)) })
	return append([]Finding{}, f...)
}

func rank(s Severity) int {
	if s == Failure {
		return 0
	}
	return 1
}
