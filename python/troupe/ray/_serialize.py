"""Values as frames: a pickle, its large buffers out of band, and the references and handles it contains.

A frame is a list [pickle, buffers, references, handles] that msgpack with Troupe's array types can encode, or, for most
values, the pickle alone. A receiver registers the references and handles of a frame on arrival, before it unpickles
anything. A small result of a plain type needs no pickle: its frame is a tuple with the value itself.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from .._codec import Tensor

_OUT_OF_BAND = 4096  # buffers of at least this many bytes are sent outside the pickle

Frame = bytes | list[Any] | tuple[Any]

_local = threading.local()

# Make a reference and a handle from the fields in a frame; set by the modules that define them.
read_ref: Callable[[list[Any]], object] = list
read_handle: Callable[[list[Any]], object] = list


class Contents:
    """The object references and actor handles inside a value."""

    __slots__ = ("handles", "refs")

    def __init__(self) -> None:
        self.refs: list[Any] = []
        self.handles: list[Any] = []


NONE: list[
    Any
] = []  # shared empty list, never modified: most calls need several, and each new list costs garbage collector time
EMPTY = Contents()  # shared contents of values without references and handles
PLAIN_TYPES = frozenset((type(None), bool, int, float, str, bytes))
_INTEGERS = range(-(1 << 63), 1 << 63)  # of 64 bits, which msgpack can encode


def needs_no_pickle(value: Any) -> bool:
    """Returns whether a value is small and of a plain type, so that an answer can carry it as it is."""
    kind = type(value)
    if kind is bytes:
        return len(value) < _OUT_OF_BAND
    if kind is str:
        return len(value) < _OUT_OF_BAND and value.isascii()  # another may have a lone surrogate, which msgpack refuses
    if kind is int:
        return value in _INTEGERS
    return value is None or kind is bool or kind is float


def note_ref(ref: object) -> None:
    """Records a reference that is being pickled."""
    contents = getattr(_local, "contents", None)
    if contents is not None:
        contents.refs.append(ref)


def note_handle(handle: object) -> None:
    """Records a handle that is being pickled."""
    contents = getattr(_local, "contents", None)
    if contents is not None:
        contents.handles.append(handle)


def dumps(value: object, keeps_tensors: bool = False) -> tuple[Frame, Contents]:
    """Returns the frame of a value and its contents. The sender keeps the contents alive until the receiver has
    registered them. keeps_tensors: tensors on a device stay there, and the receiver takes them by the shortest way."""
    if type(value) in PLAIN_TYPES:
        return pickle.dumps(value, 5), EMPTY
    buffers: list[Any] = []
    contents = Contents()
    outer = getattr(_local, "contents", None)
    _local.contents = contents
    try:
        data = _pickled_with_tensors(value, buffers) if keeps_tensors else _pickled(value, buffers)
    finally:
        _local.contents = outer
    if not (buffers or contents.refs or contents.handles):
        return data, EMPTY
    return [
        data,
        buffers,
        [r._wire_with_value() for r in contents.refs],
        [h._wire() for h in contents.handles],
    ], contents


def _pickled(value: object, buffers: list[object]) -> bytes:
    return bytes(cloudpickle.dumps(value, protocol=5, buffer_callback=_collector(buffers)))


def _collector(buffers: list[object]) -> Callable[[pickle.PickleBuffer], bool]:
    """Returns the callback of a pickler that collects large buffers."""

    def beside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUT_OF_BAND:
            return True
        buffers.append(Tensor("uint8", (raw.nbytes,), raw))
        return False

    return beside


class _TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a value without the tensors in it that are on a device: they are among the buffers as they are."""

    def __init__(self, file: io.BytesIO, buffers: list[object]) -> None:
        collect = _collector(buffers)
        super().__init__(file, protocol=5, buffer_callback=lambda b: self._stays(b) if self._tensors else collect(b))
        self._buffers = buffers
        self._tensors: list[Any] = []

    def _stays(self, buffer: pickle.PickleBuffer) -> bool:
        self._buffers.append(self._tensors.pop())
        return False

    def reducer_override(self, value: Any) -> Any:
        if type(value).__module__ != "torch" or type(value).__name__ != "Tensor" or not value.is_cuda:
            return super().reducer_override(value)
        self._tensors.append(value.detach())
        return _same, (pickle.PickleBuffer(bytearray(1)),)  # in the stream, the place of the next buffer


def _same(value: object) -> object:
    return value


def _pickled_with_tensors(value: object, buffers: list[object]) -> bytes:
    file = io.BytesIO()
    _TensorPickler(file, buffers).dump(value)
    return file.getvalue()


def loads(frame: Frame) -> Any:
    """Unpickles a new copy of the value. Its large arrays are read-only views of the frame."""
    if type(frame) is tuple:
        return frame[0]
    if type(frame) is not list:
        return pickle.loads(frame)  # type: ignore[arg-type]
    return pickle.loads(frame[0], buffers=[b if hasattr(b, "is_cuda") else _read_only(b) for b in frame[1]])


def _read_only(buffer: Any) -> memoryview:
    if isinstance(buffer, Tensor):
        buffer = buffer.data
    return memoryview(buffer).toreadonly().cast("B")


def size(frame: Frame) -> int:
    """Returns the approximate size of a frame in bytes."""
    if type(frame) is not list:
        return len(frame)
    return len(frame[0]) + sum(len(_read_only(b)) for b in frame[1] if not hasattr(b, "is_cuda"))


def copy_buffers(frame: Frame) -> None:
    """Replaces the frame's buffers by copies, since the code that created them may write to them."""
    if type(frame) is not list:
        return
    frame[1] = [Tensor("uint8", (len(data),), data) for data in (bytes(_read_only(b)) for b in frame[1])]


def held(frame: Frame) -> Sequence[object]:
    """Returns the references and handles of a frame as objects of this process. They keep the referenced objects and
    actors alive."""
    if type(frame) is not list or not (frame[2] or frame[3]):
        return ()
    return [read_ref(r) for r in frame[2]] + [read_handle(h) for h in frame[3]]
