"""Accelerator names for accelerator_type; the option itself is refused."""

NVIDIA_TESLA_V100, NVIDIA_TESLA_P100, NVIDIA_TESLA_T4, NVIDIA_TESLA_P4, NVIDIA_TESLA_K80, NVIDIA_TESLA_A10G = (
    "V100",
    "P100",
    "T4",
    "P4",
    "K80",
    "A10G",
)
NVIDIA_L4, NVIDIA_L40S, NVIDIA_A100, NVIDIA_H100, NVIDIA_H200, NVIDIA_H20, NVIDIA_B200, NVIDIA_B300 = (
    "L4",
    "L40S",
    "A100",
    "H100",
    "H200",
    "H20",
    "B200",
    "B300",
)
