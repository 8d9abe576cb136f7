package bus

import (
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"sync"
)

// ProcessName is how this process names itself to people: user@host program[id].
var ProcessName = sync.OnceValue(func() string {
	name := "unknown"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	host, _ := os.Hostname()
	return fmt.Sprintf("%s@%s %s[%d]", name, host, filepath.Base(os.Args[0]), os.Getpid())
})
