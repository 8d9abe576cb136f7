"""ray._private.accelerators.intel_gpu."""

from . import IntelGPUAcceleratorManager

__all__ = ["IntelGPUAcceleratorManager"]
