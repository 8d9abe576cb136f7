"""ray._private.accelerators: how many devices of each kind this machine has, as the kernel shows them."""

from __future__ import annotations

import glob

from ..._refused import import_only


class AcceleratorManager:
    """The devices of one kind."""

    resource_name = "GPU"
    visible_devices = "CUDA_VISIBLE_DEVICES"  # the variable that says which devices a process may use
    devices = ""  # the pattern of the files, one for each device

    @classmethod
    def get_resource_name(cls) -> str:
        return cls.resource_name

    @classmethod
    def get_visible_accelerator_ids_env_var(cls) -> str:
        return cls.visible_devices

    @classmethod
    def get_current_node_num_accelerators(cls) -> int:
        return len(glob.glob(cls.devices))

    @classmethod
    def get_current_node_accelerator_type(cls) -> str | None:
        """Returns the type of the first device, or None if it is not known."""
        return None


class NvidiaGPUAcceleratorManager(AcceleratorManager):
    devices = "/proc/driver/nvidia/gpus/*"

    @classmethod
    def get_current_node_accelerator_type(cls) -> str | None:
        """Returns the type in Ray's form: H100, A100, …"""
        for path in sorted(glob.glob(f"{cls.devices}/information")):
            with open(path) as f:
                model = next((line.partition(":")[2] for line in f if line.startswith("Model:")), "")
            words = [w for w in model.replace("-", " ").split() if w not in ("NVIDIA", "Tesla")]
            return words[0] if words else None
        return None


class AMDGPUAcceleratorManager(AcceleratorManager):
    visible_devices = "HIP_VISIBLE_DEVICES"
    devices = "/sys/module/amdgpu/drivers/pci:amdgpu/[0-9]*"


class IntelGPUAcceleratorManager(AcceleratorManager):
    visible_devices = "ONEAPI_DEVICE_SELECTOR"
    devices = "/sys/bus/pci/drivers/xe/[0-9]*"


class NPUAcceleratorManager(AcceleratorManager):
    resource_name = "NPU"
    visible_devices = "ASCEND_RT_VISIBLE_DEVICES"
    devices = "/dev/davinci[0-9]*"


def __getattr__(name: str) -> object:
    return import_only(__name__, name)
