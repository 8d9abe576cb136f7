package calls_test

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// spilledFiles counts the values that this process has in files of a folder.
func spilledFiles(t *testing.T, folder string) int {
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return strings.Count(string(maps), " "+folder+"/")
}

// TestValuesPastTheBoundAreSpilled: what is past the bound is in files without names, is read like any other value, and ends with its last
// reference. Memory that is free again is used first.
func TestValuesPastTheBoundAreSpilled(t *testing.T) {
	const size = 300 << 10
	folder, memory := diskFolder(t), bustest.NewMemory(t)
	b := bustest.Open(t, bus.Config{Values: bus.ValuesConfig{Limit: 2*size + size/2, SpillDir: folder}})
	owner, other := endpoint(t, b), endpoint(t, dial(t, b))
	put := func(seed int) wire.Reference {
		body := memory.Make(size)
		copy(body, pattern(size, seed))
		ref, err := owner.References().Put(body, memory, nil)
		require.NoError(t, err)
		return ref
	}
	var refs []wire.Reference
	for seed := range 6 {
		refs = append(refs, put(seed))
	}
	require.Equal(t, 2, memory.InUse())
	require.Equal(t, 4, spilledFiles(t, folder))
	named, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Empty(t, named)
	for seed, ref := range refs {
		for _, ep := range []*calls.Endpoint{owner, other} {
			v, err := value(t, ep, ref, memory)
			require.NoError(t, err)
			require.Equal(t, checksum(pattern(size, seed)), checksum(v.Body))
			values.FreeBody(memory, v.Body)
		}
	}
	small, err := owner.References().Put([]byte("small values do not count"), memory, nil)
	require.NoError(t, err)
	owner.References().Release(refs[0], refs[5], small)
	until(t, func() bool { return memory.InUse() == 1 && spilledFiles(t, folder) == 3 })
	refs = append(refs[1:5], put(7))
	require.Equal(t, 2, memory.InUse())
	require.Equal(t, 3, spilledFiles(t, folder))
	owner.References().Release(refs...)
	until(t, func() bool { return memory.InUse() == 0 && spilledFiles(t, folder) == 0 })
}

// TestValuesPastTheBoundAreRefused: with the figures and the remedy. The body still belongs to the caller.
func TestValuesPastTheBoundAreRefused(t *testing.T) {
	const size = 300 << 10
	for name, c := range map[string]struct {
		folder string
		want   []string
	}{
		"as configured":        {bus.NoSpill, []string{"307200", "400000", "TROUPE_VALUES_LIMIT", "TROUPE_VALUES_SPILL"}},
		"no such folder":       {"/no/such/folder", []string{"/no/such/folder", "no such file", "TROUPE_VALUES_SPILL"}},
		"a folder in memory":   {"/dev/shm", []string{"/dev/shm", "tmpfs"}},
		"a file, not a folder": {"/etc/passwd", []string{"/etc/passwd", "not a directory"}},
	} {
		t.Run(name, func(t *testing.T) {
			memory := bustest.NewMemory(t)
			owner := endpoint(t, bustest.Open(t, bus.Config{Values: bus.ValuesConfig{Limit: 400_000, SpillDir: c.folder}}))
			first, err := owner.References().Put(memory.Make(size), memory, nil)
			require.NoError(t, err)
			body := memory.Make(size)
			_, err = owner.References().Put(body, memory, nil)
			require.ErrorIs(t, err, bus.ErrRefused)
			for _, text := range c.want {
				require.ErrorContains(t, err, text)
			}
			require.Equal(t, 2, memory.InUse())
			owner.References().Release(first)
			until(t, func() bool { return memory.InUse() == 1 })
			second, err := owner.References().Put(body, memory, nil)
			require.NoError(t, err, "there is room again")
			owner.References().Release(second)
			until(t, func() bool { return memory.InUse() == 0 })
		})
	}
}

func TestValuesConfigIsChecked(t *testing.T) {
	_, err := bus.Open(t.Context(), bus.Config{Values: bus.ValuesConfig{Limit: -1, SpillDir: "here"}})
	require.ErrorContains(t, err, "Values.Limit")
	require.ErrorContains(t, err, "Values.SpillDir")
}

// diskFolder is a folder on a disk: the one for temporary files may be in memory.
func diskFolder(t *testing.T) string {
	folder, err := os.MkdirTemp("/var/tmp", "troupe-spill-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(folder)) })
	return folder
}
