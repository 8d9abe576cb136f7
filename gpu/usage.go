package gpu

import "slices"

// whole is all of a device, in thousandths.
const whole = 1000

// usage is the holders of one simulated device, in order of arrival.
type usage []share

type share struct {
	holder string
	milli  int
	count  int // number of Acquire calls
}

func (u usage) find(holder string) int {
	return slices.IndexFunc(u, func(s share) bool { return s.holder == holder })
}

// milli returns the share in use. Several shares of one holder count once: colocated roles share devices.
func (u usage) milli() int {
	total := 0
	for _, s := range u {
		total += s.milli
	}
	return total
}

func (u usage) holders() []string {
	var names []string
	for _, s := range u {
		names = append(names, s.holder)
	}
	return names
}

// taken returns the usage after holder acquires milli once more. Shares of one holder overlap, so the larger one
// counts.
func (u usage) taken(holder string, milli int) usage {
	next := slices.Clone(u)
	i := next.find(holder)
	if i < 0 {
		return append(next, share{holder, milli, 1})
	}
	next[i].milli = max(next[i].milli, milli)
	next[i].count++
	return next
}

// released returns the usage after holder releases the device once; false if it does not hold it.
func (u usage) released(holder string) (usage, bool) {
	i := u.find(holder)
	if i < 0 {
		return u, false
	}
	next := slices.Clone(u)
	if next[i].count--; next[i].count == 0 {
		next = slices.Delete(next, i, i+1)
	}
	return next, true
}
