package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/roles"
	"troupe/roles/registry"
)

func TestRoles(t *testing.T) {
	u := newShell(t)
	u.up()
	require.Equal(t, "no roles\n", u.output("roles"))
	require.Empty(t, u.output("roles", "--json"))
	u.runs(four, roles.Spec{Name: "stays", World: 1, Detached: true, Process: &roles.Process{Command: roles.Self()}})
	lines := strings.Split(strings.TrimSpace(u.output("roles")), "\n")
	require.Len(t, lines, 3)
	require.Regexp(t, `^ROLE +CLASS +WORLD +MESH +STATE +SINCE +LIFE +NODES +BY +CAUSE$`, lines[0])
	require.Regexp(t, `^four +calc +4 +tp=2 cp=1 dp=2 pp=1 +ready +\d+s ago +owned +– +a test$`, lines[1])
	require.Regexp(t, `^stays +calc +1 .* detached +\S+ +a test$`, lines[2])

	var first registry.RoleRecord
	first4, _, _ := strings.Cut(u.output("roles", "--json"), "\n")
	require.NoError(t, json.Unmarshal([]byte(first4), &first))
	require.Equal(t, "four", first.Name)
	require.Equal(t, registry.RoleReady, first.State)
	require.Len(t, first.Methods, 9)
	require.Contains(t, u.output("destroy", "stays"), "is gone")
}

// A role by name shows its workers, and any session can destroy it.
func TestOneRole(t *testing.T) {
	u := newShell(t)
	u.up()
	u.runs(four)
	lines := strings.Split(strings.TrimSpace(u.output("roles", "four")), "\n")
	require.Len(t, lines, 5)
	require.Regexp(t, `^RANK +WORKER +NODE +DEVICES +PID +STATE +CALLS +BUSY$`, lines[0])
	require.Regexp(t, `^3 +– +\S+ +– +\d+ +ready +0 +idle$`, lines[4])
	require.Len(t, strings.Split(strings.TrimSpace(u.output("roles", "four", "--json")), "\n"), 4)
	require.Contains(t, u.fails(1, "roles", "five"), `no role "five"`)

	require.Contains(t, u.fails(1, "destroy", "five"), `no role "five"`)
	require.Contains(t, u.fails(2, "destroy", "four", "--timeout", "0s"), "--timeout")
	require.Contains(t, u.output("destroy", "four"), "role four is gone, with its 4 workers")
	require.Contains(t, u.output("roles"), "no roles")
}

// An operator resizes a role of another driver, and replaces one of its ranks.
func TestResizeAndReplace(t *testing.T) {
	u := newShell(t)
	u.up()
	u.runs(four, roles.Spec{Name: "pool", World: 1, Process: &roles.Process{Command: roles.Self(), Policy: roles.RestartRank}})
	require.Contains(t, u.output("resize", "pool", "2"), "role pool has 2 workers in epoch 2: resized to 2 replicas: asked for by ")
	var now roles.Membership
	require.NoError(t, json.Unmarshal([]byte(u.output("replace", "pool/1", "--reason", "a test", "--json")), &now))
	require.Equal(t, uint64(3), now.Epoch)
	require.Contains(t, now.Cause, "a test, asked for by ")
	require.Equal(t, []uint32{0, 2}, []uint32{now.Members[0].Gen, now.Members[1].Gen})
	require.Contains(t, u.fails(1, "resize", "four", "3"), "goroutines")
	require.Contains(t, u.fails(1, "replace", "four/1"), "goroutines")
	require.Contains(t, u.fails(2, "resize", "pool", "0"), "REPLICAS")
}

// A named namespace is the only one that a command sees. Without a name, a role is found in the namespace that has it, except by destroy.
func TestNamespaces(t *testing.T) {
	u := newShell(t)
	u.up()
	other := u.with("TROUPE_NAMESPACE", "other")
	other.runs(roles.Spec{Name: "theirs", World: 1})
	require.Equal(t, "no roles in namespace default\n", u.output("roles", "-n", "default"))
	require.Regexp(t, `^ROLE +NAMESPACE .*\ntheirs +other `, u.output("roles"))
	require.Contains(t, u.output("call", "theirs", "rank"), "[0]")
	require.Contains(t, u.fails(1, "destroy", "theirs"), "a role of that name is in namespace other")
	require.Contains(t, u.output("roles", "-n", "other"), "theirs")
	require.Contains(t, other.output("call", "theirs", "rank"), "[0]")
	require.Contains(t, other.fails(1, "call", "-n", "default", "theirs", "rank"), "theirs")
	longest := strings.Repeat("n", 64)
	require.Contains(t, u.output("roles", "-n", longest), longest)
	require.Contains(t, u.fails(2, "roles", "-n", longest+"n"), "1 to 64")
}

func TestVersion(t *testing.T) {
	u := newShell(t)
	require.Regexp(t, `^troupe dev, wire \d+, go`, u.output("version"))
	require.Equal(t, "troupe dev\n", u.output("--version"))
	var v struct {
		Version string
		Wire    int
	}
	require.NoError(t, json.Unmarshal([]byte(u.output("version", "--json")), &v))
	require.Equal(t, "dev", v.Version)
	require.Positive(t, v.Wire)
}
