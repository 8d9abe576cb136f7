package pipeline

import (
	"troupe/bus"
	"troupe/bus/wire"
)

// MarshalItems writes items as a method with the style "item" gets a group of them: a list of maps. It is for functions
// that run in another language.
func MarshalItems(items []Item) (wire.Raw, error) {
	out := make([]wireItem, len(items))
	for i := range items {
		out[i] = toWire(&items[i])
		if len(out[i].Body) == 0 {
			out[i].Body = wire.Raw{0xc0}
		}
	}
	body, err := wire.Marshal(out)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInvalid, "the bodies of items must be msgpack (bus.Marshal): %w", err)
	}
	return body, nil
}

// UnmarshalOuts reads what such a function gives: a list of maps, with "to" where there are several outputs.
func UnmarshalOuts(body []byte) ([]Out, error) {
	var all []wireItem
	if err := wire.Unmarshal(body, &all); err != nil {
		return nil, bus.Errorf(bus.CodeMalformed, "what a handler gave cannot be read: %w", err)
	}
	outs := make([]Out, len(all))
	for i, w := range all {
		outs[i] = Out{To: w.To, Item: w.item()}
	}
	return outs, nil
}
