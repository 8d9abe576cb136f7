// Package report draws the results of `troupe bench fanout --json` as one HTML page that needs nothing else: latency
// against the number of workers beside the floor of bare NATS, the distribution of latencies, throughput against payload
// size, and the comparison of two files.
package report

import (
	"bufio"
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"slices"
	"time"
)

// Result is one line of a file of results. Fields that a line does not have are zero.
type Result struct {
	Workers  int     `json:"workers"`
	Layout   string  `json:"layout"`
	Bytes    int     `json:"bytes"`
	Calls    int     `json:"calls"`
	P50      float64 `json:"p50_us"`
	P90      float64 `json:"p90_us"`
	P99      float64 `json:"p99_us"`
	P999     float64 `json:"p999_us"`
	FloorP50 float64 `json:"floor_p50_us"`
	FloorP99 float64 `json:"floor_p99_us"`
	Ratio    float64 `json:"ratio_p50"`
	Rate     float64 `json:"rate,omitempty"` // calls a second; 0: one after another
	Peer     string  `json:"peer,omitempty"` // whose result it is; empty: Troupe's

	Version string    `json:"version,omitempty"`
	CPUs    int       `json:"cpus,omitempty"`
	At      time.Time `json:"at"`
}

// layout is the layout with the rate, if it is fixed.
func (r Result) layout() string {
	if r.Rate > 0 {
		return fmt.Sprintf("%s, %.4g/s", r.Layout, r.Rate)
	}
	return r.Layout
}

// Row is the layout, the rate and the peer, for the tables of the page.
func (r Result) Row() string {
	if r.Peer != "" {
		return r.Peer + ", " + r.layout()
	}
	return r.layout()
}

// maxLine and maxResults bound what is read of a file.
const (
	maxLine    = 1 << 20
	maxResults = 10_000
)

// Read reads a file of results, one JSON object a line. Lines of other benchmarks are passed over.
func Read(in io.Reader) ([]Result, error) {
	scanner := bufio.NewScanner(in)
	scanner.Buffer(nil, maxLine)
	var all []Result
	for n := 1; scanner.Scan(); n++ {
		line := bytes.TrimSpace(scanner.Bytes())
		if len(line) == 0 {
			continue
		}
		var r Result
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("line %d is not a JSON object: %w; write the file with troupe bench fanout --json", n, err)
		}
		if r.Workers > 0 && r.P50 > 0 {
			all = append(all, r)
		}
		if len(all) > maxResults {
			return nil, fmt.Errorf("more than %d results", maxResults)
		}
	}
	if err := scanner.Err(); err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no results: write the file with troupe bench fanout --json")
	}
	return all, nil
}

// File is a file of results under the name that the page shows.
type File struct {
	Name    string
	Results []Result
}

// Origin says by which version, on how many CPUs and when the results were measured; empty where the file does not.
func (f File) Origin() string {
	first := f.Results[0]
	if first.At.IsZero() {
		return ""
	}
	return fmt.Sprintf("Measured by troupe %s on %d CPUs, %s.", cmp.Or(first.Version, "dev"), first.CPUs, first.At.Format("2006-01-02 15:04 MST"))
}

//go:embed report.html
var pageText string

var page = template.Must(template.New("report").Parse(pageText))

// Write draws the page of one or two files.
func Write(out io.Writer, files ...File) error {
	if len(files) == 0 || len(files) > 2 {
		return fmt.Errorf("a report is of one file or two, not of %d", len(files))
	}
	data := struct {
		Files   []File
		Charts  []chart
		Compare []Comparison
	}{Files: files}
	data.Charts = append(data.Charts, latencyChart(files), distributionChart(files))
	if c, ok := payloadChart(files); ok {
		data.Charts = append(data.Charts, c)
	}
	if len(files) == 2 {
		data.Compare = Compare(files[0].Results, files[1].Results)
	}
	return page.Execute(out, data)
}

// Comparison is the change of one row from one file to the other.
type Comparison struct {
	Workers     int     `json:"workers"`
	Layout      string  `json:"layout"`
	Bytes       int     `json:"bytes"`
	Rate        float64 `json:"rate,omitempty"`
	Before      float64 `json:"before_p50_us"`
	After       float64 `json:"after_p50_us"`
	RatioBefore float64 `json:"before_ratio_p50"`
	RatioAfter  float64 `json:"after_ratio_p50"`
	Change      float64 `json:"change_percent"` // of the ratio to the floor, which takes the machine's mood out of it
}

// Compare matches the rows of two files. Ratios to the floor of the same run are compared, not times: the machine may have
// been busier in one of them.
func Compare(before, after []Result) []Comparison {
	type key struct {
		workers, bytes int
		layout, peer   string
		rate           float64
	}
	old := map[key]Result{}
	for _, r := range before {
		old[key{r.Workers, r.Bytes, r.Layout, r.Peer, r.Rate}] = r
	}
	var out []Comparison
	for _, r := range after {
		was, ok := old[key{r.Workers, r.Bytes, r.Layout, r.Peer, r.Rate}]
		if !ok {
			continue
		}
		c := Comparison{Workers: r.Workers, Bytes: r.Bytes, Layout: r.Layout, Rate: r.Rate, Before: was.P50, After: r.P50, RatioBefore: was.Ratio, RatioAfter: r.Ratio}
		if was.Ratio > 0 {
			c.Change = 100 * (r.Ratio/was.Ratio - 1)
		}
		out = append(out, c)
	}
	slices.SortFunc(out, func(x, y Comparison) int {
		return cmp.Or(cmp.Compare(x.Layout, y.Layout), cmp.Compare(x.Bytes, y.Bytes), cmp.Compare(x.Workers, y.Workers))
	})
	return out
}
