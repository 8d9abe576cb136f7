"""The base class of communicators, which programs derive from. Compiled graphs do not use them: tensors go through CUDA
IPC on one host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TorchTensorAllocator = Callable[..., Any]


class Communicator:
    """A group of actors that exchange tensors."""
