package report

import (
	"cmp"
	"fmt"
	"html/template"
	"maps"
	"math"
	"slices"
	"strings"
)

// chart is a drawing with logarithmic axes and its numbers as text for those who do not see it.
type chart struct {
	Title string
	SVG   template.HTML // made here, of numbers and escaped words
	Note  string
}

// series is one line of a chart.
type series struct {
	name   string
	dashed bool
	points []point
}

type point struct{ x, y float64 }

// The colours are told apart by people with the common kinds of colour blindness, on light and on dark ground.
var colours = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#a0522d"}

const (
	chartWidth, chartHeight          = 720, 400
	left, right, top, bottom         = 70, 20, 16, 48
	plotWidth, plotHeight    float64 = chartWidth - left - right, chartHeight - top - bottom
)

// latencyChart draws p50 and the floor against the number of workers.
func latencyChart(files []File) chart {
	lines := map[string]*series{}
	add := func(name string, dashed bool, x, y float64) {
		if x <= 0 || y <= 0 {
			return
		}
		if lines[name] == nil {
			lines[name] = &series{name: name, dashed: dashed}
		}
		lines[name].points = append(lines[name].points, point{x, y})
	}
	least := smallestPayload(files)
	for _, f := range files {
		for _, r := range f.Results {
			if r.Bytes != least {
				continue
			}
			add(label(files, f, who(r)+", "+r.layout()), false, float64(r.Workers), r.P50)
			add(label(files, f, "bare NATS, "+r.layout()), true, float64(r.Workers), r.FloorP50)
		}
	}
	return chart{
		Title: "Latency of a call of N workers", SVG: draw(sorted(lines), "workers", "p50, µs", count, micros),
		Note: fmt.Sprintf("Median time until all answers are in, for payloads of %d bytes. Dashed: the same publish and gather written with bare nats.go, in turns in the same run.", least),
	}
}

// distributionChart draws the quantiles of each row of the largest number of workers.
func distributionChart(files []File) chart {
	lines := map[string]*series{}
	most := 0
	for _, f := range files {
		for _, r := range f.Results {
			most = max(most, r.Workers)
		}
	}
	for _, f := range files {
		for _, r := range f.Results {
			if r.Workers != most {
				continue
			}
			name := label(files, f, fmt.Sprintf("%s, %s, %s", who(r), r.layout(), bytesText(float64(r.Bytes))))
			s := &series{name: name}
			for _, q := range []point{{0.5, r.P50}, {0.9, r.P90}, {0.99, r.P99}, {0.999, r.P999}} {
				if q.y > 0 {
					s.points = append(s.points, point{1 / (1 - q.x), q.y})
				}
			}
			lines[name] = s
		}
	}
	quantile := func(v float64) string { return fmt.Sprintf("p%.4g", 100*(1-1/v)) }
	return chart{
		Title: "Distribution at " + workersText(most), SVG: draw(sorted(lines), "quantile", "µs", quantile, micros),
		Note: "How much slower the slowest calls are than the median: a flat line is a steady one.",
	}
}

// payloadChart draws throughput against payload size, where a file has several sizes.
func payloadChart(files []File) (chart, bool) {
	lines := map[string]*series{}
	sizes := map[int]bool{}
	for _, f := range files {
		for _, r := range f.Results {
			sizes[r.Bytes] = true
			name := label(files, f, fmt.Sprintf("%s, %s, %s", who(r), workersText(r.Workers), r.layout()))
			if lines[name] == nil {
				lines[name] = &series{name: name}
			}
			perSecond := 2 * float64(r.Bytes) * float64(r.Workers) / (r.P50 / 1e6)
			lines[name].points = append(lines[name].points, point{float64(r.Bytes), perSecond / 1e6})
		}
	}
	return chart{
		Title: "Throughput against payload size", SVG: draw(sorted(lines), "bytes", "MB/s", bytesText, count),
		Note: "Bytes of arguments and answers that pass in a second of calls one after another.",
	}, len(sizes) > 1
}

func workersText(n int) string {
	if n == 1 {
		return "1 worker"
	}
	return fmt.Sprintf("%d workers", n)
}

func who(r Result) string { return cmp.Or(r.Peer, "Troupe") }

// label names the file too where there are two.
func label(files []File, f File, name string) string {
	if len(files) == 1 {
		return name
	}
	return f.Name + ": " + name
}

func smallestPayload(files []File) int {
	least := math.MaxInt
	for _, f := range files {
		for _, r := range f.Results {
			least = min(least, r.Bytes)
		}
	}
	return least
}

func sorted(lines map[string]*series) []series {
	var out []series
	for _, name := range slices.Sorted(maps.Keys(lines)) {
		s := *lines[name]
		slices.SortFunc(s.points, func(a, b point) int { return cmp.Compare(a.x, b.x) })
		out = append(out, s)
	}
	return out
}

// axis maps values to a length on a logarithmic scale.
type axis struct{ low, high float64 }

func axisOf(values []float64) axis {
	if len(values) == 0 {
		return axis{1, 10}
	}
	low, high := slices.Min(values), slices.Max(values)
	if high <= low*1.01 {
		low, high = low/2, high*2
	}
	return axis{low, high}
}

// at is where a value lies, from 0 to 1.
func (a axis) at(v float64) float64 { return math.Log(v/a.low) / math.Log(a.high/a.low) }

// ticks are powers of ten in the range, or halves between them where there are few, and the ends where there are none.
func (a axis) ticks() []float64 {
	var out []float64
	for _, steps := range [][]float64{{1}, {1, 3}, {1, 2, 5}} {
		out = nil
		for e := math.Floor(math.Log10(a.low)); e <= math.Ceil(math.Log10(a.high)); e++ {
			for _, m := range steps {
				if v := m * math.Pow(10, e); v >= a.low*0.999 && v <= a.high*1.001 {
					out = append(out, v)
				}
			}
		}
		if len(out) >= 3 {
			return out
		}
	}
	return []float64{a.low, a.high}
}

// minTickGap is the least distance of two ticks, as a share of the axis.
const minTickGap = 0.06

// ticksAt are the values themselves, which are few and known to the reader, without those that are too close to the one before.
func (a axis) ticksAt(values []float64) []float64 {
	values = slices.Compact(slices.Sorted(slices.Values(values)))
	var out []float64
	for _, v := range values {
		if len(out) == 0 || a.at(v)-a.at(out[len(out)-1]) >= minTickGap {
			out = append(out, v)
		}
	}
	return out
}

func draw(lines []series, xName, yName string, xText, yText func(float64) string) template.HTML {
	var xs, ys []float64
	for _, s := range lines {
		for _, p := range s.points {
			xs, ys = append(xs, p.x), append(ys, p.y)
		}
	}
	xAxis, yAxis := axisOf(xs), axisOf(ys)
	var b strings.Builder
	put := func(format string, args ...any) { fmt.Fprintf(&b, format, args...) }
	height := chartHeight + 18*len(lines)
	put(`<svg viewBox="0 0 %d %d" role="img" aria-label="%s">`, chartWidth, height, template.HTMLEscapeString(yName+" against "+xName))
	for _, v := range xAxis.ticksAt(xs) {
		x := left + plotWidth*xAxis.at(v)
		put(`<line class="tick" x1="%.1f" y1="%d" x2="%.1f" y2="%.1f"/><text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`, x, top, x, top+plotHeight, x, top+plotHeight+18, template.HTMLEscapeString(xText(v)))
	}
	for _, v := range yAxis.ticks() {
		y := top + plotHeight*(1-yAxis.at(v))
		put(`<line class="tick" x1="%d" y1="%.1f" x2="%.1f" y2="%.1f"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`, left, y, left+plotWidth, y, left-8, y+4, template.HTMLEscapeString(yText(v)))
	}
	put(`<text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`, left+plotWidth/2, top+plotHeight+38, template.HTMLEscapeString(xName))
	put(`<text transform="translate(14 %.1f) rotate(-90)" text-anchor="middle">%s</text>`, top+plotHeight/2, template.HTMLEscapeString(yName))
	for i, s := range lines {
		colour := colours[i%len(colours)]
		dash := ""
		if s.dashed {
			dash = ` stroke-dasharray="6 4"`
		}
		var path strings.Builder
		for j, p := range s.points {
			x, y := left+plotWidth*xAxis.at(p.x), top+plotHeight*(1-yAxis.at(p.y))
			fmt.Fprintf(&path, "%s%.1f %.1f", map[bool]string{true: "M", false: "L"}[j == 0], x, y)
			put(`<circle cx="%.1f" cy="%.1f" r="3" fill="%s"><title>%s: %s %s, %s %s</title></circle>`, x, y, colour, template.HTMLEscapeString(s.name), xName, template.HTMLEscapeString(xText(p.x)), template.HTMLEscapeString(yText(p.y)), template.HTMLEscapeString(yName))
		}
		put(`<path d="%s" fill="none" stroke="%s" stroke-width="2"%s/>`, path.String(), colour, dash)
		y := float64(chartHeight + 4 + 18*i)
		put(`<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="%s" stroke-width="3"%s/><text x="%d" y="%.1f">%s</text>`, left, y, left+28, y, colour, dash, left+36, y+4, template.HTMLEscapeString(s.name))
	}
	put(`</svg>`)
	return template.HTML(b.String())
}

func count(v float64) string { return fmt.Sprintf("%.4g", v) }

func micros(v float64) string {
	switch {
	case v >= 1e6:
		return fmt.Sprintf("%.3g s", v/1e6)
	case v >= 1e3:
		return fmt.Sprintf("%.3g ms", v/1e3)
	}
	return fmt.Sprintf("%.3g µs", v)
}

func bytesText(v float64) string {
	switch {
	case v >= 1<<20:
		return fmt.Sprintf("%.4g MiB", v/(1<<20))
	case v >= 1<<10:
		return fmt.Sprintf("%.4g KiB", v/(1<<10))
	}
	return fmt.Sprintf("%.4g B", v)
}
