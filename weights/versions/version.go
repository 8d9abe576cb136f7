package versions

import (
	"cmp"
	"fmt"
)

// Version names an immutable state of the weights: the step that its publishers gave it, in an epoch of publishers. Later epochs are
// newer, whatever their steps: publishers that were started again may repeat steps.
type Version struct {
	Epoch uint64 `msgpack:"epoch" json:"epoch"`
	Step  int64  `msgpack:"step" json:"step"`
}

// Compare orders versions by age.
func (v Version) Compare(o Version) int {
	return cmp.Or(cmp.Compare(v.Epoch, o.Epoch), cmp.Compare(v.Step, o.Step))
}

// IsZero reports whether this is no version. Epochs count from 1.
func (v Version) IsZero() bool { return v.Epoch == 0 }

func (v Version) String() string {
	if v.IsZero() {
		return "no version"
	}
	return fmt.Sprintf("step %d of epoch %d", v.Step, v.Epoch)
}
