package values

import (
	"cmp"
	"log/slog"
	"sync"

	"troupe/bus"
	"troupe/bus/memlimit"
)

const (
	defaultSpillDir = "/var/tmp" // on a disk, where /tmp often is in memory
	valuesPercent   = 30         // of the memory of the host or the control group
)

// valueBound bounds the memory of the values that a session keeps: values of Put, and results that are kept for their callers.
// Values past it are written to files of the folder.
//
//	Put, or a large result ── reserve ──► in memory ─────────────────────► freed
//	                             └── past the bound ── spill ──► in a file ──►
//	                                                     └── no folder, or the disk is full ──► refused (Put), sent to the caller (a result)
type valueBound struct {
	limit  int64
	folder string // empty: values past the bound are refused
	logger *slog.Logger
	told   sync.Once // that values are written to disk

	mu   sync.Mutex
	used int64
}

func newValueBound(cfg bus.ValuesConfig, logger *slog.Logger) *valueBound {
	b := &valueBound{limit: cfg.Limit, folder: cmp.Or(cfg.SpillDir, defaultSpillDir), logger: logger}
	if b.limit == 0 {
		b.limit = memlimit.Total() / 100 * valuesPercent
	}
	if b.folder == bus.NoSpill {
		b.folder = ""
	}
	return b
}

// reserve adds n bytes, if they are within the bound. Bodies that travel in a frame do not count.
func (b *valueBound) reserve(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n > MaxInline && b.used+int64(n) > b.limit {
		return false
	}
	b.addLocked(n)
	return true
}

// add adds n bytes, also past the bound: negative when a value is freed.
func (b *valueBound) add(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.addLocked(n)
}

func (b *valueBound) addLocked(n int) {
	if n > MaxInline || n < -MaxInline {
		b.used += int64(n)
	}
}

// fits reports whether n more bytes are within the bound.
func (b *valueBound) fits(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used+int64(n) <= b.limit
}

// spill writes a value of which reserve said that it is past the bound to a file.
func (b *valueBound) spill(body []byte) (*spilledBody, error) {
	if b.folder == "" {
		b.mu.Lock()
		used := b.used
		b.mu.Unlock()
		return nil, bus.Errorf(bus.CodeRefused, "a value of %d bytes is refused: this process keeps %d bytes of values, and the most is %d (TROUPE_VALUES_LIMIT); "+
			"drop references, raise that limit, or let values be written to disk (TROUPE_VALUES_SPILL is a folder)", len(body), used, b.limit)
	}
	spilled, err := writeSpilled(b.folder, body)
	if err != nil {
		return nil, bus.Errorf(bus.CodeRefused, "a value of %d bytes is past the bound of %d for values in memory (TROUPE_VALUES_LIMIT), and cannot be written to "+
			"the folder %s: %v; free space there, or choose another folder (TROUPE_VALUES_SPILL)", len(body), b.limit, b.folder, err)
	}
	b.told.Do(func() {
		b.logger.Warn("bus: the values that this process keeps are past their bound, and further ones are written to disk, which is slower",
			"bound", b.limit, "folder", b.folder, "remedy", "drop references, or raise TROUPE_VALUES_LIMIT")
	})
	return spilled, nil
}

// charge counts a body, or past the bound writes it to a file and returns the body there: the given one is then the caller's to free.
func (r *References) charge(body []byte, memory Memory) ([]byte, Memory, error) {
	if r.bound.reserve(len(body)) {
		return body, memory, nil
	}
	spilled, err := r.bound.spill(body)
	if err != nil {
		return nil, nil, err
	}
	return spilled.body, spilled, nil
}

// discharge ends what charge began.
func (r *References) discharge(body []byte, memory Memory) {
	if isSpilled(memory) {
		memory.Free(body)
		return
	}
	r.bound.add(-len(body))
}

// MustSpill reports whether a result of n bytes that is kept for its caller is past the bound, and can be written to disk (Spill).
func (r *References) MustSpill(n int) bool {
	return n > MaxInline && r.bound.folder != "" && !r.bound.fits(n)
}

// Spill writes a body to disk, which may take long. The result frees the body that it returns; the given one is the caller's.
func (r *References) Spill(body []byte) ([]byte, Memory, error) {
	spilled, err := r.bound.spill(body)
	if err != nil {
		return nil, nil, err
	}
	return spilled.body, spilled, nil
}

// spilledBody is the memory of one value in a file: pages that the system reads from the disk when they are used. It is the Memory of that body.
type spilledBody struct {
	once sync.Once
	body []byte
}

// Make allocates nothing: a file has one value.
func (s *spilledBody) Make(int) []byte { return nil }

func isSpilled(m Memory) bool {
	_, ok := m.(*spilledBody)
	return ok
}
