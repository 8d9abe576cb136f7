package planner

import (
	"fmt"
	"slices"
	"strings"

	"troupe/placement/internal/text"
)

// Strategy says how the bundles of a gang lie on the nodes.
type Strategy string

const (
	Pack         Strategy = "PACK"          // on as few nodes as possible; the default
	Spread       Strategy = "SPREAD"        // as evenly over the nodes as possible
	StrictPack   Strategy = "STRICT_PACK"   // on one node, or not at all
	StrictSpread Strategy = "STRICT_SPREAD" // no two on one node, or not at all
)

var strategies = []Strategy{Pack, Spread, StrictPack, StrictSpread}

// ParseStrategy reads the name of a strategy. Nothing is PACK.
func ParseStrategy(input string) (Strategy, error) {
	if input == "" {
		return Pack, nil
	}
	if s := Strategy(input); slices.Contains(strategies, s) {
		return s, nil
	}
	names := make([]string, len(strategies))
	for i, s := range strategies {
		names[i] = string(s)
	}
	return "", &RequestError{
		Problem: ErrUnknownStrategy,
		Wrong:   fmt.Sprintf("strategy %q is unknown", text.Clip(input)),
		Exists:  "there are " + strings.Join(names, ", "),
	}
}
