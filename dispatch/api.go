package dispatch

import (
	"troupe/bus"
	"troupe/dispatch/plan"
)

// The types and functions of package plan that a caller needs to make a call.
type (
	Mesh     = plan.Mesh
	Axis     = plan.Axis
	RankInfo = plan.RankInfo
	Selector = plan.Selector
	Mode     = plan.Mode
	Custom   = plan.Custom
	Piece    = plan.Piece
	Options  = plan.Options
	Batch    = plan.Batch
)

const (
	TP = plan.TP
	CP = plan.CP
	DP = plan.DP
	PP = plan.PP

	RankZero                    = plan.RankZero
	OneToAll                    = plan.OneToAll
	OneToAllOne                 = plan.OneToAllOne
	AllToAll                    = plan.AllToAll
	DPMPCompute                 = plan.DPMPCompute
	DPMPDispatchFirst           = plan.DPMPDispatchFirst
	DPMPDispatchFirstCollectAll = plan.DPMPDispatchFirstCollectAll

	FirstWins      = plan.FirstWins
	RefuseConflict = plan.RefuseConflict
	MetricsKey     = plan.MetricsKey
)

// Split marks an argument to be cut along its first axis: a list, a tensor, a Batch or a plan.Splitter.
func Split(v any) any { return plan.Split(v) }

// Broadcast marks an argument that every called rank gets whole.
func Broadcast(v any) any { return plan.Broadcast(v) }

// Scatter marks a list with one element for each shard; each receiver gets its element.
func Scatter(list any) any { return plan.Scatter(list) }

// ParseMode returns the mode with that name.
func ParseMode(name string) (Mode, error) { return plan.ParseMode(name) }

// Modes returns all modes.
func Modes() []Mode { return plan.Modes() }

// ParseSelector parses "tp=0,dp=1".
func ParseSelector(text string) (Selector, error) { return plan.ParseSelector(text) }

// Where selects the ranks with that coordinate on the axis.
func Where(axis Axis, index int) Selector { return plan.Where(axis, index) }

func invalid(format string, args ...any) error { return bus.Errorf(bus.CodeInvalid, format, args...) }
