package bench

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"troupe/benchmarks/report"
	"troupe/cmd/troupe/cli"
)

func newCheck(c command) *cobra.Command {
	var tolerance float64
	cmd := &cobra.Command{
		Use:   "check BASELINE FILE",
		Short: "Compare the results of bench fanout with a baseline",
		Long: `Check compares two outputs of "troupe bench fanout --json", row by row, by their ratios to the floor of the same run. It exits with 1
if a row of FILE is slower than that of BASELINE by more than the tolerance.`,
		Example: "  troupe bench fanout --json > now.json\n  troupe bench check benchmarks/baseline.json now.json",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if tolerance < 0 {
				return cli.Usagef("--tolerance %v must not be negative", tolerance)
			}
			baseline, err := readResults(args[0])
			if err != nil {
				return err
			}
			results, err := readResults(args[1])
			if err != nil {
				return err
			}
			return c.checkResults(report.Compare(baseline, results), tolerance)
		},
	}
	c.JSONFlag(cmd, "print one JSON object a line instead of a table")
	cmd.Flags().Float64Var(&tolerance, "tolerance", 25, "percent that a ratio may grow")
	return cmd
}

// checkResults prints the comparison and fails if a row has become slower than the tolerance allows.
func (c command) checkResults(rows []report.Comparison, tolerance float64) error {
	if len(rows) == 0 {
		return errors.New("the files have no row in common: measure the workers, sizes and layouts of the baseline")
	}
	slower := 0
	cells := make([][]string, len(rows))
	for i, r := range rows {
		verdict := "ok"
		if r.Change > tolerance {
			verdict = "slower"
			slower++
		}
		cells[i] = []string{strconv.Itoa(r.Workers), r.Layout, strconv.Itoa(r.Bytes), fmt.Sprintf("%.2f", r.RatioBefore), fmt.Sprintf("%.2f", r.RatioAfter), fmt.Sprintf("%+.0f %%", r.Change), verdict}
	}
	if c.JSON {
		for _, r := range rows {
			if err := c.PrintJSON(r); err != nil {
				return err
			}
		}
	} else {
		if err := c.Table("WORKERS LAYOUT BYTES BASELINE NOW CHANGE VERDICT", cells); err != nil {
			return err
		}
	}
	if slower > 0 {
		return fmt.Errorf("%d of %d rows are slower than the baseline by more than %g %%", slower, len(rows), tolerance)
	}
	return nil
}
