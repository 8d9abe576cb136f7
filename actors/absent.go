package actors

import "time"

// A caller that has died never fetches its large answers, and enough of those keep a worker from starting more. So a
// caller that is silent while an answer is held for it is looked for: if the server says, each time it is asked, that
// nobody listens to its inbox, it is gone.
const (
	silentBeats = 5 // a caller that was silent for so many beats is looked for,
	absentBeats = 5 // and is gone when it has not been there for so many
)

// knock looks for the callers that the worker's large answers wait for.
func (w *Worker) knock(now time.Time) {
	w.mu.Lock()
	silent := map[string]bool{}
	if w.unfetched > 0 {
		for c := w.kept.oldest; c != nil; c = c.newer {
			if c.reply.Uploaded() && now.Sub(c.session.lastSeen) >= silentBeats*w.host.cfg.BeatEvery {
				silent[c.session.id] = true
			}
		}
	}
	w.mu.Unlock()
	for session := range silent {
		w.host.ep.ProbeInbox(session)
	}
}

// absent is the server's word that nobody listens to a caller's inbox. When it lasts, what is held for it is let go of:
// should it come back after all, its calls' outcome is unknown.
func (w *Worker) absent(session string, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.sessions[session]
	if s == nil {
		return
	}
	beat := w.host.cfg.BeatEvery
	if s.absentLast.Before(s.lastSeen) || now.Sub(s.absentLast) > absentBeats*beat/2 { // somebody was there in between
		s.absentSince = now
	}
	s.absentLast = now
	if now.Sub(s.absentSince) < absentBeats*beat {
		return
	}
	for _, c := range s.calls {
		if c.phase == answered && c.reply.Uploaded() {
			w.giveUp(c)
		}
	}
}

// absent tells every worker.
func (h *Host) absent(session string) {
	for _, w := range h.Workers() {
		w.absent(session, time.Now())
	}
}
