package nodes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	logRotated = 3           // rotated files that are kept
	logRetry   = time.Second // before a failed file is opened again
)

// logFile is the file of one worker's output. A failed write does not block the worker: lost lines are counted, and the
// file says so as soon as it can be written. One goroutine uses it at a time.
type logFile struct {
	path  string
	limit int64 // bytes before rotation
	// failedFunc is called with the first error, and again after a success.
	failedFunc func(error)

	file     *os.File
	size     int64
	buf      []byte // lines to write
	lines    int    // in buf
	lost     int    // lines that could not be written and are not yet mentioned in the file
	torn     bool   // the last write was partial
	retryAt  time.Time
	reported bool
}

// logPath is the path of a worker's log file.
func logPath(dir string, id WorkerID) string {
	return filepath.Join(dir, id.Namespace, id.Role, id.Incarnation, fmt.Sprintf("%d.%d.log", id.Rank, id.Gen))
}

// add buffers lines that were read at one time; flush writes them.
func (f *logFile) add(at time.Time, rank int, stream OutputStream, texts []string) {
	prefix := fmt.Sprintf("%s %d %s ", stamp(at), rank, stream)
	for _, text := range texts {
		f.buf = append(append(append(f.buf, prefix...), text...), '\n')
	}
	f.lines += len(texts)
}

// stampLayout is the time at the beginning of a line in a log file.
const stampLayout = "2006-01-02T15:04:05.000000Z"

func stamp(t time.Time) string { return t.UTC().Format(stampLayout) }

// flush writes the buffer, and rotates the file when it is full.
func (f *logFile) flush() {
	if f.lines == 0 {
		return
	}
	if err := f.write(); err != nil {
		f.lost += f.lines
		f.fail(err)
	} else {
		f.lost, f.reported = 0, false
	}
	f.buf, f.lines = f.buf[:0], 0
	if f.size > f.limit {
		f.rotate()
	}
}

func (f *logFile) write() error {
	if f.file == nil {
		if time.Now().Before(f.retryAt) {
			return errors.New("the last attempt failed less than a second ago")
		}
		if err := f.open(); err != nil {
			return err
		}
	}
	text := f.buf
	if f.lost > 0 {
		note := fmt.Sprintf("%s [%d lines are missing here: they could not be written]\n", stamp(time.Now()), f.lost)
		if f.torn {
			note = "\n" + note
		}
		text = append([]byte(note), text...)
	}
	n, err := f.file.Write(text)
	f.size += int64(n)
	f.torn = err != nil && (n > 0 || f.torn)
	return err
}

func (f *logFile) open() error {
	if err := os.MkdirAll(filepath.Dir(f.path), 0o700); err != nil {
		return err
	}
	file, err := os.OpenFile(f.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	f.file, f.size = file, 0
	if info, err := file.Stat(); err == nil {
		f.size = info.Size()
	}
	return nil
}

func (f *logFile) fail(err error) {
	if f.file != nil || f.retryAt.Before(time.Now()) {
		f.retryAt = time.Now().Add(logRetry)
	}
	f.close()
	if !f.reported && f.failedFunc != nil {
		f.reported = true
		f.failedFunc(err)
	}
}

func (f *logFile) rotate() {
	f.close()
	f.size = 0
	for i := logRotated; i > 0; i-- {
		newer := f.path
		if i > 1 {
			newer = fmt.Sprintf("%s.%d", f.path, i-1)
		}
		err := os.Rename(newer, fmt.Sprintf("%s.%d", f.path, i))
		if err != nil && !errors.Is(err, fs.ErrNotExist) && f.failedFunc != nil {
			f.failedFunc(err)
		}
	}
}

func (f *logFile) close() {
	if f.file != nil {
		_ = f.file.Close() // every write was checked
		f.file = nil
	}
}

// ReadLogFile reads the lines of a log file. Their ID has the rank alone. Lines that are no output of a worker are left out.
func ReadLogFile(path string) ([]Line, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read a log file: %w", err)
	}
	var out []Line
	for text := range strings.Lines(string(data)) {
		words := strings.SplitN(strings.TrimSuffix(text, "\n"), " ", 4)
		if len(words) < 4 {
			continue
		}
		at, err := time.Parse(stampLayout, words[0])
		rank, rankErr := strconv.Atoi(words[1])
		if err != nil || rankErr != nil {
			continue
		}
		out = append(out, Line{ID: WorkerID{Rank: rank}, Stream: OutputStream(words[2]), At: at, Text: words[3]})
	}
	return out, nil
}

// pruneLogs removes the oldest idle files under dir until the rest has at most limit bytes, and folders that become
// empty.
func pruneLogs(dir string, limit int64, busy func(path string) bool) error {
	type file struct {
		path string
		size int64
		at   time.Time
	}
	var files []file
	var total int64
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // removed meanwhile
		}
		if info, err := d.Info(); err == nil {
			files = append(files, file{path, info.Size(), info.ModTime()})
			total += info.Size()
		}
		return nil
	})
	slices.SortFunc(files, func(a, b file) int { return a.at.Compare(b.at) })
	for _, f := range files {
		if total <= limit {
			break
		}
		if busy(f.path) {
			continue
		}
		if rm := os.Remove(f.path); rm != nil {
			err = errors.Join(err, rm)
			continue
		}
		total -= f.size
		for parent := filepath.Dir(f.path); parent != dir && os.Remove(parent) == nil; parent = filepath.Dir(parent) {
			// empty folders go too, up to the log folder itself
		}
	}
	return err
}
