package roles

import (
	"context"
	"slices"
	"strings"

	"troupe/bus"
	"troupe/placement"
)

// ConfirmReservations tells the placement service which of its unconfirmed reservations are in use: by a role whose
// driver lives or that is detached, or by a live driver itself. The service drops the others unless workers run on
// them. A head calls it every few seconds; without unconfirmed reservations it costs one request.
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
	var held []placement.Holding
	for _, r := range list.Records {
		if r.Unconfirmed == "" || r.Namespace == "" {
			continue
		}
		if stands, err := reg.of(r.Namespace).stands(ctx, r.ID); err != nil {
			return err
		} else if stands {
			held = append(held, placement.Holding{ID: r.ID, Token: r.Token})
		}
	}
	if len(held) == 0 {
		return nil
	}
	_, err = client.Confirm(ctx, held)
	return err
}

// stands reports whether a role or a driver of the namespace uses a reservation.
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
