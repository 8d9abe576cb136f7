"""Weights: versions of a model's tensors, published by shards, staged beside the work, committed in one copy. The
engine is in Go; see docs/weights.md.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast, overload

import msgpack

from . import _check, _codec, _device, _errors, _seam, _session, _weights_device
from ._future import Asked
from ._pipeline import settle, warn_if_blocking

if TYPE_CHECKING:
    from ._session import Session

_BUCKET = 256 << 20  # bytes of tensors that an engine gets at once
_MODES = ("full", "delta", "auto")
_USES = ("publish", "take")

R = TypeVar("R")
Load = Callable[[Iterator[tuple[str, Any]]], object]


class Version(NamedTuple):
    """A state of the weights: the step that its publishers gave it, in an epoch of publishers. Later versions
    compare as greater."""

    epoch: int
    step: int


class Box:
    """A part of a tensor: the shape of the whole, where the part begins in each dimension, and the part itself, an
    array of the part's shape.

    Box((1024, 2048), (512, 0), rows)  # rows has the shape (512, 2048): the second half
    """

    __slots__ = ("global_shape", "offsets", "view")

    def __init__(self, global_shape: Sequence[int], offsets: Sequence[int], view: object) -> None:
        self.global_shape, self.offsets, self.view = _integers(global_shape), _integers(offsets), view

    def __repr__(self) -> str:
        return f"troupe.Box({self.global_shape}, {self.offsets})"


def _integers(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(n.__index__()) for n in values)


class _State(NamedTuple):
    """What this process knows of a name."""

    version: Version | None
    available: list[Version]
    lag: int

    @classmethod
    def of(cls, answer: dict[str, Any]) -> _State:
        version = _version(answer["version"])
        return cls(version if version.epoch else None, [_version(v) for v in answer["available"] or ()], answer["lag"])


class _Tensors:
    """Tensors that were read for a binding: what the core is told of them, and what must live as long as they are
    bound.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.fields: list[dict[str, object]] = []
        self.kept: list[object] = []
        self.fixed = ""  # a tensor that cannot be written
        self.device: _weights_device.Binding | None = None  # that has all tensors
        self.mirrors: list[tuple[Any, Any]] = []  # tensors of a device, each with its copy in memory of the host
        self._remote: list[tuple[int, Any]] = []  # tensors of a device, with the index of their fields

    def add(self, name: object, value: object) -> None:
        if not isinstance(name, str) or not name:
            raise _errors.InvalidError(f"weights {self.name!r}: {name!r} is no name of a tensor; give a dict by name")
        for box in self._boxes(name, value):
            self._add_box(name, box)

    def place(self, session: Session) -> None:
        """Decides how the bytes of tensors on devices are reached, once all are added: on the device if one has all of
        them, otherwise through memory of the host."""
        backend = _device.backend()
        tensors = [view for _, view in self._remote]
        some = sum(1 for field in self.fields if 0 not in cast(tuple[int, ...], field["size"]))
        if len(tensors) == some > 0 and _device.mode() != "0" and all(map(backend.is_tensor, tensors)):
            devices = {backend.device_of(view) for view in tensors}
            if len(devices) == 1:
                self.device = _weights_device.Binding(session, devices.pop(), tensors)
                return
        for index, view in self._remote:
            _, _, address, strides, _ = self._memory(str(self.fields[index]["name"]), self._mirror(view))
            self.fields[index].update(address=address, strides=strides)

    def binding(self) -> dict[str, object]:
        """The fields of the request to bind."""
        if self.device is None:
            return {"tensors": self.fields}
        return {"tensors": self.fields, "device": self.device.uuid.hex(), "binding": self.device.number}

    def mark(self) -> None:
        """Makes copies on the device wait for the work that this thread has given to it."""
        if self.device is not None:
            self.device.mark()

    def _fail(self, name: str, why: str) -> _errors.InvalidError:
        return _errors.InvalidError(f"weights {self.name!r}: tensor {name!r}: {why}")

    def _boxes(self, name: str, value: object) -> Sequence[Box]:
        if isinstance(value, Box):
            return [value]
        if isinstance(value, (list, tuple)):
            for one in value:
                if not isinstance(one, Box):
                    raise self._fail(name, f"a list has troupe.Box objects, not {type(one).__name__}")
            return value
        if hasattr(value, "__create_chunk_list__"):
            return list(_chunks(name, value))
        if hasattr(value, "to_local") and hasattr(value, "placements"):
            raise self._fail(name, "this torch cannot tell where its parts are; bind them as troupe.Box objects")
        shape = getattr(value, "shape", ())
        return [Box(shape, (0,) * len(shape), value)]

    def _add_box(self, name: str, box: Box) -> None:
        view: Any = box.view
        if not _codec.is_tensor(view):
            raise self._fail(
                name,
                f"it is of type {type(view).__name__}; bind numpy arrays, torch tensors or troupe.Box objects of them",
            )
        size = tuple(int(n) for n in view.shape)
        if len({len(box.global_shape), len(box.offsets), len(size)}) != 1:
            raise self._fail(
                name,
                f"the shape of the whole {box.global_shape}, the offsets {box.offsets} and the shape of the part "
                f"{size} have different numbers of dimensions",
            )
        dtype, item, address, strides, writable = self._memory(name, view)
        if not writable and 0 not in size:
            self.fixed = self.fixed or name
        self.fields.append(
            {
                "name": name, "dtype": dtype, "item_size": item, "shape": box.global_shape,
                "start": box.offsets, "size": size, "address": address if math.prod(size) else 0, "strides": strides,
            }
        )  # fmt: skip

    def _memory(self, name: str, array: object) -> tuple[str, int, int, tuple[int, ...], bool]:
        """Returns dtype, bytes of an element, address, bytes between elements, and whether the memory can be
        written.
        """
        view: Any = array
        if isinstance(array, _codec.Tensor):
            data = memoryview(array.data)
            address = _codec.address_of(data) if len(data) else 0
            if len(data) and not address:
                address = _codec.address_of(data := memoryview(bytearray(data)))
            self.kept.append(data)
            item = _codec._SIZES[array.dtype]
            return array.dtype, item, address, _row_major(array.shape, item), not memoryview(array.data).readonly
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(view, torch.Tensor):
            dtype = str(view.dtype).removeprefix("torch.")
            view = view.detach()
            remote = view.device.type != "cpu"
            if remote and 0 not in view.shape:
                self._remote.append((len(self.fields), view))
            item, strides, writable = view.element_size(), view.stride(), True
            address = view.data_ptr() if not remote or _device.backend().is_tensor(view) else 0
            strides = tuple(n * item for n in strides)
        else:
            if _device.backend().is_tensor(view):
                self._remote.append((len(self.fields), view))
            dtype, item, strides, writable = view.dtype.name, view.dtype.itemsize, view.strides, view.flags.writeable
            if not view.dtype.isnative:
                raise self._fail(name, f"its dtype {view.dtype.str} has another byte order than this machine")
            address = view.__array_interface__["data"][0]
        if _codec._SIZES.get(dtype) != item:
            raise self._fail(name, f"weights have no dtype {dtype}; there are {', '.join(_codec._SIZES)}")
        if any(n < 0 for n in strides):
            raise self._fail(name, "it goes backwards in memory; bind a copy")
        self.kept.append(view)
        return (
            dtype,
            item,
            address,
            strides,
            writable and all(n > 0 for n, size in zip(strides, view.shape, strict=True) if size > 1),
        )

    def _mirror(self, view: Any) -> object:
        """Returns memory of the host for a tensor of a device, pinned where that can be done: once, because pinning
        takes longer than the copies.
        """
        torch = sys.modules["torch"]
        try:
            mirror = torch.empty(view.shape, dtype=view.dtype, pin_memory=view.device.type == "cuda")
        except RuntimeError:
            mirror = torch.empty(view.shape, dtype=view.dtype)
        self.mirrors.append((view, mirror))
        return mirror

    def from_device(self) -> None:
        """Copies tensors of devices to memory of the host, if the core moves their bytes there."""
        self.mark()
        for tensor, mirror in self.mirrors:
            mirror.copy_(tensor, non_blocking=True)
        self._synchronize()

    def to_device(self) -> None:
        for tensor, mirror in self.mirrors:
            tensor.copy_(mirror, non_blocking=True)
        self._synchronize()

    def _synchronize(self) -> None:
        if any(tensor.device.type == "cuda" for tensor, _ in self.mirrors):
            for device in {tensor.device for tensor, _ in self.mirrors}:
                sys.modules["torch"].cuda.synchronize(device)


def _row_major(shape: Sequence[int], item: int) -> tuple[int, ...]:
    strides = []
    for n in reversed(shape):
        strides.append(item)
        item *= n
    return tuple(reversed(strides))


def _chunks(name: str, tensor: object) -> Iterator[Box]:
    """Yields the parts of a tensor that implements the protocol of torch.distributed.checkpoint: a DTensor and
    others.
    """
    value: Any = tensor
    chunks = value.__create_chunk_list__()
    for i, chunk in enumerate(chunks):
        if len(chunks) == 1 and hasattr(value, "to_local"):
            part = value.to_local()
        else:
            part = value.__get_tensor_shard__(_metadata_index(name, chunk.offsets, i))
        if math.prod(chunk.sizes):
            yield Box(
                value.shape,
                chunk.offsets,
                part.reshape(tuple(chunk.sizes)) if tuple(part.shape) != tuple(chunk.sizes) else part,
            )


def _metadata_index(name: str, offsets: object, index: int) -> object:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return MetadataIndex(name, offsets, index)


class Weights:
    """The weights of a name in this process: see troupe.weights."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self.name = session, name
        self._bound: dict[str, _Tensors] = {}  # by use
        self._binding: list[_Tensors] = []  # that the core may use already: their binding has not been answered yet
        self._load: Load | None = None
        self._whole: list[dict[str, Any]] = []  # the tensors that an engine loads by name,
        self._epoch = 0  # and whose they are
        self._staged: Version | None = None

    def _ask(
        self, make: Callable[..., _seam.Request], read: Callable[..., R] | None = None, **fields: object
    ) -> Asked[R]:
        request = make(runtime=self._session.id, name=self.name, **fields)
        return Asked(self._session.core, request, read=read)

    @overload
    def bind(
        self,
        tensors: Mapping[str, object] | None = None,
        *,
        load: Load | None = None,
        use: str | None = None,
        blocking: Literal[True] = True,
    ) -> None: ...
    @overload
    def bind(
        self,
        tensors: Mapping[str, object] | None = None,
        *,
        load: Load | None = None,
        use: str | None = None,
        blocking: Literal[False],
    ) -> Awaitable[None]: ...
    def bind(
        self,
        tensors: Mapping[str, object] | None = None,
        *,
        load: Load | None = None,
        use: str | None = None,
        blocking: bool = True,
    ) -> object:
        """Says which tensors this process has. They stay where they are, and are read by publish and written by commit.
        What was bound before is replaced.

        - tensors: by name numpy arrays, torch tensors, DTensors and other tensors with parts as
          torch.distributed.checkpoint has them, or troupe.Box objects and lists of them.
        - load: for an engine that loads by name, instead of tensors: load(pairs) gets the names and tensors of a
          version, each as a whole.
        - use: "publish" or "take", in a process that does both with different tensors.
        """
        if (tensors is None) == (load is None):
            raise _errors.InvalidError(f"weights {self.name!r}: bind either tensors or load=")
        if use is not None and use not in _USES:
            raise _errors.InvalidError(f"use={use!r}: give 'publish' or 'take', or nothing")
        if load is not None:
            if not callable(load) or use == "publish":
                raise _errors.InvalidError(f"weights {self.name!r}: load= is a function that takes names and tensors")
            self._load, self._epoch, self._staged = load, 0, None
            return None if blocking else _nothing()
        if not isinstance(tensors, Mapping):
            raise _errors.InvalidError(
                f"weights {self.name!r}: bind a dict of tensors by name, not {type(tensors).__name__}"
            )
        warn_if_blocking("weights.bind", blocking)
        made = _Tensors(self.name)
        for name, value in tensors.items():
            made.add(name, value)
        made.place(self._session)
        self._binding.append(made)

        def bound(_: object) -> None:
            self._bound[use or ""] = made
            self._binding = [other for other in self._binding if other is not made]
            if use != "publish":
                self._load = None if use == "take" else self._load
                self._staged = None

        return settle(self._ask(_seam.weights_bind, bound, use=use or "", **made.binding()), blocking)

    def _tensors(self, use: str) -> _Tensors | None:
        return self._bound.get(use) or self._bound.get("")

    @overload
    def publish(
        self,
        step: int,
        mode: str = "full",
        *,
        ranks: Sequence[int] = (),
        timeout: float | None = None,
        blocking: Literal[True] = True,
    ) -> Version: ...
    @overload
    def publish(
        self,
        step: int,
        mode: str = "full",
        *,
        ranks: Sequence[int] = (),
        timeout: float | None = None,
        blocking: Literal[False],
    ) -> Asked[Version]: ...
    def publish(
        self,
        step: int,
        mode: str = "full",
        *,
        ranks: Sequence[int] = (),
        timeout: float | None = None,
        blocking: bool = True,
    ) -> object:
        """Publishes the values that the bound tensors have now as the version of a step, and returns it. The tensors
        may be changed as soon as this returns. A version can be taken when all ranks of the role have published it.

        - mode: "full"; "delta", also what changed since the version before; "auto", a delta if a receiver is on another
          host.
        - ranks: the ranks that publish this version, if the others have the same values. Default: all of the role.
        """
        if mode not in _MODES:
            raise _errors.InvalidError(f"mode={mode!r}: give 'full', 'delta' or 'auto'")
        warn_if_blocking("weights.publish", blocking)
        tensors = self._tensors("publish")
        if tensors is not None:
            tensors.from_device()
        fields = {
            "step": _check.integer("step", step, -(1 << 62)),
            "mode": mode,
            "ranks": list(ranks),
            "timeout": _timeout(timeout),
        }
        return settle(self._ask(_seam.weights_publish, _version, **fields), blocking)

    @overload
    def stage(
        self, version: Version | None = None, *, timeout: float | None = None, blocking: Literal[True] = True
    ) -> Version: ...
    @overload
    def stage(
        self, version: Version | None = None, *, timeout: float | None = None, blocking: Literal[False]
    ) -> Asked[Version]: ...
    def stage(self, version: Version | None = None, *, timeout: float | None = None, blocking: bool = True) -> object:
        """Takes the bytes of a version to this process, beside whatever the bound tensors are used for, checks their
        digests, and returns the version. Waits until the version is complete.

        - version: what publish has returned. Default: the newest version that is complete.
        """
        warn_if_blocking("weights.stage", blocking)
        tensors = self._tensors("take")
        if tensors is not None and tensors.fixed and self._load is None:
            raise _errors.InvalidError(
                f"weights {self.name!r}: tensor {tensors.fixed!r} is read-only; bind memory that can be written"
            )

        def staged(answer: dict[str, Any]) -> Version:
            self._staged = Version(**answer["version"])
            if answer["tensors"] is not None:
                self._whole, self._epoch = answer["tensors"], self._staged.epoch
            return self._staged

        fields = {
            "version": _fields(version),
            "timeout": _timeout(timeout),
            "whole": self._load is not None,
            "epoch": self._epoch,
        }
        return settle(self._ask(_seam.weights_stage, staged, **fields), blocking)

    @overload
    def commit(self, version: Version | None = None, *, blocking: Literal[True] = True) -> Version: ...
    @overload
    def commit(self, version: Version | None = None, *, blocking: Literal[False]) -> Asked[Version]: ...
    def commit(self, version: Version | None = None, *, blocking: bool = True) -> object:
        """Gives the bound tensors the values of the version that was staged: all of them, or none. Returns the
        version. Nothing else may use the tensors meanwhile: this is the pause.
        """
        if self._load is not None:
            if not blocking:
                raise _errors.InvalidError(
                    f"weights {self.name!r}: load= is called where commit is; commit in a thread, with blocking=True"
                )
            return self._commit_load(self._load, version)
        warn_if_blocking("weights.commit", blocking)

        tensors = self._tensors("take")
        if tensors is not None:
            tensors.mark()

        def committed(answer: dict[str, int]) -> Version:
            if tensors is not None:
                tensors.to_device()
            return _version(answer)

        asked = self._ask(_seam.weights_commit, committed, version=_fields(version))
        try:
            return settle(asked, blocking)
        except KeyboardInterrupt:  # the core commits all the same; so does the device
            self._session.core.wait(asked, None)
            asked.exception(0)
            raise

    def _commit_load(self, load: Load, version: Version | None) -> Version:
        """Has an engine load what was staged."""
        warn_if_blocking("weights.commit", True)
        version = Version(*version) if version is not None else self._staged
        if version is None:
            raise _errors.RefusedError(f"weights {self.name!r}: nothing is staged; stage a version first")
        began = time.monotonic()
        self._fill(version, 0, [])  # refuses what is not staged, before the engine is asked
        try:
            load(self._pairs(version))
        except BaseException as err:
            self._ask(_seam.weights_loaded, version=version._asdict(), failure=f"{type(err).__name__}: {err}").now()
            raise
        self._ask(_seam.weights_loaded, version=version._asdict(), took=time.monotonic() - began).now()
        return version

    def _pairs(self, version: Version) -> Iterator[tuple[str, object]]:
        """Yields the tensors that were staged, each as a whole, in memory that the engine may keep."""
        first = 0
        while first < len(self._whole):
            made: list[tuple[str, object]] = []
            addresses, nbytes = [], 0
            while first + len(made) < len(self._whole) and nbytes < _BUCKET:
                field = self._whole[first + len(made)]
                value, address, size = _empty(field["dtype"], tuple(field["shape"]), field["item_size"])
                made.append((field["name"], value))
                addresses.append(address)
                nbytes += size
            self._fill(version, first, addresses, list(made))
            first += len(made)
            made.reverse()
            while made:
                yield made.pop()

    def _fill(self, version: Version, first: int, addresses: Iterable[int], memory: object = None) -> None:
        fields = {"version": version._asdict(), "first": first, "addresses": list(addresses)}
        # An interrupt does not end it, nor the memory.
        self._ask(_seam.weights_fill, lambda _: memory, **fields).now()

    @property
    def version(self) -> Version | None:
        """The version that this process has committed last."""
        return self._state().version

    @property
    def lag(self) -> int:
        """The number of complete versions that are newer than what this process has committed."""
        return self._state().lag

    def available(self) -> list[Version]:
        """Returns the versions that can be taken, the newest last."""
        return self._state().available

    def _state(self) -> _State:
        return _State.of(msgpack.unpackb(self._session.core.weights(self._session.id, self.name)))

    def next(self, after: Version | None = None, *, timeout: float | None = None) -> Asked[Version]:
        """Waits for a version that can be taken and is newer than `after`: `await w.next(after=v)`, or
        `w.next(after=v).result()`.
        """
        return self._ask(_seam.weights_next, _version, version=_fields(after), timeout=_timeout(timeout))

    @overload
    def status(self, *, blocking: Literal[True] = True) -> dict[str, object]: ...
    @overload
    def status(self, *, blocking: Literal[False]) -> Asked[dict[str, object]]: ...
    def status(self, *, blocking: bool = True) -> object:
        """Returns what there is of the name: versions, members and what each has committed, times and bytes; see
        docs/weights.md.
        """
        warn_if_blocking("weights.status", blocking)
        return settle(self._ask(_seam.weights_status, json.loads), blocking)

    def __repr__(self) -> str:
        return f"<troupe.Weights {self.name}>"


async def _nothing() -> None:
    """The binding of a function that loads: nothing is to be waited for."""


def _timeout(value: float | None) -> float | None:
    return _check.seconds("timeout", value)


def _version(answer: dict[str, int]) -> Version:
    return Version(**answer)


def _fields(version: Version | None) -> dict[str, int]:
    """Returns a version as the core has it; None is the newest one."""
    if version is None:
        return {"epoch": 0, "step": 0}
    try:
        epoch, step = version
        return {"epoch": int(epoch), "step": int(step)}
    except (TypeError, ValueError):
        raise _errors.InvalidError(
            f"{version!r} is no version; give what publish, stage or next has returned"
        ) from None


def _empty(dtype: str, shape: tuple[int, ...], item: int) -> tuple[object, int, int]:
    """Returns an array with any content, its address and its bytes: of torch if the program uses it, else of numpy."""
    torch, nbytes = sys.modules.get("torch"), item * math.prod(shape)
    if torch is not None and hasattr(torch, dtype):
        made = torch.empty(shape, dtype=getattr(torch, dtype))
        return made, made.data_ptr(), nbytes
    if dtype not in _codec._TORCH_ONLY:
        try:
            import numpy
        except ImportError:
            pass
        else:
            array = numpy.empty(shape, dtype=dtype)
            return array, array.__array_interface__["data"][0], nbytes
    data = bytearray(nbytes)
    return _codec.Tensor(dtype, shape, data), _codec.address_of(memoryview(data)) if nbytes else 0, nbytes


def weights(name: str) -> Weights:
    """Returns the weights of a name: versions of a model's tensors that some processes publish and others take.

        w = troupe.weights("policy")
        w.bind(model.state_dict())
        v = w.publish(step)  # each rank of the role that trains
        w.stage(v)  # each process that generates, beside its work
        w.commit(v)  # the pause

    It can be called in workers and in drivers. A process has one object for each name.
    """
    session = _session.current()
    found = session.weights.get(name)
    if found is None:
        found = session.weights.setdefault(name, Weights(session, name))
    assert isinstance(found, Weights)
    return found
