package wire

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
	"pgregory.net/rapid"
)

type recordPart struct {
	Name  string        `msgpack:"name"`
	Count int           `msgpack:"count,omitempty"`
	Wait  time.Duration `msgpack:"wait,omitempty"`
}

type record struct {
	ID     uint64            `msgpack:"id"`
	Rank   int32             `msgpack:"rank"`
	Score  float64           `msgpack:"score"`
	On     bool              `msgpack:"on"`
	Data   []byte            `msgpack:"data,omitempty"`
	Parts  []recordPart      `msgpack:"parts"`
	Labels map[string]string `msgpack:"labels,omitempty"`
	Value  Raw               `msgpack:"value,omitempty"`
	Next   *recordPart       `msgpack:"next,omitempty"`
	At     time.Time         `msgpack:"at"`
}

// Records and values are two encoders of one format: both decoders read both, and with at most one label the bytes agree.
func TestRecordEqualsMarshal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		part := rapid.Custom(func(t *rapid.T) recordPart {
			return recordPart{rapid.String().Draw(t, "name"), rapid.Int().Draw(t, "count"), time.Duration(rapid.Int64().Draw(t, "wait"))}
		})
		in := record{
			ID: rapid.Uint64().Draw(t, "id"), Rank: rapid.Int32().Draw(t, "rank"), Score: rapid.Float64().Draw(t, "score"),
			On: rapid.Bool().Draw(t, "on"), Parts: rapid.SliceOfN(part, 1, 5).Draw(t, "parts"),
			Data:  rapid.SliceOfN(rapid.Byte(), 1, 300).Draw(t, "data"),
			Value: mustRaw(t, rapid.Int().Draw(t, "value")), Next: &recordPart{Name: "next"},
			At: time.Unix(rapid.Int64Range(0, 1<<40).Draw(t, "s"), rapid.Int64Range(0, 999999999).Draw(t, "ns")).UTC(),
		}
		if label := rapid.String().Draw(t, "label"); label != "" {
			in.Labels = map[string]string{label: label}
		}
		ours, err := Marshal(in)
		require.NoError(t, err)
		theirs, err := MarshalRecord(in)
		require.NoError(t, err)
		require.Equal(t, ours, theirs)
		var back, again record
		require.NoError(t, UnmarshalRecord(ours, &back))
		require.NoError(t, Unmarshal(theirs, &again))
		back.At = back.At.UTC()
		require.Equal(t, in, back)
		require.Equal(t, in, again)
	})
}

func mustRaw(t *rapid.T, v any) Raw {
	b, err := Marshal(v)
	require.NoError(t, err)
	return b
}

func TestRecordRefusals(t *testing.T) {
	for name, body := range map[string][]byte{
		"empty":     nil,
		"cut off":   {0x81, 0xa2, 'i', 'd'},
		"bomb":      {0x81, 0xa5, 'p', 'a', 'r', 't', 's', 0xdd, 0xff, 0xff, 0xff, 0xff},
		"too deep":  append(append([]byte{0x81, 0xa1, 'x'}, repeated(0x91, 200)...), 1),
		"more than": {0x80, 0x80},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, UnmarshalRecord(body, new(record)), ErrMalformed)
		})
	}
	require.ErrorIs(t, UnmarshalRecord([]byte{0x81, 0xa2, 'i', 'd', 0xa1, 'x'}, new(record)), ErrRefused)
	_, err := MarshalRecord(struct{ C chan int }{make(chan int)})
	require.ErrorIs(t, err, ErrInvalid)
	_, err = MarshalRecord(record{Value: Raw{0x92, 1}})
	require.ErrorIs(t, err, ErrInvalid)
}

func repeated(b byte, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = b
	}
	return out
}

// kelvin has the methods of vmihailenco/msgpack.
type kelvin float64

func (k kelvin) EncodeMsgpack(e *msgpack.Encoder) error {
	if k < 0 {
		return fmt.Errorf("%v is below zero", float64(k))
	}
	return e.EncodeMulti("K", float64(k))
}

func (k *kelvin) DecodeMsgpack(d *msgpack.Decoder) error {
	var unit string
	if err := d.DecodeMulti(&unit, (*float64)(k)); err != nil {
		return err
	}
	return nil
}

// celsiusPair is one array, so that it is one value.
type celsiusPair struct{ Low, High float64 }

func (p celsiusPair) EncodeMsgpack(e *msgpack.Encoder) error {
	if p.Low > p.High {
		return fmt.Errorf("%v is above %v", p.Low, p.High)
	}
	return e.Encode([]float64{p.Low, p.High})
}

func (p *celsiusPair) DecodeMsgpack(d *msgpack.Decoder) error {
	var pair []float64
	if err := d.Decode(&pair); err != nil {
		return err
	}
	p.Low, p.High = pair[0], pair[1]
	return nil
}

func TestLibraryCustomTypes(t *testing.T) {
	in := map[string][]celsiusPair{"a": {{1, 2}, {-3, 4}}}
	b := mustMarshal(t, in)
	require.Equal(t, map[string]any{"a": []any{[]any{1.0, 2.0}, []any{-3.0, 4.0}}}, decodeAny(t, b))
	var out map[string][]celsiusPair
	require.NoError(t, Unmarshal(b, &out))
	require.Equal(t, in, out)
	_, err := Marshal(in["a"][:0:0])
	require.NoError(t, err)
	_, err = Marshal([]celsiusPair{{2, 1}})
	require.ErrorContains(t, err, "[0]: wire.celsiusPair: 2 is above 1")
	require.ErrorIs(t, err, ErrInvalid)
	err = Unmarshal(mustMarshal(t, []any{"text"}), new([]celsiusPair))
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "[0]: wire.celsiusPair: ")
	_, err = Marshal([]kelvin{1})
	require.ErrorContains(t, err, "9 bytes follow the value", "two values in the place of one are refused")
}
