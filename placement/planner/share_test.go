package planner

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestParseShare(t *testing.T) {
	for text, want := range map[string]Share{
		"0": 0, "1": 1000, "8": 8000, "0.5": 500, "0.001": 1, "2.125": 2125, "0.500000": 500, " 4 ": 4000, "3.": 3000, "1048576": maxShare,
	} {
		got, err := ParseShare(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
}

func TestParseShareRefuses(t *testing.T) {
	for text, says := range map[string]string{
		"-1":                    "-1",
		"-0.5":                  "negative",
		"0.0005":                "thousandths",
		"1.2345":                "1.2345",
		"":                      "decimal",
		".5":                    "decimal",
		"1e3":                   "1e3",
		"0x10":                  "0x10",
		"NaN":                   "NaN",
		"1048577":               "maximum",
		"99999999999999999999":  "maximum",
		"0.1.2":                 "0.1.2",
		"1,5":                   "1,5",
		"half of one":           "half",
		"١":                     "decimal",
		"0.00000000000000000_1": "decimal",
	} {
		_, err := ParseShare(text)
		require.ErrorIs(t, err, ErrBadShare, text)
		require.ErrorContains(t, err, says, text)
	}
}

func TestNoShareIsChangedByWritingIt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Share(rapid.Int64Range(0, int64(maxShare)).Draw(t, "share"))
		again, err := ParseShare(s.String())
		require.NoError(t, err)
		require.Equal(t, s, again)

		text, err := json.Marshal(Bundle{Devices: s})
		require.NoError(t, err)
		var b Bundle
		require.NoError(t, json.Unmarshal(text, &b))
		require.Equal(t, s, b.Devices)
	})
}

func TestShareInJSON(t *testing.T) {
	text, err := json.Marshal(Bundle{Devices: 500, CPUs: Wholes(2)})
	require.NoError(t, err)
	require.JSONEq(t, `{"devices":0.5,"cpus":2}`, string(text))
	require.Error(t, json.Unmarshal([]byte(`{"devices":0.0001}`), &Bundle{}))
}
