"""Encodes Python values for the wire: msgpack with the extension types of docs/wire.md.

Small values go through msgpack's own packer. A value that contains a large array is walked here instead, so that the
array is copied once, to its aligned place in the body. Large arrays that are received are views of the body.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import msgpack

from . import _errors, _traceback

if TYPE_CHECKING:
    import decimal

    import torch

TENSOR, BATCH, HANDLE, REFERENCE, ARGUMENT, DEVICE = 1, 2, 3, 4, 5, 6
TUPLE, SET, FROZENSET, DATACLASS, ENUM, SCALAR, PICKLE, EXCEPTION, COMPLEX, DECIMAL = range(16, 26)
DATETIME, QUEUE, STREAM, OBJECT_ARRAY, ORDERED_DICT = range(26, 31)

ALIGN = 64
BIG = 16 << 10  # bytes from which an array makes the encoder walk the value
MAX_DEPTH = 100
_SMALL = 1 << 20  # bytes from which an array is copied by several threads
_MANY = 50_000  # elements above which a large body goes to msgpack's parser

Buffer = bytes | bytearray | memoryview
Copy = Callable[[int, int, int], Any]  # copies bytes: destination, source, count

# Wire names are numpy's and torch's dtype names. _TORCH_ONLY lists the dtypes that numpy lacks.
_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
_TORCH_ONLY = {"bfloat16": "int16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}


class Tensor:
    """An array whose dtype no installed library supports: its bytes, with dtype and shape."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Buffer) -> None:
        size = _SIZES.get(dtype)
        if size is None:
            raise _errors.InvalidError(f"there is no dtype {dtype!r}; there are {', '.join(_SIZES)}")
        n = size
        for axis in shape:
            n *= axis
        if n != len(data):
            raise _errors.InvalidError(f"a {dtype} tensor of shape {shape} has {n} bytes, not {len(data)}")
        self.dtype, self.shape, self.data = dtype, tuple(shape), data

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(len(self))
        row = len(self.data) // len(self) if len(self) else 0
        return Tensor(
            self.dtype, (max(0, stop - start), *self.shape[1:]), memoryview(self.data)[start * row : stop * row]
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Tensor)
            and (self.dtype, self.shape) == (other.dtype, other.shape)
            and bytes(self.data) == bytes(other.data)
        )

    def __repr__(self) -> str:
        return f"troupe.Tensor({self.dtype}, {self.shape})"


class Big(Exception):
    """Raised by the packer for a value that contains a large array and must be walked."""


class Codec:
    """Encodes and decodes the values exchanged with one other process. It knows whether pickles and handles are
    allowed."""

    __slots__ = ("_free", "device", "handles", "pickle", "share", "snapshot", "why_not")

    def __init__(self, pickle: bool = False, why_not: str = "", handles: bool = False) -> None:
        self.pickle = pickle
        self.why_not = why_not or "pickles travel only in calls, between the processes of one run"
        self.handles = handles  # whether a handle is decoded to a cluster or a worker; otherwise to its fields
        self.device = False  # whether large device tensors are encoded as references,
        self.snapshot = True  # to a snapshot that later writes do not change,
        self.share = False  # and used in place by the receiver
        self._free: list[Any] = []

    def on_device(self, snapshot: bool = True, share: bool = False) -> Codec:
        """Returns a copy of this codec that leaves large tensors on their device."""
        codec = Codec(self.pickle, self.why_not, self.handles)
        codec.device, codec.snapshot, codec.share = True, snapshot, share
        return codec

    def lending(self) -> Any:
        """Returns the collector of tensors that stay on their device, for one message or several; None if this codec
        copies tensors."""
        return _devices().Lending(self.snapshot, self.share) if self.device else None

    # Encoding.

    def encode(self, value: object) -> bytes | Walk:
        """Encodes a value as bytes, or as a Walk that writes itself into a buffer."""
        try:
            return self._pack(value)
        except Big:
            lending = self.lending()
            try:
                walk = self.walk(lending, lambda walk: walk.value(value, 0))
                if lending is not None:
                    lending.finish()
            except BaseException:
                take_references()  # drop the references to lent tensors that will not be sent
                raise
            return walk.join() if walk.lent and walk.size < BIG else walk

    def walk(self, lending: Any, write: Callable[[Walk], object]) -> Walk:
        """Returns a Walk that write has filled. lending.finish must be called before it is sent."""
        blocks = None if lending is None else lending.blocks()
        walk = Walk(self, lending, blocks)
        write(walk)
        if blocks is None or not blocks.tensors:
            return walk
        if blocks.lend(_note):
            walk.lent += len(blocks)
            return walk
        walk = Walk(self, lending)  # the small tensors travel in the body
        write(walk)
        return walk

    def _pack(self, value: object) -> bytes:
        packer = self._free.pop() if self._free else msgpack.Packer(default=self._default, strict_types=True)
        try:
            body: bytes = packer.pack(value)
        except _errors.Error:
            raise
        except (ValueError, OverflowError, RecursionError) as err:
            raise _errors.EncodeError(f"{_short(value)} cannot be sent: {_errors.text_of(err)}") from err
        # A packer that raised is not reused: it holds half of the value.
        self._free.append(packer)
        return body

    def _default(self, value: Any) -> object:
        kind = type(value)
        if kind is tuple:
            return msgpack.ExtType(TUPLE, self._pack(list(value)))
        if is_tensor(value):
            if self.device and getattr(value, "is_cuda", False):
                raise Big  # lending must happen once, and only a walk encodes each tensor once
            return _small(value)
        if isinstance(value, Walked) and value.big():
            raise Big
        if isinstance(value, Eventual):
            found = value.reference()
            if found is not None:
                return msgpack.ExtType(REFERENCE, _name_of(found))
            value = value.arrived()
            return value if type(value) in _NATIVE else self._default(value)
        code, inner = self._ext(value)
        if code < 0:
            return inner  # a type that msgpack encodes itself
        return msgpack.ExtType(code, inner if isinstance(inner, bytes) else self._pack(inner))

    def _ext(self, value: object) -> tuple[int, object]:
        """Returns the extension type of a value that msgpack cannot encode, and its payload: bytes if encoded
        already."""
        kind = type(value)
        encoder = _ENCODERS.get(kind)
        if encoder is not None:
            pair: tuple[int, Any] = encoder(value)
            return pair
        if isinstance(value, Walked):
            return value.wire()
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return SCALAR, self._pack([value.dtype.str, value.tobytes()])
        if is_array(value):
            return OBJECT_ARRAY, _object_array_fields(value)
        if kind.__module__ != "__main__":
            # A tensorclass of tensordict has the marks of a dataclass, but its fields are not all of its state.
            if hasattr(kind, "__dataclass_fields__") and not hasattr(kind, "__torch_function__"):
                return DATACLASS, [
                    kind.__module__,
                    kind.__qualname__,
                    {n: getattr(value, n) for n in kind.__dataclass_fields__},
                ]
            enum = sys.modules.get("enum")
            if enum is not None and isinstance(value, enum.Enum):
                return ENUM, [kind.__module__, kind.__qualname__, value.name]
        return PICKLE, self._dump(value)

    def _dump(self, value: object) -> bytes:
        if not self.pickle:
            raise _errors.EncodeError(
                f"{_short(value)} of type {type(value).__module__}.{type(value).__qualname__} cannot be sent: msgpack "
                "has no form "
                f"for it, and {self.why_not}; send dicts, lists, numbers, strings, bytes, arrays, or a dataclass of a "
                "module "
                "that both sides can import"
            )
        import cloudpickle

        me = get_ident()
        outer = me in _pickling
        _pickling.add(me)
        try:
            return bytes(cloudpickle.dumps(value, protocol=5))
        except Exception as err:
            raise _errors.EncodeError(
                f"{_short(value)} of type {type(value).__qualname__} cannot be pickled: {_errors.text_of(err)}"
            ) from err
        finally:
            if not outer:
                _pickling.discard(me)

    # Decoding.

    def decode(self, body: Buffer, copy: Copy | None = None, share: bool = False) -> Any:
        """Decodes a body. Arrays are views of a large body, which must belong to this value alone; with copy, they are
        copies. With share, device tensors are those of their producer."""
        if share:
            with _devices().sharing(True):
                return self.decode(body, copy)
        try:
            if len(body) > BIG:
                try:
                    return Reader(self, memoryview(body), copy).whole()
                except _TooMany:
                    body = bytes(
                        body
                    )  # another process may share the body, and msgpack's parser relies on it not changing
            return self._unpack(body)
        finally:
            if _unfinished:
                _finish()

    def _unpack(self, body: Buffer) -> Any:
        try:
            return msgpack.unpackb(body, ext_hook=self.ext, strict_map_key=False, timestamp=3)
        except _errors.Error:
            raise
        except Exception as err:
            raise _errors.MalformedError(
                f"the body cannot be read: {type(err).__name__}: {_errors.text_of(err)}"
            ) from err

    def ext(self, code: int, data: Buffer) -> Any:
        """Decodes the payload of an extension type. An unknown type raises an error that names it."""
        if code == TENSOR:
            return read_tensor(memoryview(bytearray(data)))
        if code == PICKLE:
            return self._load(data)
        if code == HANDLE:
            fields = self._unpack(data)
            return _open_handle(bytes(data), fields) if self.handles else fields
        if code == COMPLEX:
            return complex(*struct.unpack("<dd", data))
        decoder = _DECODERS.get(code)
        if decoder is None:
            raise _errors.RefusedError(
                f"the unknown extension type {code} cannot be read here; run the same version on both sides"
            )
        return decoder(self, self._unpack(data))

    def _load(self, data: Buffer) -> Any:
        if not self.pickle:
            raise _errors.RefusedError(f"a pickle was sent and is not read: {self.why_not}")
        import pickle

        return pickle.loads(bytes(data))  # a copy, because another process may share the body

    def type_of(self, module: str, name: str) -> Any:
        """Returns the class with that name. A module is imported only for senders that may send pickles."""
        found: Any = sys.modules.get(module)
        if found is None and self.pickle:
            import importlib

            try:
                found = importlib.import_module(module)
            except ImportError as err:
                raise _errors.RefusedError(
                    f"a value of type {module}.{name} was sent, and {module} cannot be imported here: "
                    f"{_errors.text_of(err)}"
                ) from err
        if found is None:
            raise _errors.RefusedError(
                f"a value of type {module}.{name} was sent, and {module} has not been imported here"
            )
        for part in name.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type):
            raise _errors.RefusedError(f"a value of type {module}.{name} was sent, and there is no such type here")
        return found


class Eventual:
    """A value that may not be in this process yet. It is encoded as a reference, or, if it cannot have one, as its
    value, after a wait for it."""

    def reference(self) -> object | None:
        """Returns a reference to the value, or None."""
        return None

    def arrived(self) -> object:
        raise NotImplementedError


class Argument:
    """A reference that is an argument of a call. The worker's core replaces it with the value."""

    __slots__ = ("name", "ref", "share")

    def __init__(self, ref: Any = None, name: tuple[str, int] = ("", 0), share: bool = False) -> None:
        self.ref = ref  # the Reference object, on the caller's side
        self.share = share  # whether device tensors are used in place
        self.name = name if ref is None else (ref._owner, ref._number)


# By thread, the references encoded since take_references was last called. The sender keeps them alive until the message
# has arrived.
_encoded: dict[int, list[Any]] = {}
_pickling: set[int] = set()  # idents of threads that are pickling a value being encoded


def _note(ref: object) -> None:
    _encoded.setdefault(get_ident(), []).append(ref)


# By thread, the tensor copies that the decoder has started, each with what must stay alive until it completes.
_unfinished: dict[int, list[tuple[Callable[[], None], Any]]] = {}


def finish_later(wait: Callable[[], None], keep: object) -> None:
    """Makes the decoder of the current message call wait when the message is decoded, so that all copies run at once.
    keep stays alive until then."""
    _unfinished.setdefault(get_ident(), []).append((wait, keep))


@contextlib.contextmanager
def another_message() -> Iterator[None]:
    """A block that decodes another message while one is being decoded: copies of the outer message stay under way."""
    outer = _unfinished.pop(get_ident(), None)
    try:
        yield
    finally:
        if outer is not None:
            _unfinished[get_ident()] = outer


def _finish() -> None:
    for wait, _ in _unfinished.pop(get_ident(), ()):
        wait()


def _name_of(ref: Any) -> bytes:
    _note(ref)
    return bytes(msgpack.packb({"owner": ref._owner, "id": ref._number}))


def note_pickled(ref: object) -> bool:
    """Records a reference that is being pickled inside a value being encoded. Returns False if no value is being
    encoded."""
    if get_ident() not in _pickling:
        return False
    _note(ref)
    return True


def take_references() -> list[object] | None:
    """Returns the references that this thread has encoded since the last call, and forgets them; None if there are
    none, the usual case."""
    return _encoded.pop(get_ident(), None) if _encoded else None


def _encode_argument(value: Argument) -> tuple[int, object]:
    _note(value.ref)
    return ARGUMENT, {"owner": value.name[0], "id": value.name[1], **({"share": True} if value.share else {})}


_NATIVE = {type(None), bool, int, float, str, bytes, bytearray, list, dict}  # types that msgpack encodes directly


class Walked:
    """A Troupe type that travels as an extension type."""

    def wire(self) -> tuple[int, object]:
        raise NotImplementedError

    def big(self) -> bool:
        return False


def _short(value: object) -> str:
    try:
        text = repr(value)
        return _errors.plain(text if len(text) <= 80 else text[:77] + "…")
    except (Exception, SystemExit):
        return f"a value of type {_errors.type_name(value)}"


# Extension types of single values.


def _encode_set(value: Any) -> tuple[int, object]:
    return (SET if type(value) is set else FROZENSET), list(value)


def _encode_ordered(value: Mapping[object, object]) -> tuple[int, object]:
    """Encodes an OrderedDict as a dict and its attributes: the state dict of a torch module has one, _metadata."""
    return ORDERED_DICT, [dict(value), vars(value)]


def _encode_complex(value: complex) -> tuple[int, object]:
    return COMPLEX, struct.pack("<dd", value.real, value.imag)


def _encode_decimal(value: object) -> tuple[int, object]:
    return DECIMAL, [str(value)]


def _encode_time(value: Any) -> tuple[int, Any]:
    kind = type(value).__name__
    if kind == "timedelta":
        return DATETIME, [kind, [value.days, value.seconds, value.microseconds]]
    if kind == "datetime" and value.tzinfo is not None and value.utcoffset() == _zero() and value.tzname() == "UTC":
        return -1, msgpack.Timestamp.from_datetime(value)
    return DATETIME, [kind, value.isoformat()]


def _zero() -> object:
    return sys.modules["datetime"].timedelta(0)


class _Encoders(dict[type, Callable[[Any], tuple[int, Any]]]):
    """Encoders by type. The types of datetime and decimal are added on first use, so that their modules need not be
    imported."""

    def get(self, kind: type, default: object = None) -> Any:
        found = super().get(kind)
        if found is None and kind.__module__ in ("datetime", "decimal"):
            if kind.__name__ in ("datetime", "date", "time", "timedelta"):
                found = self[kind] = _encode_time
            elif kind.__name__ == "Decimal":
                found = self[kind] = _encode_decimal
        return found


_ENCODERS = _Encoders(
    {
        set: _encode_set,
        frozenset: _encode_set,
        OrderedDict: _encode_ordered,
        complex: _encode_complex,
        Argument: _encode_argument,
    }
)


def _decode_time(codec: Codec, value: Any) -> Any:
    import datetime

    kind, data = value
    if kind == "timedelta":
        return datetime.timedelta(*data)
    kinds: dict[str, Any] = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}
    return kinds[kind].fromisoformat(data)


def _decode_ordered(codec: Codec, value: Any) -> Any:
    items, attributes = value
    made = OrderedDict(items)
    vars(made).update(attributes)
    return made


def _decode_decimal(codec: Codec, value: str) -> decimal.Decimal:
    import decimal

    return decimal.Decimal(value[0])


def _decode_scalar(codec: Codec, value: Sequence[Any]) -> object:
    import numpy

    return numpy.frombuffer(value[1], dtype=numpy.dtype(value[0]))[0]


def _object_array_fields(array: Any) -> list[object]:
    elements = array.ravel().tolist() if array.dtype.kind == "O" else array.tobytes()
    return [array.dtype.str, list(array.shape), elements]


def _decode_object_array(codec: Codec, value: Any) -> Any:
    import numpy

    try:
        dtype, shape, elements = value
        kind = numpy.dtype(dtype)
        if kind.kind not in _OBJECT_KINDS:
            raise ValueError(f"dtype {dtype}")
        if kind.kind != "O":
            made = numpy.frombuffer(elements, dtype=kind).copy() if elements else numpy.zeros(0, dtype=kind)
            return made.reshape(shape)
        made = numpy.empty(len(elements), dtype=object)
        for i, element in enumerate(
            elements
        ):  # an assignment of the whole list would take nested lists for further axes
            made[i] = element
        return made.reshape(shape)
    except (TypeError, ValueError) as err:
        raise _errors.MalformedError(f"an array of strings or objects cannot be read: {err}") from err


def _decode_dataclass(codec: Codec, value: Any) -> Any:
    module, name, fields = value
    kind = codec.type_of(module, name)
    if not hasattr(kind, "__dataclass_fields__"):
        raise _errors.RefusedError(f"{module}.{name} is no dataclass here")
    obj = object.__new__(kind)
    for field in fields:
        object.__setattr__(obj, field, fields[field])
    return obj


def _decode_enum(codec: Codec, value: Any) -> object:
    module, name, member = value
    return codec.type_of(module, name)[member]


def _decode_device(codec: Codec, value: object) -> object:
    return _devices().receive(codec, value)


_DECODERS: dict[int, Callable[[Codec, Any], Any]] = {
    TUPLE: lambda codec, value: tuple(value),
    SET: lambda codec, value: set(value),
    FROZENSET: lambda codec, value: frozenset(value),
    ORDERED_DICT: _decode_ordered,
    DATACLASS: _decode_dataclass,
    ENUM: _decode_enum,
    SCALAR: _decode_scalar,
    DECIMAL: _decode_decimal,
    DATETIME: _decode_time,
    OBJECT_ARRAY: _decode_object_array,
    ARGUMENT: lambda codec, value: Argument(name=(value["owner"], value["id"]), share=value.get("share", False)),
    DEVICE: _decode_device,
}


def set_decoder(code: int, decode: Callable[[Codec, Any], Any]) -> None:
    """Sets the decoder of an extension type. The module that defines the type calls it on import."""
    _DECODERS[code] = decode


def set_handle_decoder(decode: Callable[[bytes, dict[str, Any]], Any]) -> None:
    """Sets the function that makes a cluster or a worker of a handle's bytes and fields."""
    global _open_handle
    _open_handle = decode


def set_devices(module: Callable[[], object]) -> None:
    """Sets the function that returns the module for device tensors. That module imports this one, and is loaded with
    the first such tensor."""
    global _devices
    _devices = module


def _devices() -> Any:
    raise _errors.RefusedError("a tensor on a device cannot be read here")


_open_handle: Callable[[bytes, dict[str, Any]], Any] = lambda data, fields: fields  # noqa: E731


# Arrays.


_OBJECT_KINDS = ("O", "U", "S")  # numpy's kinds of dtypes whose elements are Python objects, strings or bytes


def is_tensor(value: Any) -> bool:
    """Returns whether the value travels as a tensor: an array of numbers."""
    return is_array(value) and getattr(value.dtype, "kind", "") not in _OBJECT_KINDS


def is_array(value: object) -> bool:
    """Returns whether the value is a numpy array, a torch tensor with dense elements, or a Tensor. Imports nothing.
    Other torch tensors (meta, sparse, nested) are pickled."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.layout is torch.strided and not value.is_meta and not value.is_nested)
    return type(value) is Tensor


class Scattered:
    """Array elements that are not contiguous in host memory, such as those on a device. They are copied once, directly
    into the body."""

    __slots__ = ("_copy", "_nbytes")

    def __init__(self, nbytes: int, copy: Callable[[memoryview], None]) -> None:
        self._nbytes = nbytes
        self._copy = copy

    def __len__(self) -> int:
        return self._nbytes

    def write(self, into: memoryview) -> None:
        self._copy(into)


def tensor_parts(value: Any) -> tuple[bytes, Any]:
    """Returns the header of a tensor, msgpack [dtype, [shape…]], and its elements: an object with a buffer, or a
    Scattered."""
    if type(value) is Tensor:
        return _head(value.dtype, value.shape, False), memoryview(value.data)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _torch_parts(torch, value)
    import numpy

    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    name = value.dtype.name
    if name not in _SIZES:
        raise _errors.EncodeError(
            f"an array of dtype {value.dtype} cannot be sent; there are {', '.join(_SIZES)}; send a list, or convert it"
        )
    if value.nbytes >= BIG and not value.flags.c_contiguous and name not in _TORCH_ONLY:

        def copy(into: memoryview) -> None:
            numpy.frombuffer(into, dtype=value.dtype).reshape(value.shape)[...] = value

        return _head(name, value.shape, False), Scattered(value.nbytes, copy)
    whole: Any = numpy.ascontiguousarray(value)
    view: Any = whole.view(numpy.uint8) if name in _TORCH_ONLY and whole.ndim else whole
    data = memoryview(view.reshape(-1)).cast("B") if whole.size else memoryview(b"")
    return _head(name, value.shape, False), data


def _torch_parts(torch: Any, value: torch.Tensor) -> tuple[bytes, Any]:
    name = str(value.dtype).removeprefix("torch.")
    if name not in _SIZES:
        raise _errors.EncodeError(f"a tensor of dtype {value.dtype} cannot be sent; there are {', '.join(_SIZES)}")
    if value.requires_grad:
        _warn_of_gradients()
    nbytes = value.numel() * value.element_size()
    if nbytes >= BIG and not (value.device.type == "cpu" and value.is_contiguous()):
        source = value.detach()

        def copy(into: memoryview) -> None:
            try:
                torch.frombuffer(into, dtype=torch.uint8).view(value.dtype).reshape(value.shape).copy_(source)
            except RuntimeError as err:
                raise _errors.EncodeError(
                    f"a {name} tensor of shape {list(value.shape)} cannot be copied from {value.device}: {err}"
                ) from err

        return _head(name, tuple(value.shape), True), Scattered(nbytes, copy)
    whole = value.detach().to("cpu").contiguous()
    if value.numel() == 0:
        return _head(name, tuple(value.shape), True), memoryview(b"")
    flat = whole.reshape(-1).view(torch.uint8)
    return _head(name, tuple(value.shape), True), memoryview(flat.numpy()).cast("B")


_warned_of_gradients = False


def _warn_of_gradients() -> None:
    """Warns, once per process, that a tensor with requires_grad is sent as its elements alone."""
    global _warned_of_gradients
    if _warned_of_gradients:
        return
    _warned_of_gradients = True
    import warnings

    warnings.warn(
        "a tensor with requires_grad arrives without it: gradients do not cross processes; send tensor.detach(), and "
        "call requires_grad_() where it arrives if that is needed",
        RuntimeWarning,
        stacklevel=_traceback.user_stacklevel(),
    )


def _head(dtype: str, shape: tuple[int, ...], torch: bool) -> bytes:
    """Encodes [dtype, [shape…]]. The dtype of a torch tensor is written as a str 8, which other readers take for the
    same string."""
    text = dtype.encode()
    name = (b"\xd9" + bytes([len(text)]) if torch else bytes([0xA0 | len(text)])) + text
    return b"\x92" + name + bytes(msgpack.packb(list(shape)))


def _small(value: object) -> Any:
    head, data = tensor_parts(value)
    if len(data) >= BIG:
        raise Big
    return msgpack.ExtType(TENSOR, b"\0" + head + bytes(data))


def read_tensor(data: memoryview) -> Any:
    """Decodes the payload of a tensor to an array that is a view of it."""
    try:
        rest = data[1 + data[0] :]
        torch = rest[1] == 0xD9
        unpacker = msgpack.Unpacker(max_buffer_size=4096)
        unpacker.feed(rest[:1024])
        dtype, shape = unpacker.unpack()
        elements = rest[unpacker.tell() :]
        size = _SIZES[dtype]
    except Exception as err:
        raise _errors.MalformedError(f"a tensor that does not begin with its padding, dtype and shape: {err}") from err
    n = size
    for axis in shape:
        n *= axis
    if n != len(elements):
        raise _errors.MalformedError(f"a {dtype} tensor of shape {shape} has {n} bytes, not {len(elements)}")
    return _make(dtype, tuple(shape), elements, torch)


def _make(dtype: str, shape: tuple[int, ...], data: memoryview, torch: bool) -> Any:
    if torch or dtype in _TORCH_ONLY:
        try:
            return _make_torch(dtype, shape, data)
        except ImportError:
            if dtype in _TORCH_ONLY:
                return Tensor(dtype, shape, data)
    try:
        import numpy
    except ImportError:
        return Tensor(dtype, shape, data)
    if not len(data):
        return numpy.empty(shape, dtype=dtype)
    return numpy.frombuffer(data, dtype=dtype).reshape(shape)


def _make_torch(dtype: str, shape: tuple[int, ...], data: memoryview) -> torch.Tensor:
    import torch

    kind = getattr(torch, dtype)
    if not len(data):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(shape)


def part_of(block: Any, start: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """Returns the array at a place of a block of bytes, as a view of it."""
    part, torch = block[start : start + nbytes], sys.modules.get("torch")
    if torch is not None and isinstance(part, torch.Tensor):
        return part.view(getattr(torch, dtype)).reshape(shape)
    if isinstance(part, Tensor) or dtype in _TORCH_ONLY:
        return Tensor(dtype, shape, part.data)
    return part.view(dtype).reshape(shape)


def _own(value: Any, copy: Copy | None = None) -> object:
    """Returns a copy of an array that is a view. `copy` copies a large array."""
    if type(value) is Tensor:
        return Tensor(value.dtype, value.shape, bytes(value.data))
    if copy is None or value.nbytes < _SMALL:
        return value.clone() if hasattr(value, "clone") else value.copy()
    if hasattr(value, "clone"):
        own = value.new_empty(value.shape)
        copy(own.data_ptr(), value.data_ptr(), value.nbytes)
        return own
    import numpy

    own = numpy.empty_like(value)
    copy(own.ctypes.data, value.ctypes.data, value.nbytes)
    return own


# Large values.


class Walk:
    """A value with large arrays, encoded as pieces that are written into one buffer at the end."""

    __slots__ = ("_blocks", "_bytes", "_codec", "_lending", "_pieces", "lent", "size")

    def __init__(self, codec: Codec, lending: Any = None, blocks: Any = None) -> None:
        self._codec = codec
        self._pieces: list[Any] = []
        self._bytes = bytearray()  # the current piece, while it consists of small values
        self._lending = lending  # collector of tensors that stay on their device
        self._blocks = blocks  # collector of tensors that are not lent by themselves; None: they travel in the body
        self.lent = 0  # number of such tensors in this value
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def _add(self, data: bytes) -> None:
        self._bytes += data
        self.size += len(data)

    def _flush(self) -> None:
        if self._bytes:
            self._pieces.append(self._bytes)
            self._bytes = bytearray()

    def value(self, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _errors.EncodeError(f"a value that is nested deeper than {MAX_DEPTH} cannot be sent")
        kind = type(value)
        if kind is list:
            self._add(_array_head(len(value)))
            for item in value:
                self.value(item, depth + 1)
        elif kind is dict:
            self._add(_map_head(len(value)))
            for key, item in value.items():
                self._add(self._codec._pack(key))
                self.value(item, depth + 1)
        elif is_tensor(value):
            self._tensor(value)
        elif kind is tuple:
            self._nested(TUPLE, list(value), depth)
        else:
            self._other(value, depth)

    def _other(self, value: object, depth: int) -> None:
        if isinstance(value, Eventual):
            found = value.reference()
            if found is not None:
                self._add(msgpack.packb(msgpack.ExtType(REFERENCE, _name_of(found))))
            else:
                self.value(value.arrived(), depth + 1)
            return
        try:
            self._add(self._codec._pack(value))
        except Big:
            code, inner = self._codec._ext(value)
            self._nested(code, inner, depth)

    def _nested(self, code: int, inner: object, depth: int) -> None:
        """Encodes an extension type whose length is known only at its end."""
        self._flush()
        head = bytearray(6)
        self._pieces.append(head)
        self.size += 6
        start = self.size
        self.value(inner, depth + 1)
        self._flush()
        _check_length(self.size - start)
        struct.pack_into(">BIb", head, 0, 0xC9, self.size - start, code)

    def _tensor(self, value: object) -> None:
        if getattr(value, "is_cuda", False) and self._lend(value):
            return
        meta, data = tensor_parts(value)
        pad = -(self.size + 7 + len(meta)) % ALIGN
        _check_length(1 + pad + len(meta) + len(data))
        self._add(struct.pack(">BIbB", 0xC9, 1 + pad + len(meta) + len(data), TENSOR, pad))
        self._add(bytes(pad) + meta)
        self._flush()
        self._pieces.append(data)
        self.size += len(data)

    def _lend(self, value: torch.Tensor) -> bool:
        """Encodes a tensor that stays on its device. Returns False if the tensor must travel in the body."""
        if self._lending is None or not self._lending.takes(value):
            return False
        if getattr(value, "requires_grad", False):
            _warn_of_gradients()
        made = self._lending.add(value) if self._lending.alone(value) else None
        if made is not None:
            self.lent += 1
            _note(made[0])
            self._add(msgpack.packb(msgpack.ExtType(DEVICE, made[1])))
            return True
        if self._blocks is None or self._blocks.full():
            return False
        fields, description = self._blocks.add(value)
        self._add(struct.pack(">BIb", 0xC9, len(fields) + len(description), DEVICE) + fields)
        self._flush()
        self._pieces.append(description)  # filled in when the block is lent
        self.size += len(description)
        return True

    def write(self, into: memoryview, copy: Copy = ctypes.memmove) -> None:
        """Writes the pieces into the body's memory. Large pieces are copied by copy(to, from, bytes), without the
        interpreter lock."""
        self._flush()
        at, start = 0, ctypes.addressof(ctypes.c_char.from_buffer(into))
        for piece in self._pieces:
            n = len(piece)
            if isinstance(piece, Scattered):
                piece.write(into[at : at + n])
            elif n >= _SMALL and (here := address_of(piece)):
                copy(start + at, here, n)
            else:
                into[at : at + n] = piece
            at += n

    def pieces(self) -> list[Buffer]:
        self._flush()
        return self._pieces

    def join(self) -> bytes:
        self._flush()
        if any(isinstance(piece, Scattered) for piece in self._pieces):
            whole = bytearray(self.size)
            self.write(memoryview(whole))
            return bytes(whole)
        return b"".join(self._pieces)


def address_of(data: Buffer) -> int:
    """Returns the address of the bytes, or 0 if it cannot be determined."""
    if not memoryview(data).readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(data))
    numpy = sys.modules.get("numpy")
    return 0 if numpy is None else int(numpy.frombuffer(data, dtype="u1").ctypes.data)


def _check_length(n: int) -> None:
    """Raises an error if a payload exceeds msgpack's 4-byte length field."""
    if n >= 1 << 32:
        raise _errors.EncodeError(
            f"an array or object of {n} bytes cannot be sent: the most is 4 GiB each; send it in pieces, as a list of "
            "arrays"
        )


def _array_head(n: int) -> bytes:
    if n < 16:
        return bytes([0x90 | n])
    return struct.pack(">BH", 0xDC, n) if n < 1 << 16 else struct.pack(">BI", 0xDD, n)


def _map_head(n: int) -> bytes:
    if n < 16:
        return bytes([0x80 | n])
    return struct.pack(">BH", 0xDE, n) if n < 1 << 16 else struct.pack(">BI", 0xDF, n)


class _TooMany(Exception):
    pass


class Reader:
    """Decodes a large body in place, so that the arrays in it are views."""

    __slots__ = ("_address", "_at", "_body", "_codec", "_copy", "_count", "_least", "_message")

    def __init__(self, codec: Codec, body: memoryview, copy: Copy | None = None) -> None:
        self._codec = codec
        self._copy = copy  # copies the arrays; None: arrays are views
        self._body = body
        # The memory that another process shares, its address, and the least bytes of an array that is a view of it.
        self._message = None if copy is not None else getattr(body.obj, "message", None)
        self._address = 0 if self._message is None else address_of(body)
        self._least = BIG if self._message is not None and self._message.may_share_small() else _SMALL
        self._at = 0
        self._count = 0

    def whole(self) -> Any:
        try:
            value = self._value(0)
        except (IndexError, struct.error, UnicodeDecodeError, TypeError) as err:
            raise _errors.MalformedError(f"the body cannot be read: {err}") from err
        if self._at != len(self._body):
            raise _errors.MalformedError("the body goes on after its value")
        return value

    def _take(self, n: int) -> memoryview:
        end = self._at + n
        if n < 0 or end > len(self._body):
            raise _errors.MalformedError("the body ends too early")
        out = self._body[self._at : end]
        self._at = end
        return out

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _errors.MalformedError(f"the body is nested deeper than {MAX_DEPTH}")
        self._count += 1
        if self._count > _MANY:
            raise _TooMany
        code = self._body[self._at]
        self._at += 1
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code < 0x90:
            return self._map(code & 15, depth)
        if code < 0xA0:
            return self._list(code & 15, depth)
        if code < 0xC0:
            return str(self._take(code & 31), "utf-8")
        return self._coded(code, depth)

    def _coded(self, code: int, depth: int) -> Any:
        if code == 0xC0:
            return None
        if code in (0xC2, 0xC3):
            return code == 0xC3
        if 0xC4 <= code <= 0xC6:
            return bytes(self._take(self._number((">B", ">H", ">I")[code - 0xC4])))
        if 0xC7 <= code <= 0xC9:
            return self._ext(self._number((">B", ">H", ">I")[code - 0xC7]), depth)
        if 0xCA <= code <= 0xD3:
            return self._number((">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q")[code - 0xCA])
        if 0xD4 <= code <= 0xD8:
            return self._ext(1 << (code - 0xD4), depth)
        if 0xD9 <= code <= 0xDB:
            return str(self._take(self._number((">B", ">H", ">I")[code - 0xD9])), "utf-8")
        if code in (0xDC, 0xDD):
            return self._list(self._number((">H", ">I")[code - 0xDC]), depth)
        if code in (0xDE, 0xDF):
            return self._map(self._number((">H", ">I")[code - 0xDE]), depth)
        raise _errors.MalformedError(f"the body has a byte {code:#x} where a value begins")

    def _list(self, n: int, depth: int) -> list[Any]:
        return [self._value(depth + 1) for _ in range(n)]

    def _map(self, n: int, depth: int) -> dict[Any, Any]:
        return {self._value(depth + 1): self._value(depth + 1) for _ in range(n)}

    def _ext(self, n: int, depth: int) -> Any:
        code = self._number(">b")
        if code == TENSOR:
            at, data = self._address + self._at, self._take(n)
            if self._message is not None and n >= self._least:
                return read_tensor(self._message.part(at, n))
            value = read_tensor(data)
            if self._copy is not None or self._message is not None or n < max(_SMALL, len(self._body) // 8):
                return _own(value, self._copy)  # a small view would keep the whole body alive
            return value
        if code in _DECODERS:  # the payload is itself an encoded value, which may contain arrays
            end = self._at + n
            value = self._value(depth + 1)
            if self._at != end:
                raise _errors.MalformedError(f"extension type {code} does not end where it says")
            return _DECODERS[code](self._codec, value)
        if code == -1:
            return msgpack.Timestamp.from_bytes(bytes(self._take(n))).to_datetime()
        return self._codec.ext(code, self._take(n))
