package main

import (
	"context"
	"fmt"

	"troupe"
)

// learner is the worker: a plain struct. A worker runs one call at a time, so its fields need no lock.
type learner struct {
	rank int
	name string
	rate float64
	line line
}

type settings struct{ Rate float64 }

// Arguments and results are plain data: exported fields, lists, maps, numbers, text, bytes and tensors.
type (
	point struct{ X, Y float64 }
	line  struct{ Slope, Offset float64 }
)

func (l line) at(x float64) float64 { return l.Slope*x + l.Offset }

// newClass declares the constructor and the methods of a learner, with their default modes.
func newClass() *troupe.Class {
	class := troupe.NewClass("learner", newLearner)
	mode := func(m troupe.Mode) troupe.MethodOptions { return troupe.MethodOptions{Mode: m} }
	troupe.Method(class, "introduce", (*learner).Introduce, mode(troupe.AllToAll))
	troupe.Method(class, "train_step", (*learner).TrainStep, mode(troupe.DPMPCompute))
	troupe.Method(class, "line", (*learner).Line, mode(troupe.OneToAll))
	troupe.Method(class, "load", (*learner).Load, mode(troupe.OneToAllOne))
	troupe.Method(class, "predict", (*learner).Predict, mode(troupe.DPMPDispatchFirst))
	troupe.Method(class, "inspect", (*learner).Inspect, mode(troupe.DPMPDispatchFirstCollectAll))
	troupe.Method(class, "save", (*learner).Save, mode(troupe.RankZero))
	return class.Class
}

func newLearner(_ context.Context, s troupe.Setup) (*learner, error) {
	var cfg settings
	if err := s.DecodeConfig(&cfg); err != nil {
		return nil, err
	}
	return &learner{rank: s.Rank, rate: cfg.Rate}, nil
}

func (l *learner) Introduce(_ context.Context, name string) (string, error) {
	l.name = name
	return fmt.Sprintf("%s is rank %d", name, l.rank), nil
}

// TrainStep is one step of gradient descent on its rows. It returns the loss of each row before the step.
func (l *learner) TrainStep(_ context.Context, rows []point) ([]float64, error) {
	losses := make([]float64, len(rows))
	var slope, offset float64
	for i, p := range rows {
		wrong := l.line.at(p.X) - p.Y
		losses[i] = wrong * wrong
		slope += wrong * p.X
		offset += wrong
	}
	l.line.Slope -= l.rate * slope / float64(len(rows))
	l.line.Offset -= l.rate * offset / float64(len(rows))
	return losses, nil
}

func (l *learner) Line(context.Context, troupe.None) (line, error) { return l.line, nil }

func (l *learner) Load(_ context.Context, to line) (line, error) {
	l.line = to
	return l.line, nil
}

// Predict is called with rows only on the first rank of a replica; on the others xs is empty.
func (l *learner) Predict(_ context.Context, xs []float64) ([]float64, error) {
	ys := make([]float64, len(xs))
	for i, x := range xs {
		ys[i] = l.line.at(x)
	}
	return ys, nil
}

func (l *learner) Inspect(_ context.Context, xs []float64) (string, error) {
	return fmt.Sprintf("%s got %d rows", l.name, len(xs)), nil
}

func (l *learner) Save(context.Context, troupe.None) (string, error) {
	return fmt.Sprintf("%s has y = %.2f x + %.2f", l.name, l.line.Slope, l.line.Offset), nil
}

func mean(lines []line) (out line) {
	for _, l := range lines {
		out.Slope += l.Slope / float64(len(lines))
		out.Offset += l.Offset / float64(len(lines))
	}
	return out
}

func average(values []float64) (out float64) {
	for _, v := range values {
		out += v / float64(len(values))
	}
	return out
}
