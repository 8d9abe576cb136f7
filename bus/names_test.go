package bus_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/bus"
)

func TestGoodNames(t *testing.T) {
	for _, name := range []string{"a", "Z", "0", "_", "-", "actor_train", "reward-math", strings.Repeat("x", 64)} {
		require.NoError(t, bus.CheckName("role", name))
	}
}

func TestHostileNames(t *testing.T) {
	for _, name := range []string{
		"", ".", "a.b", "*", ">", "a b", "a\n", "a\x00", "é", "a/b", "../a", "$SYS", "@nodes", "a\r\nPUB x 0", "\xff", strings.Repeat("x", 65),
	} {
		err := bus.CheckName("namespace", name)
		require.ErrorIs(t, err, bus.ErrInvalid, "%q", name)
		require.ErrorContains(t, err, "namespace name ")
		require.ErrorContains(t, err, "a name has 1 to 64 characters out of A-Z, a-z, 0-9, _ and -")
	}
	err := bus.CheckName("role", strings.Repeat("é", 1<<20))
	require.Less(t, len(err.Error()), 400, "a hostile name does not fill the log")
}

func TestRoleNamesOfTheBusItself(t *testing.T) {
	err := bus.CheckRoleName("reply")
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.EqualError(t, err, `role name "reply" is taken by the bus itself; choose another`)
	require.NoError(t, bus.CheckRoleName("replies"))
}

func TestNamesThatPassAreTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := string(rapid.SliceOfN(rapid.Byte(), 0, 70).Draw(t, "name"))
		err := bus.CheckName("role", name)
		if err == nil {
			require.NotContains(t, name, ".")
			require.False(t, strings.ContainsAny(name, "*> \t\r\n$@"))
			require.True(t, len(name) >= 1 && len(name) <= 64)
			return
		}
		require.True(t, utf8.ValidString(err.Error()))
	})
}

func TestAddresses(t *testing.T) {
	a, err := bus.NewAddress("default", "actor_train", "i1")
	require.NoError(t, err)
	require.Equal(t, bus.Address{Namespace: "default", Role: "actor_train", Incarnation: "i1"}, a)
	for want, bad := range map[string][3]string{
		"namespace name": {"a.b", "r", "i"}, "role name": {"n", "*", "i"}, "incarnation name": {"n", "r", ""}, "taken by the bus": {"n", "reply", "i"},
	} {
		_, err := bus.NewAddress(bad[0], bad[1], bad[2])
		require.ErrorIs(t, err, bus.ErrInvalid)
		require.ErrorContains(t, err, want)
	}
	require.Error(t, bus.Address{}.Check())
}

func TestNamesOfLabels(t *testing.T) {
	for _, name := range []string{"rack", "ray.io/accelerator-type", "a.b_c-1", "x.y.z/K8s.name", strings.Repeat("x", 64)} {
		require.NoError(t, bus.CheckLabel(name), name)
	}
	for _, name := range []string{"", "/", "a/", "/a", "a/b/c", "a b", "a=b", "a,b", "é", strings.Repeat("x", 65), strings.Repeat("x", 254) + "/a"} {
		require.ErrorIs(t, bus.CheckLabel(name), bus.ErrInvalid, "%q", name)
	}
}
