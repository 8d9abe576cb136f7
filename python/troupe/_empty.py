"""Arrays in the memory from which results are sent."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

from . import _codec, _core, _errors, _seam


class _Room:
    """The memory of one array: the header of a body, and the elements."""

    __slots__ = ("array", "at", "head", "nbytes")

    def __init__(self, at: int, nbytes: int) -> None:
        self.at = at
        self.nbytes = nbytes  # size of the elements
        self.head = b""  # the header; empty until the array is sent
        self.array: Any = None  # weak reference to the array


_rooms: dict[int, _Room] = {}  # by address of the elements


def empty(shape: int | Sequence[int], dtype: Any = "float32") -> Any:
    """Returns an uninitialized numpy array that a method can return without a copy.

    Fill the array and return it: the receivers use the same memory. The array is read-only from then on, so create
    another one for the next result. Do not write to views of it, or to tensors made from it by torch.from_numpy,
    either. The array does not exist in forked children.
    """
    import numpy

    kind = numpy.dtype(dtype)
    if kind.name not in _codec._SIZES:
        raise _errors.InvalidError(f"an array of dtype {kind} cannot be sent; there are {', '.join(_codec._SIZES)}")
    axes = (shape,) if isinstance(shape, int) else tuple(int(axis) for axis in shape)
    if any(axis < 0 for axis in axes):
        raise _errors.InvalidError(f"shape is {shape!r}; no axis may be negative")
    nbytes = kind.itemsize
    for axis in axes:
        nbytes *= axis
    if nbytes <= _seam.LARGE:
        return numpy.empty(axes, dtype=kind)
    core = _core.get()
    core.check()
    size = _codec.ALIGN + nbytes
    at = core.lib.troupe_empty(size)
    if not at:
        raise MemoryError(f"no room for an array of {nbytes} bytes")
    memory = _core._span(size).from_address(at)
    room = _rooms[at + _codec.ALIGN] = _Room(at, nbytes)
    weakref.finalize(memory, _end, core, at).atexit = False
    array = numpy.frombuffer(memoryview(memory).cast("B")[_codec.ALIGN : size], dtype=kind).reshape(axes)
    room.array = weakref.ref(array)
    return array


def _end(core: _core.Core, at: int) -> None:
    _rooms.pop(at + _codec.ALIGN, None)
    _core._give_back(core, at)


def place(core: _core.Core, body: bytes | _codec.Walk) -> int:
    """Returns the address of memory with a result: that of the array if the result is an array from empty, otherwise
    new memory that the core takes over."""
    if _rooms and isinstance(body, _codec.Walk):
        pieces = body.pieces()
        if len(pieces) == 2 and len(pieces[0]) == _codec.ALIGN and isinstance(pieces[1], memoryview):
            room = _rooms.get(_codec.address_of(pieces[1]))
            if room is not None and room.nbytes == len(pieces[1]) and room.head in (b"", pieces[0]):
                if not room.head:
                    ctypes.memmove(room.at, bytes(pieces[0]), _codec.ALIGN)
                    room.head = bytes(pieces[0])
                array = room.array()
                if array is not None:
                    array.flags.writeable = False
                return room.at
    return core.place(body)
