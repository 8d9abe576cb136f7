package report_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/benchmarks/report"
)

const lines = `{"workers":1,"layout":"own","bytes":64,"calls":900,"p50_us":60,"p90_us":70,"p99_us":110,"p999_us":300,"floor_p50_us":50,"floor_p99_us":90,"ratio_p50":1.2}
{"workers":64,"layout":"own","bytes":64,"calls":400,"p50_us":900,"p90_us":1000,"p99_us":1900,"p999_us":2500,"floor_p50_us":800,"ratio_p50":1.125}

{"workers":64,"layout":"own","bytes":4096,"calls":300,"p50_us":1900,"p99_us":3900,"floor_p50_us":1500,"ratio_p50":1.27}
{"of":"another benchmark"}
`

func TestReport(t *testing.T) {
	results, err := report.Read(strings.NewReader(lines))
	require.NoError(t, err)
	require.Len(t, results, 3)
	var page bytes.Buffer
	require.NoError(t, report.Write(&page, report.File{Name: "a <b>.json", Results: results}))
	text := page.String()
	for _, want := range []string{"Latency of a call of N workers", "Distribution at 64 workers", "Throughput against payload size", "bare NATS, own", "a &lt;b&gt;.json", "<svg"} {
		require.Contains(t, text, want)
	}
	for _, alien := range []string{"http://", "https://", "<script", "NaN", "Inf"} {
		require.NotContains(t, strings.ReplaceAll(text, "http://www.w3.org", ""), alien, "the page is self-contained")
	}
	require.NotContains(t, text, "Comparison")
}

func TestComparisonUsesRatios(t *testing.T) {
	a, err := report.Read(strings.NewReader(lines))
	require.NoError(t, err)
	b, err := report.Read(strings.NewReader(strings.ReplaceAll(lines, `"ratio_p50":1.2}`, `"ratio_p50":1.5}`)))
	require.NoError(t, err)
	rows := report.Compare(a, b[:2])
	require.Len(t, rows, 2, "rows of both")
	require.InDelta(t, 25, rows[0].Change, 0.1)
	var page bytes.Buffer
	require.NoError(t, report.Write(&page, report.File{Name: "a", Results: a}, report.File{Name: "b", Results: b}))
	require.Contains(t, page.String(), "&#43;25.0 %")
	require.Contains(t, page.String(), "&#43;0.0 %")
}

func TestReadRefusesWhatIsNoResult(t *testing.T) {
	for text, want := range map[string]string{"": "no results", "{}\n": "no results", "nonsense\n": "line 1 is not a JSON object"} {
		_, err := report.Read(strings.NewReader(text))
		require.ErrorContains(t, err, want)
	}
	require.Error(t, report.Write(&bytes.Buffer{}))
}
