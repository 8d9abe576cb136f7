package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/pipeline"
	"troupe/placement"
	"troupe/roles"
)

const lookLimit = 20 * time.Second

// observer sees what any user could see: reservations, cordons, rules, roles, leases, items and dead letters.
type observer struct {
	m       *Model
	b       *bus.Bus
	op      *placement.Client
	drivers []*roles.Runtime
	moves   *pipeline.Client
}

func newObserver(t *testing.T, m *Model, b *bus.Bus) *observer {
	o := &observer{m: m, b: b}
	var err error
	o.op, err = placement.NewClient(b, "")
	require.NoError(t, err)
	for i := range 3 {
		rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Namespace: namespaceOf(i), Name: "observer"})
		require.NoError(t, err)
		o.drivers = append(o.drivers, rt)
	}
	o.moves, err = pipeline.Connect(b, pipeNamespace, pipeName)
	require.NoError(t, err)
	return o
}

func (o *observer) close() {
	for _, rt := range o.drivers {
		_ = rt.Close(context.Background()) // the server may be gone
	}
	o.op.Close()
}

// look is everything that is visible, by the keys of the model.
func (o *observer) look(ctx context.Context) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	seen := map[string]string{}
	for _, part := range []func(context.Context, map[string]string) error{o.leases, o.ledger, o.nodes, o.rules, o.roles, o.items} {
		if err := part(ctx, seen); err != nil {
			return nil, err
		}
	}
	return seen, nil
}

// ledger is the reservations. Those of roles go by the role's name.
func (o *observer) ledger(ctx context.Context, seen map[string]string) error {
	list, err := o.op.List(ctx)
	for _, r := range list.Records {
		if r.Holder == directHolder {
			seen["ledger/"+r.ID] = strconv.FormatUint(r.Token, 10)
		} else {
			seen["held/"+r.Namespace+"/"+r.Holder] = r.ID
		}
	}
	return err
}

func (o *observer) nodes(ctx context.Context, seen map[string]string) error {
	all, err := o.op.Nodes(ctx)
	for _, n := range all {
		for _, c := range n.Cordons {
			seen["cordon/"+n.Report.Node+"/"+c.Device] = c.Why
		}
	}
	return err
}

func (o *observer) rules(ctx context.Context, seen map[string]string) error {
	rules, err := o.op.Rules(ctx)
	if err == nil {
		seen["rules"] = rulesText(rules)
	}
	return err
}

// rulesText is the rules as a value of the model; no quota at all is absent.
func rulesText(r placement.Rules) string {
	if len(r.Quotas) == 0 {
		return absent
	}
	text, _ := json.Marshal(r.Quotas) // numbers by name
	return string(text)
}

func (o *observer) roles(ctx context.Context, seen map[string]string) error {
	for i, rt := range o.drivers {
		all, err := rt.Roles(ctx)
		if err != nil {
			return err
		}
		for _, r := range all {
			seen["role/"+namespaceOf(i)+"/"+r.Name] = r.Incarnation
		}
	}
	return nil
}

// leases are those of the drivers that the model knows.
func (o *observer) leases(ctx context.Context, seen map[string]string) error {
	bucket, err := kv.Open(ctx, o.b, kv.Config{Bucket: "troupe_leases", Leases: true})
	if err != nil {
		return err
	}
	entries, err := bucket.List(ctx, "")
	for _, e := range entries {
		_, session, ok := strings.Cut(e.Key, ".driver.") // beside them are the head's proofs that a driver is dead
		if key := "lease/" + session; ok && o.m.Known(key) {
			seen[key] = "held"
		}
	}
	return err
}

// items is the items of the pipeline that lie in its sink or among its dead letters.
func (o *observer) items(ctx context.Context, seen map[string]string) error {
	dead, err := o.moves.Dead(ctx, false)
	if errors.Is(err, bus.ErrNotFound) {
		return nil // nobody has opened it
	}
	if err != nil {
		return err
	}
	for _, d := range dead {
		seen["item/"+d.ID] = inDead
	}
	st, err := o.moves.Status(ctx)
	if err != nil || st.Streams[1].Items == 0 {
		return err
	}
	loan, err := o.moves.Claim(ctx, "out", 100)
	if err != nil || loan == nil {
		return err
	}
	for _, it := range loan.Items {
		seen["item/"+it.ID] = inSink
	}
	return loan.Nak(ctx)
}
