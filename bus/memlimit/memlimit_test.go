package memlimit

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	v1Mounts = `25 1 0:22 / /sys rw - sysfs sysfs rw
33 25 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 25 0:31 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory
35 25 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
`
	v2Mounts        = "34 25 0:31 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
	v1DockerMounts  = "34 25 0:31 /docker/abc /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory\n"
	v2ForeignMounts = "34 25 0:31 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
)

func TestGroupLimit(t *testing.T) {
	for name, c := range map[string]struct {
		groups, mounts string
		files          map[string]string
		want           int64
	}{
		"nothing": {},
		"version 2": {"0::/user.slice/job\n", v2Mounts,
			map[string]string{"/sys/fs/cgroup/user.slice/job/memory.max": "2684354560\n"}, 2684354560},
		"version 2, no limit": {"0::/job\n", v2Mounts, map[string]string{"/sys/fs/cgroup/job/memory.max": "max\n"}, 0},
		"version 2, the limit is above": {"0::/pod/job\n", v2Mounts,
			map[string]string{"/sys/fs/cgroup/pod/job/memory.max": "max\n", "/sys/fs/cgroup/pod/memory.max": "1000\n"}, 1000},
		"version 2, the lowest counts": {"0::/pod/job\n", v2Mounts,
			map[string]string{"/sys/fs/cgroup/pod/job/memory.max": "3000\n", "/sys/fs/cgroup/pod/memory.max": "1000\n"}, 1000},
		"version 2, in a container":          {"0::/\n", v2Mounts, map[string]string{"/sys/fs/cgroup/memory.max": "5000\n"}, 5000},
		"version 2, outside what is mounted": {"0::/../other\n", v2ForeignMounts, map[string]string{"/sys/fs/cgroup/memory.max": "6000\n"}, 6000},
		"version 1": {"8:cpu,cpuacct:/x\n4:memory:/pod/job\n0::/\n", v1Mounts,
			map[string]string{"/sys/fs/cgroup/memory/pod/job/memory.limit_in_bytes": "2684354560\n",
				"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 2684354560},
		"version 1, with other controllers": {"4:cpuset,memory:/job\n", "34 25 0:31 / /cg rw - cgroup cgroup rw,cpuset,memory\n",
			map[string]string{"/cg/job/memory.limit_in_bytes": "700\n"}, 700},
		"version 1, in a container without a namespace of its own": {"4:memory:/docker/abc/deep\n", v1DockerMounts,
			map[string]string{"/sys/fs/cgroup/memory/memory.limit_in_bytes": "8000\n", "/sys/fs/cgroup/memory/deep/memory.limit_in_bytes": "9000\n"}, 8000},
		"version 1, a group with a similar name": {"4:memory:/docker/abcdef\n", v1DockerMounts,
			map[string]string{"/sys/fs/cgroup/memory/memory.limit_in_bytes": "8000\n", "/sys/fs/cgroup/memory/def/memory.limit_in_bytes": "1\n"}, 8000},
		"not mounted": {"0::/job\n", "25 1 0:22 / /sys rw - sysfs sysfs rw\n", nil, 0},
		"malformed":   {"nonsense\n::\n4:memory\n", "x - y\n - \n1 2 3 4 5 - cgroup2 a b\n", nil, 0},
	} {
		got := groupLimit(c.groups, c.mounts, func(file string) string { return c.files[file] })
		require.Equal(t, c.want, got, name)
	}
}

func TestTotal(t *testing.T) {
	require.Positive(t, Total())
	require.Positive(t, Info("MemTotal"))
	require.Zero(t, Info("NoSuchField"))
}
