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

// ReadFile reads a file of at most most bytes; a larger one, and one without an end such as /dev/zero, is CodeInvalid.
func ReadFile(path string, most int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // nothing was written
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		return nil, Errorf(CodeInvalid, "%s has more than %d bytes", path, most)
	}
	return data, err
}
