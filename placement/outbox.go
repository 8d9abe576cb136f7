package placement

import "sync"

// outbox is the messages of a round. They are sent when it is known that this leader led when they were decided. It is safe for concurrent
// use.
type outbox struct {
	mu       sync.Mutex // guards what follows
	messages []outgoing
}

type outgoing struct {
	subject string
	data    []byte
}

func (o *outbox) add(m outgoing) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.messages = append(o.messages, m)
}

func (o *outbox) empty() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.messages) == 0
}

// deliver sends all messages.
func (o *outbox) deliver(cfg Config) {
	o.mu.Lock()
	messages := o.messages
	o.messages = nil
	o.mu.Unlock()
	for _, m := range messages {
		cfg.post(m)
	}
}

// post sends a message at once.
func (c Config) post(m outgoing) {
	if err := c.Bus.Publish(m.subject, m.data); err != nil {
		c.Logger.Debug("placement: an answer is lost", "error", err)
	}
}
