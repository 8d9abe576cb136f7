package dashboard

import (
	"bytes"
	"context"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/pipeline"
)

//go:embed static
var static embed.FS

const (
	streamEvery  = time.Second // between two snapshots of the live stream
	maxViewers   = 64          // live streams at a time
	logsBacklog  = 10 * time.Minute
	cookieName   = "troupe_token"
	cookieLife   = 12 * time.Hour
	pipelineWait = 2 * time.Second
)

// Config is what a handler serves.
type Config struct {
	Bus      *bus.Bus
	Observer *Observer
	Metrics  http.Handler
	// Token, or a credential made from it, must be shown by every request but health checks, as "Authorization: Bearer TOKEN" or once as
	// ?token=TOKEN, which becomes a cookie. Empty: no token is asked for, which is for loopback alone.
	Token string
	// StandbyFunc reports whether another head leads. Nil: none does.
	StandbyFunc func() bool
}

// Handler serves the page, its data, /metrics, /healthz and /readyz.
func Handler(cfg Config) http.Handler {
	s := &server{Config: cfg, viewers: make(chan struct{}, maxViewers), inspections: make(chan struct{}, maxInspections)}
	files, err := fs.Sub(static, "static")
	if err != nil {
		panic(err) // the folder is embedded
	}
	page := http.NewServeMux()
	page.Handle("GET /", http.FileServerFS(files))
	page.HandleFunc("GET /api/snapshot", s.snapshot)
	page.HandleFunc("GET /api/stream", s.stream)
	page.HandleFunc("GET /api/events", s.events)
	page.HandleFunc("GET /api/logs", s.logs)
	page.HandleFunc("GET /api/timeline", s.timeline)
	page.HandleFunc("GET /api/stacks", s.stacks)
	page.HandleFunc("GET /api/pipelines", s.pipelines)
	page.HandleFunc("POST /api/pipelines/retry", s.retry)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", s.ready)
	mux.Handle("GET /metrics", s.guarded(cfg.Metrics)) // it compresses by itself
	mux.Handle("/", s.guarded(compressed(page)))
	return mux
}

type server struct {
	Config
	viewers     chan struct{} // one for each live stream
	inspections chan struct{} // one for each timeline or stacks that are being collected
}

// guarded asks for the token, and sets headers that keep other sites out of the page.
func (s *server) guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Referrer-Policy", "no-referrer")
		if r.Method != http.MethodGet && r.Header.Get("X-Troupe") == "" { // a form of another site cannot set it
			http.Error(w, "the header X-Troupe is missing", http.StatusForbidden)
			return
		}
		if s.Token == "" {
			if !loopbackHost(r.Host) { // a name that another site has pointed here
				http.Error(w, "this page is served on loopback; use http://127.0.0.1 or http://localhost", http.StatusForbidden)
				return
			}
			next.ServeHTTP(w, r)
			return
		}
		if given := r.URL.Query().Get("token"); s.may(given) != nothing {
			http.SetCookie(w, &http.Cookie{Name: cookieName, Value: s.cookie(given), Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode})
			http.Redirect(w, r, r.URL.Path, http.StatusSeeOther)
			return
		}
		given, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if cookie, err := r.Cookie(cookieName); err == nil && s.may(given) == nothing {
			given = cookie.Value
		}
		switch may := s.may(given); {
		case may == everything, may == reading && r.Method == http.MethodGet:
			next.ServeHTTP(w, r)
		case may == reading:
			http.Error(w, "a viewer's credential reads only; open /?token=TOKEN with the head's token", http.StatusForbidden)
		default:
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "the head's token or a viewer's credential (troupe auth new viewer) is needed: open /?token=TOKEN, or send Authorization: Bearer TOKEN", http.StatusUnauthorized)
		}
	})
}

// access is what a request may do.
type access int

const (
	nothing    access = iota
	reading           // a viewer's credential
	everything        // the head's token, or the cookie of a browser that has shown it
)

// may is what the head's token, or a credential, permits.
func (s *server) may(given string) access {
	if given == "" {
		return nothing
	}
	if subtle.ConstantTimeCompare([]byte(given), []byte(s.Token)) == 1 {
		return everything
	}
	c, err := bus.VerifyCredential(s.Token, given, time.Now())
	switch {
	case err != nil || !s.Bus.AcceptsCredential(c.ID):
		return nothing
	case c.Kind == bus.PageCredential:
		return everything
	case c.Kind == bus.ViewerCredential:
		return reading
	}
	return nothing
}

// cookie is what a browser keeps of a token or credential that it has shown. It is never the token: a cookie is sent to every port of the host.
func (s *server) cookie(given string) string {
	text, _, err := bus.Credential{Kind: bus.PageCredential, Expires: time.Now().UTC().Add(cookieLife)}.Issue(s.Token)
	if err != nil || s.may(given) == reading {
		return given // a viewer's credential; Issue fails only without a token
	}
	return text
}

// loopbackHost reports whether a Host header names this machine's loopback: localhost, or an address of loopback. Any other name,
// 127.evil.example too, may be one that another site has pointed here.
func loopbackHost(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil { // without a port
		name = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	}
	addr, err := netip.ParseAddr(name)
	return strings.EqualFold(name, "localhost") || err == nil && addr.Unmap().IsLoopback()
}

func (s *server) ready(w http.ResponseWriter, r *http.Request) {
	if err := s.Observer.Ready(r.Context()); err != nil {
		http.Error(w, "the head is not ready", http.StatusServiceUnavailable) // the reason is shown only with the token
		return
	}
	if s.StandbyFunc != nil && s.StandbyFunc() {
		_, _ = w.Write([]byte("ready, standby\n"))
		return
	}
	_, _ = w.Write([]byte("ready\n"))
}

func (s *server) snapshot(w http.ResponseWriter, r *http.Request) {
	writeJSON(w, s.Observer.Snapshot(r.Context()))
}

func writeJSON(w http.ResponseWriter, v any) {
	data, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(data) // the reader may be gone
}

// stream sends a snapshot every second, when it has changed, as server-sent events.
func (s *server) stream(w http.ResponseWriter, r *http.Request) {
	send, done, ok := s.openStream(w)
	if !ok {
		return
	}
	defer done()
	tick := time.NewTicker(streamEvery)
	defer tick.Stop()
	var last []byte
	for {
		snapshot := s.Observer.Snapshot(r.Context())
		at := snapshot.At
		snapshot.At = time.Time{}
		data, err := json.Marshal(snapshot)
		if err != nil {
			return
		}
		changed := !bytes.Equal(data, last)
		last = data
		if changed {
			snapshot.At = at
			if data, err = json.Marshal(snapshot); err != nil {
				return
			}
			err = send("snapshot", data)
		} else {
			err = send("same", []byte(strconv.Quote(at.Format(time.RFC3339Nano))))
		}
		if err != nil {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-tick.C:
		}
	}
}

// openStream begins a response of server-sent events. done must be called if ok is true.
func (s *server) openStream(w http.ResponseWriter) (send func(event string, data []byte) error, done func(), ok bool) {
	select {
	case s.viewers <- struct{}{}:
	default:
		http.Error(w, fmt.Sprintf("%d live views are open, which is the limit; close some", maxViewers), http.StatusTooManyRequests)
		return nil, nil, false
	}
	control := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	send = func(event string, data []byte) error {
		_ = control.SetWriteDeadline(time.Now().Add(10 * time.Second)) // a reader that takes nothing is dropped
		if _, err := fmt.Fprintf(w, "event: %s\ndata: %s\n\n", event, data); err != nil {
			return err
		}
		return control.Flush()
	}
	return send, func() { <-s.viewers }, true
}

func (s *server) events(w http.ResponseWriter, r *http.Request) {
	limit, err := strconv.Atoi(r.URL.Query().Get("limit"))
	if err != nil || limit < 1 || limit > maxEvents {
		limit = 200
	}
	writeJSON(w, s.Observer.Events.Find(r.URL.Query().Get("q"), limit))
}

// logs sends the output of a role, or of one rank, as it comes.
func (s *server) logs(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	q := nodes.LogQuery{Namespace: query.Get("namespace"), Role: query.Get("role"), Incarnation: query.Get("incarnation"), Rank: -1, Since: time.Now().Add(-logsBacklog), Follow: true}
	for field, name := range map[string]string{"namespace": q.Namespace, "role": q.Role, "incarnation": q.Incarnation} {
		if err := bus.CheckName(field, name); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
	}
	if rank := query.Get("rank"); rank != "" {
		n, err := strconv.Atoi(rank)
		if err != nil || n < 0 {
			http.Error(w, fmt.Sprintf("rank %q is not a number from 0", rank), http.StatusBadRequest)
			return
		}
		q.Rank = n
	}
	send, done, ok := s.openStream(w)
	if !ok {
		return
	}
	defer done()
	err := nodes.ReadLogs(r.Context(), s.Bus, q, func(l nodes.Line) error {
		data, err := json.Marshal(l)
		if err != nil {
			return err
		}
		return send("line", data)
	})
	if err != nil && r.Context().Err() == nil {
		_ = send("end", []byte(strconv.Quote(err.Error()))) // the reader may be gone
	}
}

// pipelineView is a pipeline, or why its state is not known.
type pipelineView struct {
	Namespace string           `json:"namespace"`
	Name      string           `json:"name"`
	Status    *pipeline.Status `json:"status,omitempty"`
	Problem   string           `json:"problem,omitempty"`
}

func (s *server) pipelines(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), pipelineWait)
	defer cancel()
	all, err := pipeline.ListAll(ctx, s.Bus)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	views := []pipelineView{}
	for _, namespace := range slices.Sorted(maps.Keys(all)) {
		for _, name := range all[namespace] {
			v := pipelineView{Namespace: namespace, Name: name}
			client, err := pipeline.Connect(s.Bus, namespace, name)
			if err == nil {
				var status pipeline.Status
				if status, err = client.Status(ctx); err == nil {
					v.Status = &status
				}
			}
			if err != nil {
				v.Problem = err.Error()
			}
			views = append(views, v)
		}
	}
	writeJSON(w, views)
}

// retry puts the dead letters of a pipeline back into their streams.
func (s *server) retry(w http.ResponseWriter, r *http.Request) {
	client, err := pipeline.Connect(s.Bus, r.URL.Query().Get("namespace"), r.URL.Query().Get("name"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	n, err := client.RetryDead(r.Context(), nil, true)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	writeJSON(w, map[string]int{"retried": n})
}
