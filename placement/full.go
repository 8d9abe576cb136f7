package placement

import (
	"context"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/bus/wire"
)

// refuseWhileFull answers requests with ErrNoSpace while the store of the head's own server takes no writes: there is no
// leader then, because the lead is a lease in that store, and clients would ask until their time is up. It returns when ctx
// ends. A server that is not the head's own answers for itself.
func (s *Service) refuseWhileFull(ctx context.Context) {
	var sub *nats.Subscription
	stop := func() {
		if sub != nil {
			_ = sub.Unsubscribe() // fails only if the connection is closed
			sub = nil
		}
	}
	defer stop()
	for {
		changedCh, full := s.cfg.Bus.StoreErr()
		stop()
		if full != nil {
			var err error
			sub, err = s.cfg.Bus.Conn().Subscribe(bus.PlacementRequests(), bus.GuardMsg(func(m *nats.Msg) { s.refuse(m, full) }))
			if err != nil {
				s.cfg.Logger.Warn("placement: requests are not refused while the store is full; they time out", "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changedCh:
		}
	}
}

// refuse answers one request with an error. It is an answer of the leader that the client has heard last: another one's
// the client would pass over.
func (s *Service) refuse(m *nats.Msg, full error) {
	var msg message
	if m.Reply == "" || wire.Unmarshal(m.Data, &msg) != nil {
		return
	}
	data, err := wire.Marshal(&answer{Seq: msg.Seq, Attempt: msg.Attempt, Epoch: msg.Epoch, Kind: answerFailed, Error: toWire(full)})
	if err == nil {
		err = m.Respond(data)
	}
	if err != nil {
		s.cfg.Logger.Debug("placement: a refusal is lost; the client asks again", "error", err)
	}
}
