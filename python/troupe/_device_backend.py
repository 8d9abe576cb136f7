"""The interface of a device library for the transport of tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Wait = Callable[[], None]  # waits for the end of a copy


def nothing() -> None:
    """Waits for nothing: the Wait of a copy that is already complete."""


class DeviceError(Exception):
    """The device library rejected an operation; another path is tried."""


class Lent:
    """A tensor that this process keeps for others."""

    __slots__ = (
        "__weakref__",
        "device",
        "dtype",
        "handle",
        "nbytes",
        "offset",
        "pointer",
        "raw",
        "shape",
        "uuid",
        "value",
    )

    def __init__(
        self,
        value: torch.Tensor,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        pointer: int,
        device: int,
        uuid: bytes,
        handle: bytes,
        offset: int,
    ) -> None:
        self.value = value  # the contiguous tensor
        self.dtype, self.shape, self.nbytes = dtype, shape, nbytes
        self.pointer = pointer
        self.device = device  # index of the device in this process
        self.uuid = uuid
        self.handle = handle  # IPC handle of the allocation; empty: there is none
        self.offset = offset  # offset in the allocation
        self.raw = False  # whether receivers without the device get its bytes alone, not a value


class Mover(Protocol):
    """Copies between tensors and arenas of bytes on one device, beside its other work. One thread uses it, but for
    mark."""

    def mark(self) -> object:
        """Returns a point in the work that the calling thread has given to the device so far."""

    def at_work(self, after: object) -> contextlib.AbstractContextManager[None]:
        """Returns a block in which the methods below are called: their copies wait for the mark `after`."""

    def memory(self, nbytes: int) -> Lent:
        """Allocates zeros that other processes can open. Raises DeviceError if memory is short."""

    def table(self, copies: bytes) -> object:
        """Prepares copies, records of seven 64-bit integers: the address in a tensor, the offset in an arena, the bytes
        of a run, the numbers of runs in two dimensions, the inner one first, and the bytes between them in the
        tensor."""

    def pack(self, table: Any, arena: int) -> None:
        """Copies tensors to the arena at an address."""

    def unpack(self, table: Any, arena: int) -> None:
        """Copies the arena at an address to tensors."""

    def digests(self, parts: Sequence[tuple[int, int, int]]) -> list[int]:
        """Copies bytes, in pieces between which others use the device, and returns their digests when they are there.
        A part is a source, a target, or 0 for a digest without a copy, and a number of bytes. Both are aligned to 8
        bytes, and followed by zeros up to a multiple of 8."""

    def wait(self) -> None:
        """Waits for all copies."""


class Backend(Protocol):
    """A device library. Every method may be called on any thread."""

    def ready(self) -> bool:
        """Returns whether this process uses devices. If not, no other method except is_tensor is called."""

    def is_tensor(self, value: object) -> bool:
        """Returns whether the value is a device tensor that can be lent."""

    def lend(self, value: torch.Tensor, snapshot: bool, room: dict[int, int]) -> Lent | None:
        """Returns the tensor in contiguous form, with snapshot as a copy; None if memory for the copy is short. The
        tensor is complete after wait. room has the bytes, by device, that the copies of one message may still use; the
        first copy on a device sets its entry."""

    def uuid_of(self, device: int) -> bytes:
        """Returns the identity of a device, the same in all processes."""

    def mover(self, device: int) -> Mover:
        """Returns what copies weights on a device, for one thread."""

    def device_of(self, value: torch.Tensor) -> int:
        """Returns the index of the device that has the tensor."""

    def pack(self, values: Sequence[torch.Tensor], starts: list[int], nbytes: int, room: dict[int, int]) -> Lent | None:
        """Returns one array of bytes with copies of tensors of one device, each at its start; otherwise as lend."""

    def wait(self, device: int) -> None:
        """Waits until the tensors from lend and pack are complete, because other processes do not wait for this one's
        kernels."""

    def reaches(self, uuid: bytes) -> bool:
        """Returns whether this process can access the device."""

    def open(self, fields: Mapping[str, object], nbytes: int, keep: object) -> tuple[torch.Tensor, Wait]:
        """Opens the tensor of an IPC handle. Without keep, returns a copy, complete after the Wait, until which the
        producer must keep the tensor. With keep, returns the memory itself, and keeps `keep` alive as long as the
        memory is used."""

    def address_of(self, value: torch.Tensor) -> int:
        """Returns where a device tensor is."""

    def empty(self, nbytes: int) -> tuple[torch.Tensor, int]:
        """Allocates bytes on this process's device. Returns the memory and its address."""

    def tensor(self, room: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the tensor in memory from empty."""

    def to_device(self, value: torch.Tensor) -> torch.Tensor:
        """Copies a tensor from host memory to this process's device."""

    def copy(self, lent: Lent) -> torch.Tensor:
        """Copies a lent tensor on the same device."""

    def read(self, lent: Lent, offset: int, address: int, n: int) -> Wait:
        """Starts a copy from a lent tensor to host memory."""

    def write(self, pointer: int, address: int, n: int) -> Wait:
        """Starts a copy from host memory into memory from empty."""

    def register(self, address: int, n: int, writable: bool) -> bool:
        """Pins host memory, which makes copies faster. Returns whether it succeeded."""

    def unregister(self, address: int) -> None: ...
