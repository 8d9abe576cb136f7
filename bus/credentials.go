package bus

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// CredentialKind is what a credential is for.
type CredentialKind string

// The kinds. The token of the head has no kind: it may do everything.
const (
	TeamCredential   CredentialKind = "team"   // of the drivers of one namespace, and of their workers
	WorkerCredential CredentialKind = "worker" // of one worker process, in one namespace
	AgentCredential  CredentialKind = "agent"  // of the agent of one machine
	JoinCredential   CredentialKind = "join"   // of machines that are to become nodes: each gets the credential of an agent for it
	ViewerCredential CredentialKind = "viewer" // reading the page and the metrics; no connection to the bus
	PageCredential   CredentialKind = "page"   // of a browser that has shown the token: the cookie of the page
)

// Credential is what a text made by Issue says. The text is accepted in place of the head's token. The server checks it with the token
// alone, so that each process that has the token can issue one, without a request.
type Credential struct {
	ID        string         `json:"id"`
	Kind      CredentialKind `json:"kind"`
	Namespace string         `json:"namespace,omitempty"` // of a team or a worker
	Name      string         `json:"name,omitempty"`      // what it is for, for lists
	Node      string         `json:"node,omitempty"`      // of an agent
	Nodes     int            `json:"nodes,omitempty"`     // of an agent with several simulated nodes, see NodeName; zero: one
	Host      string         `json:"host,omitempty"`      // of an agent: the word under which drivers of its host say that they live
	Issued    time.Time      `json:"issued"`
	Expires   time.Time      `json:"expires,omitzero"` // zero: never
}

// NodeName is the name of one of n nodes of an agent.
func NodeName(name string, i, n int) string {
	if n <= 1 {
		return name
	}
	return name + "-" + strconv.Itoa(i)
}

// nodesMost bounds the simulated nodes of an agent's credential.
const nodesMost = 256

// NodeNames are the nodes of an agent.
func (c Credential) NodeNames() (names []string) {
	for i := range max(1, c.Nodes) {
		names = append(names, NodeName(c.Node, i, c.Nodes))
	}
	return names
}

// place is the part of a subject that says which agent is asking.
func (c Credential) place() string {
	return c.Node + "." + strconv.Itoa(max(1, c.Nodes)) + "." + c.Host
}

// Rights are the subjects of a kind of credential, in which <namespace>, <id> and <host> are those of the credential; one with <node> stands for
// one for each of its nodes, and <agent> is <node>.<number of nodes>.<host>. What is in PublishNot is refused though Publish has it.
type Rights struct {
	Kind       CredentialKind
	For        string
	Publish    []string
	PublishNot []string
	Hear       []string
	HTTP       string // of the page and the metrics
}

// StoredSubjects are the subjects of streams that a namespace may have. What is published there goes into the streams, and the head alone
// does that.
func StoredSubjects(namespace string) []string {
	pipelines, rollouts := Subject(namespace, "@pipeline", "*"), Subject(namespace, "@rollouts", "*")
	return []string{pipelines + ".stored.>", pipelines + ".body.>", rollouts + ".stored", rollouts + ".body.>"}
}

// CredentialRights is the table of all kinds. The permissions in the server and the table of docs/security.md are made from it. No kind has
// rights to JetStream: an answer of JetStream goes to any subject that a request names, and its queues are shared by all.
//
// No kind may answer requests (allow_responses of NATS): the requester chooses the subject of the answer, and may be an accomplice.
func CredentialRights() []Rights {
	const run = tokenRoot + ".<namespace>"
	// Subjects of streams: the server's acknowledgement goes to any subject that a message names as its reply, keys of buckets among them.
	said := append(StoredSubjects("<namespace>"), run+".*.*.log.*", run+".*.*.exit", run+".*.*.output") // the last three are what agents say
	return []Rights{
		{
			Kind: TeamCredential, For: "the drivers of one namespace, and their workers",
			Publish:    []string{run + ".>", tokenRoot + ".@placement.request.<namespace>", doorsRoot + ".<namespace>.<id>.>"},
			PublishNot: append(slices.Clone(said), run+".@sessions"), // the control service acts with the head's rights
			Hear:       []string{run + ".>", tokenRoot + ".@placement.event.<namespace>"},
			HTTP:       "nothing",
		},
		{
			Kind: WorkerCredential, For: "one worker process",
			Publish:    []string{run + ".>"},
			PublishNot: append(said, run+".*.*.owner"), // drivers alone resize roles
			Hear:       []string{run + ".>", "_INBOX_<id>.>"},
			HTTP:       "nothing",
		},
		{
			Kind: AgentCredential, For: "the agent of one machine",
			Publish: []string{
				nodesRoot + ".beat.<node>", NodesHead(), doorsRoot + "." + NodesNamespace + ".<id>.*.<agent>", tokenRoot + ".*.*.*.exit", tokenRoot + ".*.*.*.output",
				"_INBOX.>", replyAll(NodesNamespace, "*"), // answers to holders of the token, who alone may ask it
			},
			Hear: []string{
				NodeDo("<node>"), NodeAsk("<node>"), NodeAsk(""), NodesEnd(), tokenRoot + ".*.@host.<host>",
				"_INBOX_<id>.>", replyAll(NodesNamespace, "<id>"), ReplySubject("*", "<id>", "*"),
			},
			HTTP: "nothing",
		},
		{Kind: JoinCredential, For: "a machine that is to become a node", Publish: []string{joinsRoot + ".<id>." + joinDoor}, Hear: []string{"_INBOX_<id>.>"}, HTTP: "nothing"},
		{Kind: ViewerCredential, For: "people who look, and Prometheus", HTTP: "reads the page and the metrics"},
		{Kind: PageCredential, For: "a browser that has shown the token (a cookie of twelve hours)", HTTP: "the page and the metrics"},
	}
}

// rights are the subjects of the credential. Its names have been checked.
func (c Credential) rights() (r Rights, ok bool) {
	words := strings.NewReplacer("<namespace>", c.Namespace, "<id>", c.ID, "<host>", c.Host, "<agent>", c.place())
	fill := func(subjects []string) (out []string) {
		for _, s := range subjects {
			if s = words.Replace(s); !strings.Contains(s, "<node>") {
				out = append(out, s)
				continue
			}
			for _, name := range c.NodeNames() {
				out = append(out, strings.ReplaceAll(s, "<node>", name))
			}
		}
		return out
	}
	for _, r := range CredentialRights() {
		if r.Kind == c.Kind {
			r.Publish, r.PublishNot, r.Hear = fill(r.Publish), fill(r.PublishNot), fill(r.Hear)
			return r, true
		}
	}
	return Rights{}, false
}

const (
	credentialMark = "troupe1" // version of the format
	credentialMost = 2048      // bytes of the text
)

func (c Credential) check() error {
	if !slices.ContainsFunc(CredentialRights(), func(r Rights) bool { return r.Kind == c.Kind }) {
		return Errorf(CodeInvalid, "credential: the kind %q is not known; give %s, %s, %s, %s or %s", c.Kind, TeamCredential, JoinCredential, AgentCredential, ViewerCredential, WorkerCredential)
	}
	if c.Kind == AgentCredential {
		if err := errors.Join(CheckName("node", c.Node), CheckName("host", c.Host)); err != nil {
			return err
		}
		if c.Nodes < 0 || c.Nodes > nodesMost {
			return Errorf(CodeInvalid, "credential: one of an agent is for 1 to %d nodes, not %d", nodesMost, c.Nodes)
		}
	}
	if c.Kind == WorkerCredential || c.Kind == TeamCredential {
		if err := CheckName("namespace", c.Namespace); err != nil {
			return err
		}
	} else if c.Namespace != "" {
		return Errorf(CodeInvalid, "credential: one of the kind %s has no namespace", c.Kind)
	}
	return CheckName("id of the credential", c.ID)
}

// Issue makes the text of a credential from the head's token. ID and Issued are set if they are empty.
func (c Credential) Issue(token string) (string, Credential, error) {
	if c.ID == "" {
		c.ID = NewID()
	}
	if c.Issued.IsZero() {
		c.Issued = time.Now().UTC().Truncate(time.Second)
	}
	if err := c.check(); err != nil {
		return "", c, err
	}
	switch _, _, derived := splitCredential(token); {
	case token == "":
		return "", c, Errorf(CodeInvalid, "credential: the head's token is needed to issue one; a NATS server of its own issues its credentials itself")
	case derived:
		return "", c, Errorf(CodeRefused, "credential: the head's token is needed to issue one, and this is a credential itself")
	}
	data, err := json.Marshal(c)
	if err != nil {
		return "", c, err
	}
	claims := base64.RawURLEncoding.EncodeToString(data)
	text := credentialMark + "." + claims + "." + seal(token, claims)
	if len(text) > credentialMost {
		return "", c, Errorf(CodeInvalid, "credential: the name %q is too long", c.Name)
	}
	return text, c, nil
}

func seal(token, claims string) string {
	mac := hmac.New(sha256.New, []byte(token))
	_, _ = mac.Write([]byte(credentialMark + "." + claims)) // never fails
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// splitCredential reports whether a text has the form of a credential.
func splitCredential(text string) (claims, sum string, ok bool) {
	words := strings.Split(text, ".")
	if len(text) > credentialMost || len(words) != 3 || words[0] != credentialMark {
		return "", "", false
	}
	return words[1], words[2], true
}

// VerifyCredential reads a credential that was issued with the token and has not expired. Nothing of the text is used before its seal is checked.
func VerifyCredential(token, text string, now time.Time) (Credential, error) {
	claims, sum, ok := splitCredential(text)
	if !ok || token == "" || !hmac.Equal([]byte(sum), []byte(seal(token, claims))) {
		return Credential{}, Errorf(CodeRefused, "the credential was not issued with this head's token")
	}
	c, err := readClaims(claims)
	if err == nil {
		err = c.check()
	}
	if err == nil && !c.Expires.IsZero() && !now.Before(c.Expires) {
		err = Errorf(CodeRefused, "the credential expired on %s; ask for another: troupe auth new", c.Expires.Format(time.DateTime))
	}
	return c, err
}

func readClaims(claims string) (c Credential, err error) {
	data, err := base64.RawURLEncoding.DecodeString(claims)
	if err == nil {
		err = json.Unmarshal(data, &c)
	}
	if err != nil {
		return c, Errorf(CodeMalformed, "the credential cannot be read: %w", err)
	}
	return c, nil
}

// ReadCredential is what a text says of itself; false for a token. Only the server can check it.
func ReadCredential(text string) (Credential, bool) {
	claims, _, ok := splitCredential(text)
	if !ok {
		return Credential{}, false
	}
	c, err := readClaims(claims)
	return c, err == nil && c.check() == nil
}

// ForWorker is the credential of a worker of the team whose credential has this id. It ends with that one, which is not used to make it: the
// agent of the worker does.
func ForWorker(team, namespace string) Credential {
	return Credential{Kind: TeamCredential, ID: team + workerMark + NewID(), Namespace: namespace}
}

// ForConfined is the credential of a confined worker on a node whose agent has a credential of this id: it ends with that one.
func ForConfined(agent, namespace string) Credential {
	return Credential{Kind: WorkerCredential, ID: agent + workerMark + NewID(), Namespace: namespace}
}

// workerMark separates the id of a team's or an agent's credential from what is added for a worker.
const workerMark = "-"

// parentOf is the id of the credential with which that of a worker ends; the id itself for any other.
func parentOf(id string) string {
	parent, _, _ := strings.Cut(id, workerMark)
	return parent
}

// Parent is the id of the credential with which that of a worker ends; its own for any other.
func (c Credential) Parent() string { return parentOf(c.ID) }

// inboxPrefix is where the answers to a credential's requests go. Nobody else may hear those of a worker; those of a team lie in its namespace,
// where the others of the team may answer.
func (c Credential) inboxPrefix() string {
	if c.Kind == TeamCredential {
		return tokenRoot + "." + c.Namespace + "." + tokenReply + "." + c.ID
	}
	return "_INBOX_" + c.ID
}

// OwnToken is the text with which this connection was made; empty: it has a credentials file, or none.
func (b *Bus) OwnToken() string { return b.cfg.Token }

// IssueCredential is Issue with the token of this connection, or of the embedded server.
func (b *Bus) IssueCredential(c Credential) (string, Credential, error) { return c.Issue(b.cfg.Token) }

// CredentialTable is the table of docs/security.md.
func CredentialTable() string {
	var out strings.Builder
	out.WriteString("| kind | for | publishes | but not | hears | JetStream | HTTP |\n|---|---|---|---|---|---|---|\n")
	out.WriteString("| the token | the head, operators, and agents and drivers without a credential | everything | | everything | everything | the page and the metrics |\n")
	cell := func(subjects []string) string {
		if len(subjects) == 0 {
			return "nothing"
		}
		return "`" + strings.Join(subjects, "` `") + "`"
	}
	for _, r := range CredentialRights() {
		not := ""
		if len(r.PublishNot) > 0 {
			not = cell(r.PublishNot)
		}
		fmt.Fprintf(&out, "| %s | %s | %s | %s | %s | nothing | %s |\n", r.Kind, r.For, cell(r.Publish), not, cell(r.Hear), r.HTTP)
	}
	return out.String()
}
