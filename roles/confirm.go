package roles

import (
	"context"
	"slices"
	"strings"

	"troupe/bus"
	"troupe/placement"
)

// ConfirmReservations tells the placement service which of the reservations that it does not believe its ledger about are still
// held: by a role whose driver lives or that is detached, or by a living driver itself. Without it those that run no worker
// are dropped. A head calls it every few seconds; where nothing is in doubt it asks one question.
func ConfirmReservations(ctx context.Context, b *bus.Bus) error {
	client, err := placement.NewClient(b, "")
	if err != nil {
		return err
	}
	defer client.Close()
	if status, err := client.Ledger(ctx); err != nil || status.Unconfirmed == 0 {
		return err
	}
	list, err := client.List(ctx)
	if err != nil {
		return err
	}
	reg, err := openRegistry(ctx, b, "")
	if err != nil {
		return err
	}
	var held []placement.ReservationRef
	for _, r := range list.Records {
		if r.Unconfirmed == "" || r.Namespace == "" {
			continue
		}
		if stands, err := reg.of(r.Namespace).stands(ctx, r.ID); err != nil {
			return err
		} else if stands {
			held = append(held, placement.ReservationRef{ID: r.ID, Token: r.Token})
		}
	}
	if len(held) == 0 {
		return nil
	}
	_, err = client.Confirm(ctx, held)
	return err
}

// stands reports whether a role or a driver of the namespace still holds a reservation.
func (g registry) stands(ctx context.Context, id string) (bool, error) {
	all, err := g.list(ctx)
	for _, rec := range all {
		own := reservationID(rec)
		named := id == own || strings.HasPrefix(id, own+"-") || slices.ContainsFunc(rec.Held, func(h Held) bool { return h.ID == id })
		if named && (rec.Detached || g.alive(ctx, rec.Owner)) {
			return true, nil
		}
	}
	if err != nil {
		return false, err
	}
	holds, err := g.holds(ctx)
	for _, h := range holds {
		if h.ID == id && g.alive(ctx, h.Owner) {
			return true, nil
		}
	}
	return false, err
}
