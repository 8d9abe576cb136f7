package recorder

import (
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"
)

const (
	maxInterned  = 1 << 15 // texts that get a number; less than noText
	recentTexts  = 1 << 10 // a power of two
	noText       = ^Text(0)
	longInterned = 128 // longer texts get no number
)

// Text is the number of a text; 0: the empty one.
type Text uint16

// interner gives texts numbers that never change, so that the ring of calls has no pointers for the garbage collector to follow. Number 0
// is the empty text. A text that was seen lately is found without a lock.
type interner struct {
	recent [recentTexts]atomic.Pointer[numberedText]

	mu      sync.RWMutex // guards what follows
	numbers map[string]*numberedText
	texts   []string // by number
}

type numberedText struct {
	text   string
	number Text
}

func newInterner() *interner {
	return &interner{numbers: map[string]*numberedText{}, texts: []string{""}}
}

// number is the number of s; noText: it has none and gets none. It allocates only for a new text.
func (in *interner) number(s string) Text {
	if s == "" {
		return 0
	}
	// By address: the texts of calls are fields of long-lived values. A text at another address is found in numbers.
	slot := &in.recent[(uintptr(unsafe.Pointer(unsafe.StringData(s)))>>4^uintptr(len(s)))%recentTexts]
	if t := slot.Load(); t != nil && t.text == s {
		return t.number
	}
	in.mu.RLock()
	t := in.numbers[s]
	in.mu.RUnlock()
	if t == nil {
		if t = in.add(s); t == nil {
			return noText
		}
	}
	slot.Store(t)
	return t.number
}

func (in *interner) add(s string) *numberedText {
	in.mu.Lock()
	defer in.mu.Unlock()
	if t := in.numbers[s]; t != nil {
		return t
	}
	if len(in.texts) == maxInterned || len(s) > longInterned {
		return nil
	}
	s = strings.Clone(s) // s may be a part of a message
	t := &numberedText{text: s, number: Text(len(in.texts))}
	in.numbers[s], in.texts = t, append(in.texts, s)
	return t
}

// all are the texts by number. The slice is not changed.
func (in *interner) all() []string {
	in.mu.RLock()
	defer in.mu.RUnlock()
	return in.texts[:len(in.texts):len(in.texts)]
}
