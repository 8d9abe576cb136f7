"""ray._private.accelerators.npu."""

from . import NPUAcceleratorManager

__all__ = ["NPUAcceleratorManager"]
