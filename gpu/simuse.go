package gpu

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// SimUseEnv is the environment variable in which an agent tells a worker its simulated devices, in the format of
// [SimUse.Env]. A worker passes the value to [ClaimSim] first of all.
const SimUseEnv = "TROUPE_SIM_USE"

// SimUse is one worker's use of simulated devices. A claim on a device is a file that is locked as long as the process
// lives, however it ends. So use by two workers that do not share is detected, and an agent sees processes that a
// worker has left behind. A child that inherits the worker's files keeps the claim, like an inherited context on a real
// device.
type SimUse struct {
	Dir     string     `json:"dir"`    // folder of the claims, one for all processes of the machine
	Key     string     `json:"key"`    // of claims that share: the reservation, or the first of its colocated group, and the bundle in it
	Holder  string     `json:"holder"` // description of the process: "actor_train/3 (reservation r-17)"
	Devices []SimShare `json:"devices"`
}

// SimShare is a part of a simulated device, in thousandths.
type SimShare struct {
	UUID  string `json:"uuid"`
	Milli int    `json:"milli"`
}

// Env returns the value of the environment variable.
func (u SimUse) Env() string {
	text, _ := json.Marshal(u) // cannot fail: strings and numbers
	return SimUseEnv + "=" + string(text)
}

// ClaimSim claims the devices of a use in the format of Env; an empty text (a worker without simulated devices) claims
// none. An *OveruseError names all holders of a device without room; then nothing is claimed. The claim ends with
// release, or with the process.
func ClaimSim(text string) (release func(), err error) {
	if text == "" {
		return func() {}, nil
	}
	var use SimUse
	if err := json.Unmarshal([]byte(text), &use); err != nil {
		return nil, fmt.Errorf("read %s: %w", SimUseEnv, err)
	}
	return use.Claim()
}

// Claim claims all devices of the use, or none.
func (u SimUse) Claim() (release func(), err error) {
	var claims []claimFile
	release = func() {
		for _, f := range claims {
			f.drop()
		}
		claims = nil
	}
	for _, d := range u.Devices {
		f, err := u.claim(d)
		if err != nil {
			release()
			return nil, fmt.Errorf("claim simulated device %s for %s: %w", d.UUID, u.Holder, err)
		}
		claims = append(claims, f)
	}
	return release, nil
}

// simClaim is the content of a claim file.
type simClaim struct {
	Key    string `json:"key"`
	Holder string `json:"holder"`
	PID    int    `json:"pid"`
	Milli  int    `json:"milli"`
}

const claimSuffix = ".claim"

// claim claims one device. A lock serializes the claims of processes.
func (u SimUse) claim(d SimShare) (none claimFile, err error) {
	if d.Milli < 1 || d.Milli > whole || d.UUID == "" || d.UUID != filepath.Base(d.UUID) {
		return none, fmt.Errorf("%d thousandths of %q: want 1 to %d of a UUID", d.Milli, d.UUID, whole)
	}
	dir := filepath.Join(u.Dir, d.UUID)
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return none, err
	}
	gate, err := os.OpenFile(filepath.Join(dir, "gate"), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return none, err
	}
	defer func() { _ = gate.Close() }() // releases the lock
	if err := syscall.Flock(int(gate.Fd()), syscall.LOCK_EX); err != nil {
		return none, err
	}
	there, err := liveClaims(dir)
	if err != nil {
		return none, err
	}
	own := simClaim{Key: u.Key, Holder: u.Holder, PID: os.Getpid(), Milli: d.Milli}
	if err := overused(d.UUID, append(there, own)); err != nil {
		return none, err
	}
	return own.write(dir)
}

// overused returns the error for claims that exceed the device. Claims with one key overlap: the largest counts.
func overused(uuid string, claims []simClaim) error {
	var use usage
	var names []string
	for _, c := range claims {
		use = use.taken(c.Key, c.Milli)
		names = append(names, fmt.Sprintf("%s (process %d)", c.Holder, c.PID))
	}
	if use.milli() <= whole {
		return nil
	}
	return &OveruseError{UUID: uuid, Holders: names, Milli: use.milli()}
}

// claimFile is a claim of this process.
type claimFile struct {
	*os.File
	path string
}

// drop ends the claim. A reader that finds the file in between sees that it is not locked.
func (f claimFile) drop() {
	_ = os.Remove(f.path)
	_ = f.Close()
}

// write creates the claim file. It is locked before it becomes visible, so an unlocked file belongs to a dead process.
func (c simClaim) write(dir string) (claimFile, error) {
	data, err := json.Marshal(c)
	if err != nil {
		return claimFile{}, err
	}
	file, err := os.CreateTemp(dir, strconv.Itoa(c.PID)+"-*.new")
	if err != nil {
		return claimFile{}, err
	}
	f := claimFile{file, file.Name()}
	_, err = f.Write(data)
	if err == nil {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	if err == nil {
		f.path = strings.TrimSuffix(f.path, ".new") + claimSuffix
		err = os.Rename(f.Name(), f.path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		f.drop()
		return claimFile{}, err
	}
	return f, nil
}

// liveClaims returns the claims of live processes and removes the others. A missing folder has none.
func liveClaims(dir string) ([]simClaim, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var claims []simClaim
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), claimSuffix) {
			continue
		}
		c, live, readErr := readClaim(filepath.Join(dir, e.Name()))
		if live {
			claims = append(claims, c)
		}
		err = errors.Join(err, readErr)
	}
	slices.SortFunc(claims, func(a, b simClaim) int { return a.PID - b.PID })
	return claims, err
}

func readClaim(path string) (c simClaim, live bool, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, false, nil // it has just been dropped
	}
	if err != nil {
		return c, false, err
	}
	defer func() { _ = f.Close() }() // it was only read
	switch err := syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB); {
	case err == nil:
		_ = os.Remove(path) // if it cannot be removed, the next call skips it too
		return c, false, nil
	case !errors.Is(err, syscall.EWOULDBLOCK):
		return c, false, err
	}
	return c, true, json.NewDecoder(f).Decode(&c)
}
