package bus

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestBundlesComeApart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		frames := rapid.SliceOf(rapid.SliceOf(rapid.Byte())).Draw(t, "frames")
		var body []byte
		for _, f := range frames {
			body = append(binary.BigEndian.AppendUint32(body, uint32(len(f))), f...)
		}
		var got [][]byte
		require.True(t, splitBundle(body, func(f []byte) { got = append(got, append([]byte{}, f...)) }))
		require.Equal(t, len(frames), len(got))
		for i := range frames {
			require.Equal(t, string(frames[i]), string(got[i]))
		}
		if cut := rapid.IntRange(0, len(body)).Draw(t, "cut"); cut < len(body) {
			n := 0
			whole := splitBundle(body[:cut], func([]byte) { n++ })
			require.Less(t, n, len(frames))
			at := 0
			for _, f := range frames[:n] {
				at += 4 + len(f)
			}
			require.Equal(t, at == cut, whole, "a bundle that is cut off says so")
		}
	})
	require.False(t, splitBundle([]byte{0xff, 0xff, 0xff, 0xff}, func([]byte) { t.Fatal("nothing is there") }))
}
