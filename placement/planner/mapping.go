package planner

import (
	"fmt"
	"strconv"
	"strings"

	"troupe/placement/internal/text"
)

// Mapping assigns exactly these devices, in this order, to World workers, the same number to each. A device id is node
// rank × devices per node + index. In a request that is colocated with a reservation, the ids count over the nodes of
// that reservation.
//
// Workers of a mapping without devices are placed on the nodes in turn.
type Mapping struct {
	World   int   `json:"world" msgpack:"world"`
	Devices []int `json:"devices,omitempty" msgpack:"devices,omitempty"`
}

const (
	maxMappingText = 1 << 20 // bytes
	maxMappingIDs  = 1 << 18 // bounds the memory that a short text can cause
	maxMappingID   = 1 << 30

	mappingForms = "a mapping is list(range(a,b)), a sum of those, list([a,b,c]) or [a,b,c]"
)

// ParseMapping parses a device mapping: list(range(a,b)), list([a,b,c]), [a,b,c], and sums of these. It evaluates
// nothing else. A range may have a single bound or a positive step, as in Python.
func ParseMapping(input string) ([]int, error) {
	if len(input) > maxMappingText {
		return nil, &RequestError{ErrBadMapping, fmt.Sprintf("a mapping of %d bytes is too long", len(input)), fmt.Sprintf("the maximum is %d", maxMappingText)}
	}
	p := mappingParser{text: input}
	if err := p.sum(); err != nil {
		return nil, err
	}
	if len(p.ids) == 0 {
		return nil, &RequestError{ErrBadMapping, fmt.Sprintf("mapping %q names no device", text.Clip(input)), mappingForms}
	}
	return p.ids, nil
}

// mappingParser parses sum = term {"+" term} into ids.
type mappingParser struct {
	text string
	pos  int
	ids  []int
}

func (p *mappingParser) sum() error {
	for {
		if err := p.term(); err != nil {
			return err
		}
		if !p.accept("+") {
			break
		}
	}
	if p.skipSpace(); p.pos < len(p.text) {
		return p.unexpected("the end")
	}
	return nil
}

// term parses "[" numbers "]" or "list" "(" ("range" "(" bounds ")" | "[" numbers "]") ")".
func (p *mappingParser) term() error {
	if p.accept("[") {
		return p.list()
	}
	if !p.accept("list") {
		return p.unexpected("list(…) or [")
	}
	if !p.accept("(") {
		return p.unexpected("(")
	}
	var err error
	switch {
	case p.accept("["):
		err = p.list()
	case p.accept("range"):
		err = p.rangeBounds()
	default:
		err = p.unexpected("range(…) or [")
	}
	if err != nil {
		return err
	}
	if !p.accept(")") {
		return p.unexpected(")")
	}
	return nil
}

// list parses what follows a "[": ids up to the "]", with an optional comma after the last.
func (p *mappingParser) list() error {
	for !p.accept("]") {
		id, err := p.number()
		if err != nil {
			return err
		}
		if err := p.append(id, id+1, 1); err != nil {
			return err
		}
		if p.accept("]") {
			return nil
		}
		if !p.accept(",") {
			return p.unexpected(", or ]")
		}
	}
	return nil
}

// rangeBounds parses "(" [start ","] stop ["," step] ")".
func (p *mappingParser) rangeBounds() error {
	if !p.accept("(") {
		return p.unexpected("(")
	}
	var bounds []int
	for {
		n, err := p.number()
		if err != nil {
			return err
		}
		bounds = append(bounds, n)
		if len(bounds) == 3 || !p.accept(",") {
			break
		}
	}
	if !p.accept(")") {
		return p.unexpected(")")
	}
	switch len(bounds) {
	case 1:
		return p.append(0, bounds[0], 1)
	case 2:
		return p.append(bounds[0], bounds[1], 1)
	}
	if bounds[2] == 0 {
		return &RequestError{ErrBadMapping, "a range with step 0 has no end", "a step is positive"}
	}
	return p.append(bounds[0], bounds[1], bounds[2])
}

// append adds start, start+step, … below stop. It checks the number of ids first.
func (p *mappingParser) append(start, stop, step int) error {
	n := 0
	if stop > start {
		n = (stop - start + step - 1) / step
	}
	if len(p.ids)+n > maxMappingIDs {
		return &RequestError{ErrBadMapping, fmt.Sprintf("a mapping of %d devices is too long", len(p.ids)+n), fmt.Sprintf("the maximum is %d", maxMappingIDs)}
	}
	for id := start; id < stop; id += step {
		p.ids = append(p.ids, id)
	}
	return nil
}

func (p *mappingParser) number() (int, error) {
	p.skipSpace()
	start := p.pos
	for p.pos < len(p.text) && p.text[p.pos] >= '0' && p.text[p.pos] <= '9' {
		p.pos++
	}
	if p.pos == start {
		return 0, p.unexpected("a device id, from 0 up")
	}
	n, err := strconv.Atoi(p.text[start:p.pos])
	if err != nil || n > maxMappingID {
		return 0, &RequestError{ErrBadMapping, fmt.Sprintf("device %s is out of range", text.Clip(p.text[start:p.pos])), fmt.Sprintf("the largest id is %d", maxMappingID)}
	}
	return n, nil
}

func (p *mappingParser) accept(token string) bool {
	p.skipSpace()
	if !strings.HasPrefix(p.text[p.pos:], token) {
		return false
	}
	p.pos += len(token)
	return true
}

func (p *mappingParser) skipSpace() {
	for p.pos < len(p.text) && strings.IndexByte(" \t\r\n", p.text[p.pos]) >= 0 {
		p.pos++
	}
}

// unexpected returns the error for the input at the current position.
func (p *mappingParser) unexpected(wanted string) error {
	found := "the end"
	if p.pos < len(p.text) {
		found = strconv.Quote(text.Clip(p.text[p.pos:]))
	}
	return &RequestError{
		Problem: ErrBadMapping,
		Detail:  fmt.Sprintf("mapping, at byte %d: found %s where %s should be", p.pos, found, wanted),
		Hint:    mappingForms,
	}
}
