package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
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
	Code     string   `json:"code"`               // stable, for scripts
	Subject  string   `json:"subject"`            // such as "role default/train, rank 3", or "100 nodes" of a group
	Subjects []string `json:"subjects,omitempty"` // of a group: each of them
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
	f.lostNodes(facts)
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
	f = f.grouped()
	slices.SortStableFunc(f, func(a, b Finding) int { return cmp.Compare(rank(a.Severity), rank(b.Severity)) })
	return append([]Finding{}, f...)
}

func rank(s Severity) int {
	if s == Failure {
		return 0
	}
	return 1
}

const (
	groupFrom  = 4 // findings of one kind become one finding
	groupNames = 3 // of a group that its subject and its evidence name
)

// grouped joins findings of the same code: what a hundred nodes have in common is one problem.
func (f findings) grouped() findings {
	byCode := map[string][]Finding{}
	for _, one := range f {
		byCode[one.Code] = append(byCode[one.Code], one)
	}
	var out findings
	for _, one := range f {
		switch all := byCode[one.Code]; {
		case len(all) < groupFrom:
			out = append(out, one)
		case all[0].Subject == one.Subject:
			out = append(out, join(all))
		}
	}
	return out
}

// join makes one finding of many. The command is that of the first.
func join(all []Finding) Finding {
	g := all[0]
	g.Evidence = []string{}
	for i, one := range all {
		g.Subjects = append(g.Subjects, one.Subject)
		if i < groupNames {
			facts := slices.DeleteFunc(slices.Clone(one.Evidence), func(e string) bool { return e == "" })
			if one.Text != g.Text {
				facts = append([]string{one.Text}, facts...)
			}
			g.Evidence = append(g.Evidence, strings.Join(append([]string{one.Subject}, facts...), ": "))
		}
		if one.Severity == Failure {
			g.Severity = Failure
		}
	}
	kind, _, _ := strings.Cut(g.Subject, " ")
	g.Subject = fmt.Sprintf("%d %ss: %s and %d more", len(all), kind, strings.Join(names(g.Subjects[:groupNames]), "; "), len(all)-groupNames)
	return g
}

// names are subjects without their kind: "box-1" of "node box-1".
func names(subjects []string) (out []string) {
	for _, s := range subjects {
		_, name, named := strings.Cut(s, " ")
		if !named {
			name = s
		}
		out = append(out, name)
	}
	return out
}
