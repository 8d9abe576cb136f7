package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/placement"
	"troupe/roles"
)

// A backup of a running head is restored into an empty store. Reservations of running workers are adopted, a released one does not come
// back for good, and cordons, rules, roles and token are those of the backup.
func TestBackupAndRestore(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "one.backup")
	head, stop := u.up("--gpus", "sim:2x2", "--name", "box")
	u.output("reserve", "--bundles", "1", "--devices", "1", "--id", "kept", "--holder", "ann")
	u.output("reserve", "--bundles", "1", "--devices", "1", "--id", "gone", "--holder", "ann")
	u.output("release", "gone")
	u.output("cordon", "box-1", "--why", "a new fan")
	u.output("rules", "--quota", "team=3")
	driver, err := roles.Open(t.Context(), roles.Config{BusConfig: head.access(), Namespace: "default", Name: "a test", Classes: []*actors.Class{calcClass()}})
	require.NoError(t, err)
	_, err = driver.Create(t.Context(), roles.Spec{Name: "stays", Class: "calc", World: 1, Detached: true, Process: &roles.Process{Command: roles.Self()}})
	require.NoError(t, err)
	require.NoError(t, driver.Close(t.Context()))
	require.Contains(t, u.fails(2, "backup"), "-o FILE")
	require.Contains(t, u.output("backup", "-o", file, "--secrets"), file+" has ")
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode().Perm())
	require.Contains(t, u.output("restore", file, "--check"), "is whole")
	require.Contains(t, u.fails(1, "restore", file, "--store", head.Store), "in use by a running head")
	u.output("destroy", "stays")
	stop()
	require.Contains(t, u.fails(1, "restore", file, "--store", head.Store), "--force")

	token, err := os.ReadFile(head.TokenFile)
	require.NoError(t, err)
	store := filepath.Join(dir, "restored")
	require.Contains(t, u.output("restore", file, "--store", store), "is restored")
	again, stopAgain := u.up("--gpus", "sim:2x2", "--name", "box", "--store", store)
	restored, err := os.ReadFile(again.TokenFile)
	require.NoError(t, err)
	require.Equal(t, token, restored)
	require.Eventually(t, func() bool {
		var status placement.LedgerStatus
		require.NoError(t, json.Unmarshal([]byte(u.output("ledger", "--json")), &status))
		return status.Doubt == ""
	}, 2*time.Minute, 50*time.Millisecond, "every node has reported")
	var list placement.Listing
	require.NoError(t, json.Unmarshal([]byte(u.output("reservations", "--all", "--json")), &list))
	for _, r := range list.Records {
		require.NotEqual(t, "gone", r.ID, "a reservation that was released before the backup stays released")
		require.NotEmpty(t, r.Unconfirmed, "%s: nothing has confirmed it yet", r.ID)
	}
	require.Contains(t, u.output("gpus"), "a new fan")
	require.Contains(t, u.output("rules"), "quota of team: 3 devices")
	require.Contains(t, u.output("roles"), "stays")
	stopAgain()
	offline := filepath.Join(dir, "offline.backup")
	u.output("backup", "--store", store, "-o", offline)
	require.Contains(t, u.output("restore", offline, "--check"), "is whole")

	data, err := os.ReadFile(file)
	require.NoError(t, err)
	for name, harm := range map[string][]byte{"cut off": data[:len(data)/2], "empty": nil, "changed": append(append([]byte{}, data[:600]...), append([]byte{data[600] ^ 1}, data[601:]...)...)} {
		bad := filepath.Join(dir, "bad.backup")
		require.NoError(t, os.WriteFile(bad, harm, 0o600))
		_, _, code := u.run("restore", bad, "--store", filepath.Join(dir, "other"))
		require.NotZero(t, code, name)
		require.NoDirExists(t, filepath.Join(dir, "other"), name)
	}
}
