package roles

import (
	"context"
	"strings"

	"troupe/bus"
)

// All lists the roles of every namespace, by key. An operator's tools use it; a driver sees its own namespace alone.
func All(ctx context.Context, b *bus.Bus) ([]Record, error) {
	reg, err := openRegistry(ctx, b, "")
	if err != nil {
		return nil, err
	}
	entries, err := reg.kv.List(ctx, "")
	if err != nil {
		return nil, err
	}
	all := []Record{}
	for _, e := range entries {
		namespace, rest, _ := strings.Cut(e.Key, ".")
		if !strings.HasPrefix(rest, roleKey("")) || bus.CheckName("namespace", namespace) != nil {
			continue
		}
		if r, err := decodeRecord(e); err == nil { // a record of a later version is not for this one to show
			all = append(all, r)
		}
	}
	return all, nil
}
