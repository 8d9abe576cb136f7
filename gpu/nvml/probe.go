//go:build cgo

package nvml

import (
	"cmp"
	"math"
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"troupe/gpu"
)

// probe reads one device once. Values that the driver does not report stay absent; only answers that mean the loss of
// the device are recorded.
type probe struct {
	inv    *Inventory
	handle gonvml.Device
	lost   string
}

// ok reports whether the reading that came with ret is valid.
func (p *probe) ok(ret gonvml.Return) bool {
	switch ret {
	case gonvml.ERROR_GPU_IS_LOST:
		p.lost = "the GPU has fallen off the bus"
	case gonvml.ERROR_RESET_REQUIRED:
		p.lost = "the GPU must be reset before it can be used"
	}
	return ret == gonvml.SUCCESS
}

func (p *probe) sample() gpu.Sample {
	var s gpu.Sample
	if memory, ret := p.handle.GetMemoryInfo(); p.ok(ret) {
		s.MemoryFree = new(gpu.Bytes(memory.Free))
	}
	if rates, ret := p.handle.GetUtilizationRates(); p.ok(ret) {
		s.Utilisation = new(int(rates.Gpu))
	}
	if degrees, ret := p.handle.GetTemperature(gonvml.TEMPERATURE_GPU); p.ok(ret) {
		s.Temperature = new(int(degrees))
	}
	if milliwatts, ret := p.handle.GetPowerUsage(); p.ok(ret) {
		s.Power = new(int(milliwatts))
	}
	if p.inv.has("nvmlDeviceGetMigMode") {
		if current, _, ret := p.handle.GetMigMode(); p.ok(ret) {
			s.MIG = new(current == gonvml.DEVICE_MIG_ENABLE)
		}
	}
	s.Processes = p.processes()
	return s
}

func (p *probe) health() gpu.Health {
	var h gpu.Health
	if count, ret := p.handle.GetTotalEccErrors(gonvml.MEMORY_ERROR_TYPE_UNCORRECTED, gonvml.VOLATILE_ECC); p.ok(ret) {
		h.ECCUncorrected = new(count)
	}
	if p.inv.has("nvmlDeviceGetRemappedRows") {
		if _, _, pending, failed, ret := p.handle.GetRemappedRows(); p.ok(ret) {
			h.RemapPending, h.RemapFailed = new(pending), new(failed)
		}
	}
	h.Lost = p.lost
	return h
}

// processes returns nil unless the driver reports at least the compute processes.
func (p *probe) processes() []gpu.Process {
	compute, ret := p.handle.GetComputeRunningProcesses()
	if !p.ok(ret) {
		return nil
	}
	processes := make([]gpu.Process, 0, len(compute))
	for _, info := range compute {
		processes = append(processes, p.process(info, gpu.Compute))
	}
	if graphics, ret := p.handle.GetGraphicsRunningProcesses(); p.ok(ret) {
		for _, info := range graphics {
			processes = append(processes, p.process(info, gpu.Graphics))
		}
	}
	slices.SortStableFunc(processes, func(a, b gpu.Process) int { return cmp.Compare(a.PID, b.PID) })
	return processes
}

func (p *probe) process(info gonvml.ProcessInfo, kind gpu.ProcessKind) gpu.Process {
	process := gpu.Process{PID: int(info.Pid), Kind: kind}
	if name, ret := p.inv.lib.SystemGetProcessName(process.PID); ret == gonvml.SUCCESS {
		process.Name = name
	}
	// All ones means unknown.
	if info.UsedGpuMemory != math.MaxUint64 {
		process.Memory = new(gpu.Bytes(info.UsedGpuMemory))
	}
	return process
}
