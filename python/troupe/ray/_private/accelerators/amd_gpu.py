"""ray._private.accelerators.amd_gpu."""

from . import AMDGPUAcceleratorManager

__all__ = ["AMDGPUAcceleratorManager"]
