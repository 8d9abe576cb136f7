package pipeline

import (
	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

// The declaration of a pipeline and the values that travel through it, under the names that programs use.
type (
	Spec        = spec.Spec
	StreamSpec  = spec.StreamSpec
	StageSpec   = spec.StageSpec
	GroupSpec   = spec.GroupSpec
	StaleSpec   = spec.StaleSpec
	FullPolicy  = spec.FullPolicy
	StalePolicy = spec.StalePolicy
	Style       = spec.Style
	Func        = spec.Func
	Item        = spec.Item
	Out         = spec.Out
	Version     = spec.Version

	DeadLetter   = flow.DeadLetter
	Failure      = flow.Failure
	StageStatus  = flow.StageStatus
	StreamStatus = flow.StreamStatus
)

const (
	Block      = spec.Block
	Refuse     = spec.Refuse
	DropOldest = spec.DropOldest

	Drop     = spec.Drop
	Requeue  = spec.Requeue
	HandOver = spec.HandOver

	Bodies = spec.Bodies
	Items  = spec.Items

	MaxBody = spec.MaxBody
)

// VersionOf rounds to the nearest millionth.
func VersionOf(v float64) Version { return spec.VersionOf(v) }
