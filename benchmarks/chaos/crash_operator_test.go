package chaos

import (
	"context"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/placement"
)

// operator cordons and uncordons, and sets and removes quotas.
type operator struct {
	m      *Model
	client *placement.Client
	places [][2]string // node, device
}

func newOperator(t *testing.T, m *Model, b *bus.Bus) *operator {
	client, err := placement.NewClient(b, "")
	require.NoError(t, err)
	all, err := client.Nodes(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 2)
	return &operator{m: m, client: client, places: [][2]string{
		{all[1].Report.Node, ""}, {all[0].Report.Node, all[0].Report.Devices[1].UUID}, {all[0].Report.Node, all[0].Report.Devices[2].UUID},
	}}
}

func (o *operator) close() { o.client.Close() }

func (o *operator) step(ctx context.Context, rng *rand.Rand) {
	ctx, cancel := limited(ctx, rng)
	defer cancel()
	if rng.IntN(3) == 0 {
		o.quota(ctx, rng)
		return
	}
	at := o.places[rng.IntN(len(o.places))]
	key := "cordon/" + at[0] + "/" + at[1]
	value, certain := o.m.Value(key)
	if !certain {
		return
	}
	next := absent
	var err error
	if value == absent {
		next = "why" + strconv.Itoa(rng.IntN(1_000_000))
		_, err = o.client.Cordon(ctx, placement.Cordon{Node: at[0], Device: at[1], By: "chaos", Why: next})
	} else {
		_, err = o.client.Uncordon(ctx, at[0], at[1])
	}
	o.tell(key, next, err)
}

func (o *operator) quota(ctx context.Context, rng *rand.Rand) {
	if _, certain := o.m.Value("rules"); !certain {
		return
	}
	var rules placement.Rules
	if rng.IntN(2) == 0 {
		rules.Quotas = map[string]placement.Share{"other" + strconv.Itoa(rng.IntN(1000)): placement.Wholes(1 + rng.IntN(100))}
	}
	o.tell("rules", rulesText(rules), o.client.SetRules(ctx, rules))
}

func (o *operator) tell(key, value string, err error) {
	o.m.Logf("%s becomes %q: %v", key, value, err)
	if err == nil {
		o.m.Set(key, value)
	} else {
		o.m.Maybe(key, value)
	}
}
