package chaos

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Calls is the account of all calls: what drivers have had answered, and what workers have executed.
type Calls struct {
	Acked    int
	Executed int
}

// CheckCalls reads what drivers and workers have written down. A call that was answered has been executed once; any other at
// most once.
func CheckCalls(dir string) (Calls, []string, error) {
	acked, err := readLines(dir, "acked-*") // before the others: what is answered later has been executed later
	if err != nil {
		return Calls{}, nil, err
	}
	executed, err := readLines(dir, "executed-*")
	if err != nil {
		return Calls{}, nil, err
	}
	var bad []string
	for id, n := range executed {
		if n > 1 {
			bad = append(bad, fmt.Sprintf("call %s was executed %d times", id, n))
		}
	}
	for id := range acked {
		if executed[id] == 0 {
			bad = append(bad, fmt.Sprintf("call %s was answered and not executed", id))
		}
	}
	slices.Sort(bad)
	return Calls{len(acked), len(executed)}, bad, nil
}

// readLines counts the lines of files. The last line of a file may still be on its way.
func readLines(dir, pattern string) (map[string]int, error) {
	paths, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil {
		return nil, err
	}
	count := map[string]int{}
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		for r := bufio.NewReader(f); ; {
			line, err := r.ReadString('\n')
			if err != nil {
				break
			}
			count[strings.TrimSpace(line)]++
		}
		_ = f.Close() // it was only read
	}
	return count, nil
}
