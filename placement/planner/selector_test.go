package planner

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSelectorsMatchLabels(t *testing.T) {
	node := &nodeState{info: &Node{ID: "n1", Labels: map[string]string{"region": "us", "kind": ""}}}
	for text, c := range map[string]struct {
		term  LabelTerm
		holds bool
	}{
		"one of the values":               {LabelTerm{Key: "region", Values: []string{"eu", "us"}}, true},
		"another value":                   {LabelTerm{Key: "region", Values: []string{"eu"}}, false},
		"not one of the values":           {LabelTerm{Key: "region", Values: []string{"us"}, Not: true}, false},
		"not another value":               {LabelTerm{Key: "region", Values: []string{"eu"}, Not: true}, true},
		"not a value of an absent label":  {LabelTerm{Key: "zone", Values: []string{"a"}, Not: true}, true},
		"an empty value":                  {LabelTerm{Key: "kind", Values: []string{""}}, true},
		"an empty value of an absent one": {LabelTerm{Key: "zone", Values: []string{""}}, false},
		"carried":                         {LabelTerm{Key: "region"}, true},
		"not carried":                     {LabelTerm{Key: "zone", Not: true}, true},
		"carried, though it is not":       {LabelTerm{Key: "zone"}, false},
		"the name of the node":            {LabelTerm{Key: NameLabel, Values: []string{"n1"}}, true},
		"another name":                    {LabelTerm{Key: NameLabel, Values: []string{"n1"}, Not: true}, false},
	} {
		require.Equal(t, c.holds, c.term.holds(node.info), text)
	}
}

// A bundle goes to the node of its first alternative that has room, then to the next, and waits where it matches none.
func TestAlternativesAreTakenInTheirOrder(t *testing.T) {
	in := func(region string) Selector { return Selector{{Key: "region", Values: []string{region}}} }
	us, eu := Node{ID: "a", Rank: 0, Labels: map[string]string{"region": "us"}, CPUs: Whole}, Node{ID: "b", Rank: 1, Labels: map[string]string{"region": "eu"}, CPUs: Whole}
	bundle := Bundle{CPUs: Whole, Where: []Selector{in("mars"), in("eu"), in("us")}}
	nowhere := Bundle{CPUs: 1, Where: []Selector{in("mars")}}
	for _, strategy := range []Strategy{Hybrid, Rotate, Pack} {
		var held []Reservation
		for _, want := range []string{"b", "a"} { // the second one waits for no node that is busy
			pl, err := New(Snapshot{Nodes: []Node{us, eu}, Reservations: held})
			require.NoError(t, err)
			plan, err := pl.Plan(Request{Strategy: strategy, Bundles: []Bundle{bundle}})
			require.NoError(t, err)
			require.True(t, plan.Granted, strategy)
			require.Equal(t, want, plan.Workers[0].Node, strategy)
			held = append(held, Reservation{ID: want, Workers: plan.Workers})
			_, err = pl.Plan(Request{Strategy: strategy, Bundles: []Bundle{nowhere}})
			require.ErrorIs(t, err, ErrNoSuchLabel)
			plan, err = pl.Plan(Request{Strategy: strategy, Bundles: []Bundle{nowhere}, AwaitNodes: true})
			require.NoError(t, err)
			require.False(t, plan.Granted)
		}
	}
}
