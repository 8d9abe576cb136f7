// Package wire defines the bytes of messages: frames with their envelope (Frame, Header), the values in their bodies
// (Marshal and Unmarshal: msgpack with tensors as an extension), the arguments of a call (Args), records of Troupe's own
// protocols (MarshalRecord and UnmarshalRecord), and errors (Error, Code). It does no I/O and imports no public package of
// Troupe. docs/wire.md describes the format, and the fixtures in testdata pin it for Go and Python.
//
//	body, err := wire.Marshal(map[string]any{"loss": 0.5})
//	frame := wire.Frame{Kind: wire.KindAnswer, Header: wire.Header{Seq: 7, Rank: 3}, Body: body}
//	message := frame.Append(nil)
//	again, err := wire.ParseFrame(message)
package wire
