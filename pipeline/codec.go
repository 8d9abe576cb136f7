package pipeline

import (
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/pipeline/spec"
)

// MarshalItems encodes items as a method with the style "item" receives a group: a list of maps. It is for functions in
// another language.
func MarshalItems(items []spec.Item) (wire.Raw, error) {
	out := make([]wireItem, len(items))
	for i := range items {
		out[i] = toWire(&items[i])
		if len(out[i].Body) == 0 {
			out[i].Body = wire.Raw{0xc0}
		}
	}
	body, err := wire.Marshal(out)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInvalid, "the bodies of items must be msgpack (wire.Marshal): %w", err)
	}
	return body, nil
}

// UnmarshalOuts decodes the outputs of such a function: a list of maps, with "to" if there are several outputs.
func UnmarshalOuts(body []byte) ([]spec.Out, error) {
	var all []wireItem
	if err := wire.Unmarshal(body, &all); err != nil {
		return nil, bus.Errorf(bus.CodeMalformed, "decode the outputs of a handler: %w", err)
	}
	outs := make([]spec.Out, len(all))
	for i, w := range all {
		outs[i] = spec.Out{To: w.To, Item: w.item()}
	}
	return outs, nil
}
