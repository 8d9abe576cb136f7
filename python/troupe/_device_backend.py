"""What the transport of tensors asks of a device library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Wait = Callable[[], None]  # waits for the end of a copy


def nothing() -> None:
    """Is a Wait for what is complete."""


class DeviceError(Exception):
    """The device library refused something: another way is tried."""


class Lent:
    """A tensor that this process keeps for others."""

    __slots__ = ("device", "dtype", "handle", "nbytes", "offset", "pointer", "shape", "uuid", "value")

    def __init__(self, value: Any, dtype: str, shape: tuple[int, ...], nbytes: int, pointer: int, device: int, uuid: bytes, handle: bytes, offset: int) -> None:
        self.value = value  # the contiguous tensor
        self.dtype, self.shape, self.nbytes = dtype, shape, nbytes
        self.pointer = pointer
        self.device = device  # its index in this process
        self.uuid = uuid
        self.handle = handle  # of the allocation; empty: there is none
        self.offset = offset  # in the allocation


class Backend(Protocol):
    """A device library. Every method may be called on any thread."""

    def ready(self) -> bool:
        """Whether this process uses devices. If not, no other method but is_tensor is called."""

    def is_tensor(self, value: Any) -> bool:
        """Whether the value is a tensor on a device that can be lent."""

    def lend(self, value: Any, snapshot: bool, room: dict[int, int]) -> Lent | None:
        """The tensor, contiguous: a copy with snapshot. None: there is no memory for the copy. It is complete after wait. room: bytes that the
        copies of one message may still take, by device; the first one finds them out."""

    def wait(self, device: int) -> None:
        """Waits until tensors of lend are complete: other processes do not wait for this one's kernels."""

    def reaches(self, uuid: bytes) -> bool:
        """Whether this process sees the device."""

    def open(self, fields: dict[str, Any], nbytes: int, keep: Any) -> tuple[Any, Wait]:
        """The tensor of an IPC handle: a copy, complete after the wait, for which the producer must keep the tensor; or with keep the memory
        itself, for as long as it is used; keep lives as long."""

    def empty(self, nbytes: int) -> tuple[Any, int]:
        """Room for so many bytes on this process's device, and its address."""

    def tensor(self, room: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """The tensor in such room."""

    def to_device(self, value: Any) -> Any:
        """A copy of a tensor in memory on this process's device."""

    def copy(self, lent: Lent) -> Any:
        """A copy on the same device."""

    def read(self, lent: Lent, offset: int, address: int, n: int) -> Wait:
        """Begins a copy from a lent tensor to memory."""

    def write(self, pointer: int, address: int, n: int) -> Wait:
        """Begins a copy from memory to a place in room of empty."""

    def register(self, address: int, n: int, writable: bool) -> bool:
        """Pins memory, which makes copies faster."""

    def unregister(self, address: int) -> None: ...
