package rollouts

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

const (
	holderInterval = 500 * time.Millisecond
	holderTimeout  = 4 * time.Second // time for a connection to come back
)

// watchHolders asks each client whether it still holds its tickets. What a client does not hold, and what clients hold that
// have no subscription for longer than a reconnect takes, is given to others. A client that does not answer may be busy.
func (e *engine) watchHolders() {
	heard := map[string]time.Time{}
	for bus.Sleep(e.ctx, holderInterval) == nil {
		byClient := e.ticketsByClient()
		for client := range heard {
			if byClient[client] == nil {
				delete(heard, client)
			}
		}
		for client, tickets := range byClient {
			if heard[client].IsZero() {
				heard[client] = time.Now()
			}
			gone, err := e.askHolder(client, tickets)
			switch {
			case errors.Is(err, bus.ErrNoResponders):
				if time.Since(heard[client]) > holderTimeout {
					e.release(tickets)
				}
				continue
			case err == nil && len(gone) > 0:
				e.release(gone)
			}
			heard[client] = time.Now()
		}
	}
}

func (e *engine) ticketsByClient() map[string][]string {
	ch := make(chan map[string]bool, 1)
	select {
	case e.listCh <- ch:
	case <-e.ctx.Done():
		return nil
	}
	out := map[string][]string{}
	select {
	case tickets := <-ch:
		for ticket := range tickets {
			client, _, _ := cutLast(ticket)
			out[client] = append(out[client], ticket)
		}
	case <-e.ctx.Done():
	}
	return out
}

func (e *engine) release(tickets []string) {
	select {
	case e.releaseCh <- tickets:
	case <-e.ctx.Done():
	}
}

// askHolder asks a client which of the tickets it does not hold.
func (e *engine) askHolder(client string, tickets []string) (gone []string, err error) {
	ctx, cancel := context.WithTimeout(e.ctx, holderInterval)
	defer cancel()
	body, err := wire.Marshal(tickets)
	if err != nil {
		return nil, err
	}
	m, err := e.cfg.Bus.Request(ctx, client, body)
	if err != nil {
		return nil, err
	}
	return gone, wire.Unmarshal(m.Data, &gone)
}

// handleHolding answers which of the engine's tickets this client does not hold.
func (c *Client) handleHolding(m *bus.Msg) {
	var asked []string
	if wire.Unmarshal(m.Data, &asked) != nil {
		return
	}
	c.mu.Lock()
	gone := slices.DeleteFunc(asked, func(ticket string) bool { return c.held[ticket] })
	c.mu.Unlock()
	body, _ := wire.Marshal(gone) // cannot fail
	_ = c.b.Respond(m, body)      // a lost answer is requested again
}

// cutLast cuts at the last dot.
func cutLast(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, '.')
	if i < 0 {
		return s, s, false
	}
	return s[:i], s[i+1:], true
}

func lastToken(subject string) string {
	_, last, _ := cutLast(subject)
	return last
}
