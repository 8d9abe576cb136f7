//go:build cgo

package nvml

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"troupe/gpu"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestThisMachine uses the driver of the machine. Where nvidia-smi works there must be an inventory with the same
// devices; elsewhere there must be a *gpu.NoDriverError.
func TestThisMachine(t *testing.T) {
	smi, smiErr := exec.Command("nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader").Output()
	inv, err := Open()
	if err != nil {
		t.Logf("no inventory: %v; nvidia-smi: %v", err, smiErr)
		missing, typed := errors.AsType[*gpu.NoDriverError](err)
		require.True(t, typed, "%v", err)
		require.NotEmpty(t, missing.Reason)
		require.Nil(t, inv)
		require.Error(t, smiErr, "nvidia-smi finds a driver")
		return
	}
	devices, err := inv.Devices(t.Context())
	require.NoError(t, err)
	var lines strings.Builder
	for i, d := range devices {
		t.Logf("%s: %+v", inv, d)
		fmt.Fprintf(&lines, "%d, %s, %s\n", d.Index, d.UUID, d.Model)
		require.Equal(t, i, d.Index)
		require.Positive(t, d.MemoryTotal)
		require.NotNil(t, d.Sample.MemoryFree)
		require.LessOrEqual(t, *d.Sample.MemoryFree, d.MemoryTotal)
	}
	if smiErr == nil {
		require.Equal(t, string(smi), lines.String())
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*turn)
	defer cancel()
	require.NoError(t, inv.Watch(ctx, func() {}))
	require.NoError(t, inv.Close())
	_, err = inv.Devices(t.Context())
	require.ErrorIs(t, err, gpu.ErrClosed)
}

func TestWithoutADriverThereIsAReason(t *testing.T) {
	for ret, want := range map[gonvml.Return]string{
		gonvml.ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found",
		gonvml.ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded",
	} {
		// Only Init is mocked: any other call would panic here, and abort the process with the real library.
		_, err := open(&mock.Interface{InitFunc: func() gonvml.Return { return ret }})
		_, typed := errors.AsType[*gpu.NoDriverError](err)
		require.True(t, typed)
		require.ErrorContains(t, err, want)
	}
	_, err := open(&mock.Interface{InitFunc: func() gonvml.Return { return gonvml.ERROR_LIB_RM_VERSION_MISMATCH }})
	require.ErrorIs(t, err, gonvml.ERROR_LIB_RM_VERSION_MISMATCH, "a broken driver is not a missing one")
}

func TestWhatTheDriverDoesNotSupportIsAbsent(t *testing.T) {
	inv := fake(t, bare("GPU-a"))
	got := read(t, inv)
	require.Equal(t, []gpu.Device{{UUID: "GPU-a", Vendor: gpu.NVIDIA, Model: "unknown"}}, got)
	require.Empty(t, got[0].Unfit())
}

func TestReadings(t *testing.T) {
	device := bare("GPU-a")
	device.GetNameFunc = func() (string, gonvml.Return) { return "NVIDIA H200", gonvml.SUCCESS }
	device.GetMemoryInfoFunc = func() (gonvml.Memory, gonvml.Return) {
		return gonvml.Memory{Total: uint64(141 * gpu.GiB), Free: uint64(140 * gpu.GiB)}, gonvml.SUCCESS
	}
	device.GetUtilizationRatesFunc = func() (gonvml.Utilization, gonvml.Return) { return gonvml.Utilization{Gpu: 0}, gonvml.SUCCESS }
	device.GetTemperatureFunc = func(gonvml.TemperatureSensors) (uint32, gonvml.Return) { return 31, gonvml.SUCCESS }
	device.GetPowerUsageFunc = func() (uint32, gonvml.Return) { return 76_512, gonvml.SUCCESS }
	device.GetMigModeFunc = func() (int, int, gonvml.Return) { return gonvml.DEVICE_MIG_DISABLE, 0, gonvml.SUCCESS }
	device.GetCpuAffinityFunc = func(int) ([]uint, gonvml.Return) { return []uint{0b1111, 1 << 63, 1}, gonvml.SUCCESS }
	device.GetMemoryAffinityFunc = func(int, gonvml.AffinityScope) ([]uint, gonvml.Return) { return []uint{0b10}, gonvml.SUCCESS }
	device.GetTotalEccErrorsFunc = func(gonvml.MemoryErrorType, gonvml.EccCounterType) (uint64, gonvml.Return) { return 0, gonvml.SUCCESS }
	device.GetRemappedRowsFunc = func() (int, int, bool, bool, gonvml.Return) { return 0, 1, true, false, gonvml.SUCCESS }
	device.GetGraphicsRunningProcessesFunc = func() ([]gonvml.ProcessInfo, gonvml.Return) {
		return []gonvml.ProcessInfo{{Pid: 1, UsedGpuMemory: uint64(gpu.MiB)}}, gonvml.SUCCESS
	}
	device.GetComputeRunningProcessesFunc = func() ([]gonvml.ProcessInfo, gonvml.Return) {
		return []gonvml.ProcessInfo{{Pid: 42, UsedGpuMemory: math.MaxUint64}}, gonvml.SUCCESS
	}

	got := read(t, fake(t, device))
	require.Equal(t, []gpu.Device{{
		UUID: "GPU-a", Vendor: gpu.NVIDIA, Model: "NVIDIA H200", MemoryTotal: 141 * gpu.GiB, NUMA: new(1), CPUs: "0-3,127-128",
		Sample: gpu.Sample{
			MemoryFree: new(140 * gpu.GiB), Utilisation: new(0), Temperature: new(31), Power: new(76_512), MIG: new(false),
			Processes: []gpu.Process{
				{PID: 1, Name: "process-1", Memory: new(gpu.MiB), Kind: gpu.Graphics},
				{PID: 42, Name: "process-42", Kind: gpu.Compute},
			},
		},
		Health: gpu.Health{ECCUncorrected: new(uint64(0)), RemapPending: new(true), RemapFailed: new(false)},
	}}, got)
	require.Equal(t, []string{"a row remap is pending: the device must be reset"}, got[0].Unfit())
}

func TestALostDeviceKeepsItsPlace(t *testing.T) {
	lost := bare("GPU-a")
	lost.GetUtilizationRatesFunc = func() (gonvml.Utilization, gonvml.Return) {
		return gonvml.Utilization{}, gonvml.ERROR_GPU_IS_LOST
	}
	got := read(t, fake(t, lost, nil, bare("GPU-c")))
	require.Len(t, got, 3)
	require.Equal(t, []string{"the GPU has fallen off the bus"}, got[0].Unfit())
	require.Equal(t, "GPU-unknown-at-index-1", got[1].UUID)
	require.Contains(t, got[1].Unfit()[0], "the device does not answer")
	require.Empty(t, got[2].Unfit())
}

func TestLinks(t *testing.T) {
	level := func(level gonvml.GpuTopologyLevel) func(gonvml.Device) (gonvml.GpuTopologyLevel, gonvml.Return) {
		return func(gonvml.Device) (gonvml.GpuTopologyLevel, gonvml.Return) { return level, gonvml.SUCCESS }
	}
	// a and b are connected directly, c and d through a switch, e only over PCIe, and f reports nothing.
	a, b := wired(bare("a"), 1, 2), wired(bare("b"), 2, 1)
	c, d := wired(bare("c"), 3, 0), wired(bare("d"), 4, 0)
	e, f := bare("e"), bare("f")
	for _, device := range []*mock.Device{a, b, c, d, e} {
		device.GetTopologyCommonAncestorFunc = level(gonvml.TOPOLOGY_SYSTEM)
	}
	got := read(t, fake(t, a, b, c, d, e, f))
	require.Equal(t, []int{0, 0, 2, 2, 4, 5}, gpu.Islands(got))
	require.Equal(t, gpu.Link{Peer: "b", Distance: gpu.Fabric}, got[0].Links[0])
	require.Equal(t, gpu.Link{Peer: "c", Distance: gpu.System}, got[0].Links[1])
	require.Empty(t, got[5].Links)
}

func TestXIDsAreKeptWithTheirDevice(t *testing.T) {
	device := bare("GPU-a")
	device.GetSupportedEventTypesFunc = func() (uint64, gonvml.Return) { return math.MaxUint64, gonvml.SUCCESS }
	device.RegisterEventsFunc = func(uint64, gonvml.EventSet) gonvml.Return { return gonvml.SUCCESS }
	inv := fake(t, bare("GPU-deaf"), device)

	ctx, cancel := context.WithCancel(t.Context())
	pending := []uint64{79, 31, 79}
	told := 0
	inv.lib.(*mock.Interface).EventSetCreateFunc = func() (gonvml.EventSet, gonvml.Return) {
		return &mock.EventSet{
			FreeFunc: func() gonvml.Return { return gonvml.SUCCESS },
			WaitFunc: func(uint32) (gonvml.EventData, gonvml.Return) {
				if len(pending) == 0 {
					cancel()
					return gonvml.EventData{}, gonvml.ERROR_TIMEOUT
				}
				xid := pending[0]
				pending = pending[1:]
				return gonvml.EventData{Device: device, EventType: gonvml.EventTypeXidCriticalError, EventData: xid}, gonvml.SUCCESS
			},
		}, gonvml.SUCCESS
	}
	require.NoError(t, inv.Watch(ctx, func() { told++ }))
	require.Equal(t, 3, told)
	got := read(t, inv)
	require.Empty(t, got[0].Health.XIDs)
	require.Equal(t, []int{31, 79}, got[1].Health.XIDs)
	require.Equal(t, []string{"XID 79: the GPU has fallen off the bus"}, got[1].Unfit())
}

// A call into the library after it was unloaded would abort the process.
func TestNothingEntersTheLibraryAfterClose(t *testing.T) {
	device := bare("GPU-a")
	inv := fake(t, device)
	var unloaded atomic.Bool
	inv.lib.(*mock.Interface).ShutdownFunc = func() gonvml.Return { unloaded.Store(true); return gonvml.SUCCESS }
	inside := make(chan struct{})
	first := sync.OnceFunc(func() { close(inside) })
	device.GetMemoryInfoFunc = func() (gonvml.Memory, gonvml.Return) {
		first()
		runtime.Gosched() // let Close run in between
		if unloaded.Load() {
			panic("in the library after Shutdown")
		}
		return gonvml.Memory{}, gonvml.ERROR_NOT_SUPPORTED
	}
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for {
				if _, err := inv.Devices(context.Background()); err != nil {
					return
				}
			}
		})
	}
	<-inside
	require.NoError(t, inv.Close())
	require.NoError(t, inv.Close())
	readers.Wait()
	require.ErrorIs(t, inv.Watch(context.Background(), func() {}), gpu.ErrClosed)
}

func read(t *testing.T, inv *Inventory) []gpu.Device {
	t.Helper()
	devices, err := inv.Devices(t.Context())
	require.NoError(t, err)
	return devices
}

// fake opens an inventory on a library with these devices; a nil one is lost.
func fake(t *testing.T, devices ...*mock.Device) *Inventory {
	t.Helper()
	inv, err := open(&mock.Interface{
		InitFunc:                   func() gonvml.Return { return gonvml.SUCCESS },
		ShutdownFunc:               func() gonvml.Return { return gonvml.SUCCESS },
		SystemGetDriverVersionFunc: func() (string, gonvml.Return) { return "580.95.05", gonvml.SUCCESS },
		SystemGetProcessNameFunc:   func(pid int) (string, gonvml.Return) { return fmt.Sprintf("process-%d", pid), gonvml.SUCCESS },
		DeviceGetCountFunc:         func() (int, gonvml.Return) { return len(devices), gonvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (gonvml.Device, gonvml.Return) {
			if devices[i] == nil {
				return nil, gonvml.ERROR_GPU_IS_LOST
			}
			return devices[i], gonvml.SUCCESS
		},
		ExtensionsFunc: func() gonvml.ExtendedInterface {
			return &mock.ExtendedInterface{LookupSymbolFunc: func(string) error { return nil }}
		},
	})
	require.NoError(t, err)
	require.Equal(t, "NVIDIA driver 580.95.05", inv.String())
	return inv
}

// bare returns a device that reports its UUID and supports nothing else.
func bare(uuid string) *mock.Device {
	const no = gonvml.ERROR_NOT_SUPPORTED
	return &mock.Device{
		GetUUIDFunc:                     func() (string, gonvml.Return) { return uuid, gonvml.SUCCESS },
		GetNameFunc:                     func() (string, gonvml.Return) { return "", no },
		GetMemoryInfoFunc:               func() (gonvml.Memory, gonvml.Return) { return gonvml.Memory{}, no },
		GetUtilizationRatesFunc:         func() (gonvml.Utilization, gonvml.Return) { return gonvml.Utilization{}, no },
		GetTemperatureFunc:              func(gonvml.TemperatureSensors) (uint32, gonvml.Return) { return 0, no },
		GetPowerUsageFunc:               func() (uint32, gonvml.Return) { return 0, no },
		GetMigModeFunc:                  func() (int, int, gonvml.Return) { return 0, 0, no },
		GetCpuAffinityFunc:              func(int) ([]uint, gonvml.Return) { return nil, no },
		GetMemoryAffinityFunc:           func(int, gonvml.AffinityScope) ([]uint, gonvml.Return) { return nil, no },
		GetTotalEccErrorsFunc:           func(gonvml.MemoryErrorType, gonvml.EccCounterType) (uint64, gonvml.Return) { return 0, no },
		GetRemappedRowsFunc:             func() (int, int, bool, bool, gonvml.Return) { return 0, 0, false, false, no },
		GetComputeRunningProcessesFunc:  func() ([]gonvml.ProcessInfo, gonvml.Return) { return nil, no },
		GetGraphicsRunningProcessesFunc: func() ([]gonvml.ProcessInfo, gonvml.Return) { return nil, no },
		GetPciInfoFunc:                  func() (gonvml.PciInfo, gonvml.Return) { return gonvml.PciInfo{}, no },
		GetNvLinkStateFunc:              func(int) (gonvml.EnableState, gonvml.Return) { return 0, no },
		GetTopologyCommonAncestorFunc:   func(gonvml.Device) (gonvml.GpuTopologyLevel, gonvml.Return) { return 0, no },
		GetSupportedEventTypesFunc:      func() (uint64, gonvml.Return) { return 0, no },
	}
}

// wired puts the device on a bus, with one NVLink to the device on another bus, or to a switch if that is 0.
func wired(device *mock.Device, bus, peer uint32) *mock.Device {
	device.GetPciInfoFunc = func() (gonvml.PciInfo, gonvml.Return) { return gonvml.PciInfo{Bus: bus}, gonvml.SUCCESS }
	device.GetNvLinkStateFunc = func(link int) (gonvml.EnableState, gonvml.Return) {
		if link > 0 {
			return gonvml.FEATURE_DISABLED, gonvml.SUCCESS
		}
		return gonvml.FEATURE_ENABLED, gonvml.SUCCESS
	}
	device.GetNvLinkRemoteDeviceTypeFunc = func(int) (gonvml.IntNvLinkDeviceType, gonvml.Return) {
		if peer == 0 {
			return gonvml.NVLINK_DEVICE_TYPE_SWITCH, gonvml.SUCCESS
		}
		return gonvml.NVLINK_DEVICE_TYPE_GPU, gonvml.SUCCESS
	}
	device.GetNvLinkRemotePciInfoFunc = func(int) (gonvml.PciInfo, gonvml.Return) {
		return gonvml.PciInfo{Bus: peer}, gonvml.SUCCESS
	}
	return device
}
