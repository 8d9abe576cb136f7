package main_test

import (
	"context"
	"fmt"
	"log"

	"troupe/actors"
	"troupe/dispatch"
	"troupe/roles"
)

// Judge is a worker: one of these lives on every rank.
type Judge struct{ rank int }

// Score gets this replica's share of the texts.
func (j *Judge) Score(ctx context.Context, texts []string) ([]string, error) {
	scores := make([]string, len(texts))
	for i, text := range texts {
		scores[i] = fmt.Sprintf("%s=%d by rank %d", text, len(text), j.rank)
	}
	return scores, nil
}

func Example_readme() {
	judge := actors.NewClass("judge", func(ctx context.Context, s actors.Setup) (*Judge, error) { return &Judge{rank: s.Rank}, nil })
	actors.Method(judge, "score", (*Judge).Score, actors.MethodOptions{Mode: string(dispatch.DPMPCompute)})

	ctx := context.Background()
	rt, err := roles.Open(ctx, roles.Config{Classes: []*actors.Class{judge.Class}}) // no server named: a private one, in here
	if err != nil {
		log.Fatal(err)
	}
	defer rt.Close(ctx) // takes down what this program created

	reward, err := rt.Create(ctx, roles.Spec{Name: "reward", Class: "judge", World: 4, Mesh: dispatch.Mesh{DP: 2, TP: 2}})
	if err != nil {
		log.Fatal(err)
	}
	scores, err := roles.Call[[]string](ctx, reward, "score", []string{"a", "few", "short", "texts", "."})
	if err != nil {
		log.Fatal(err) // which rank, on which node, what kind of failure, with the worker's stack
	}
	for _, s := range scores {
		fmt.Println(s)
	}
	// Output:
	// a=1 by rank 0
	// few=3 by rank 0
	// short=5 by rank 0
	// texts=5 by rank 2
	// .=1 by rank 2
}
