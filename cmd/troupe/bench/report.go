package bench

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"troupe/benchmarks/report"
)

func newReport(c command) *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use:   "report FILE [OTHER]",
		Short: "Draw the results of bench fanout as one HTML page",
		Long: `Report draws what "troupe bench fanout --json" printed: latency against the number of workers beside the floor of bare NATS, the
distribution of latencies, and throughput where several payload sizes were measured. With two files it compares them, by their
ratios to the floor of the same run. The page needs nothing else.`,
		Example: "  troupe bench fanout --json > a.json\n  troupe bench report a.json -o report.html\n  troupe bench report before.json after.json -o change.html",
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			var files []report.File
			for _, name := range args {
				results, err := readResults(name)
				if err != nil {
					return err
				}
				files = append(files, report.File{Name: filepath.Base(name), Results: results})
			}
			var page bytes.Buffer
			if err := report.Write(&page, files...); err != nil {
				return err
			}
			if err := os.WriteFile(out, page.Bytes(), 0o644); err != nil {
				return err
			}
			c.Printf("%s: %d rows\n", out, len(files[0].Results))
			return nil
		},
	}
	cmd.Flags().StringVarP(&out, "output", "o", "report.html", "file to write")
	return cmd
}

func readResults(name string) ([]report.Result, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	results, err := report.Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return results, nil
}
