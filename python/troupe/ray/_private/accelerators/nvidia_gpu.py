"""ray._private.accelerators.nvidia_gpu."""

from . import NvidiaGPUAcceleratorManager

__all__ = ["NvidiaGPUAcceleratorManager"]
