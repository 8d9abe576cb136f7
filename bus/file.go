package bus

import (
	"io"
	"os"
)

// maxTokenFile and maxCredsFile bound the files with secrets.
const (
	maxTokenFile = 64 << 10
	maxCredsFile = 1 << 20
)

// ReadFile reads a file. One of more than limit bytes, or without an end such as /dev/zero, is CodeInvalid.
func ReadFile(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // nothing was written
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		return nil, Errorf(CodeInvalid, "%s has more than %d bytes", path, limit)
	}
	return data, err
}
