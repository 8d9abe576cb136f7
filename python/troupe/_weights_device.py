"""Weights of which all tensors are on one device. Their buckets are in arenas there: a publisher packs tensors into one
arena for each version that is kept, a receiver copies buckets to an arena of its own, and a commit copies that to its
tensors. The core says what to copy (cmd/libtroupe/weights_device.go); one thread of a session does it.

A bucket is a lent value: a process that sees the device opens its arena, once, and copies the bucket there. Others of
the host read it in chunks (_device.Source), and the rest get its bytes over the bus.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from . import _device, _errors, _seam
from ._device_backend import DeviceError, Lent
from ._future import Asked

if TYPE_CHECKING:
    from ._session import Session

_ARENAS = 2  # of a publisher: that of the version which receivers take, and that of the next
_FREED_WITHIN = 0.25  # seconds that a publisher waits for an arena before it allocates a third
_UNUSED = 3  # versions after which an arena of another process that none of them came from is closed

_numbers = itertools.count(1)
_bindings: weakref.WeakValueDictionary[int, Binding] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # guards _movers
_movers: weakref.WeakSet[Session] = weakref.WeakSet()  # sessions with a thread that moves bytes


class _Arena:
    """Buckets in memory of the device."""

    def __init__(self, memory: Lent) -> None:
        self.memory = memory
        self.name = os.urandom(16)  # that no other arena has, as a handle may
        self.lent: list[weakref.ref[Lent]] = []

    def is_free(self) -> bool:
        return all(ref() is None for ref in self.lent)

    def lend(self, start: int, nbytes: int, freed: Callable[[Any], None]) -> Lent:
        """Returns a bucket, as long as which it is not free."""
        whole = self.memory
        part = Lent(
            whole.value[start : start + nbytes], "uint8", (nbytes,), nbytes, whole.pointer + start, whole.device,
            whole.uuid, whole.handle, whole.offset + start,
        )  # fmt: skip
        part.raw = True
        self.lent.append(weakref.ref(part, freed))
        return part


class Binding:
    """Tensors on one device that are bound."""

    def __init__(self, session: Session, device: int, tensors: Sequence[object]) -> None:
        self.number = next(_numbers)
        self.session = session
        self.tensors = tensors  # stay where they are, as long as this does
        self.mover = _device.backend().mover(device)
        self.device = device
        self.uuid = _device.backend().uuid_of(device)
        self.before: object = None  # in the work of the device: what publish and commit wait for
        self._tables: dict[str, Any] = {}  # by what is done: "pack" or "take"
        self._arenas: list[_Arena] = []
        self._taken: Lent | None = None
        self._opened: dict[bytes, tuple[bytes, Lent]] = {}  # by arena: its handle, and its memory
        self._used: dict[bytes, int] = {}  # by arena, the number of the take that used it last
        self._takes = 0
        self._freed = threading.Condition()
        _bindings[self.number] = self
        with _lock:
            if session not in _movers:
                _movers.add(session)
                session.core.share_side()
                threading.Thread(target=_run, args=(session,), daemon=True, name="troupe-weights").start()

    def mark(self) -> None:
        """Makes what follows wait for the work that this thread has given to the device."""
        self.before = self.mover.mark()

    def do(self, order: Mapping[str, Any]) -> list[dict[str, object]]:
        """Carries out an order of the core."""
        what = order["what"]
        kind = "pack" if what == "pack" else "take"
        starts, sizes = order["starts"] or [], order["sizes"] or []
        nbytes = -(-(starts[-1] + sizes[-1]) // 512) * 512 if starts else 0
        with self.mover.at_work(None if what == "take" else self.before):
            if order["copies"] or kind not in self._tables:
                self._tables[kind] = self.mover.table(order["copies"] or b"")
                if kind == "pack":
                    self._arenas = []  # those that are lent stay with what is lent
                else:
                    self._taken = None
            if what == "pack":
                return self._pack(starts, sizes, nbytes)
            if self._taken is None:
                self._taken = self.mover.memory(max(nbytes, 1))
            if what == "take":
                return self._take(self._taken.pointer, starts, order["buckets"] or [])
            self.mover.unpack(self._tables[kind], self._taken.pointer)
            self.mover.wait()
            return []

    def _pack(self, starts: list[int], sizes: list[int], nbytes: int) -> list[dict[str, object]]:
        arena = self._free_arena(max(nbytes, 1))
        base = arena.memory.pointer
        self.mover.pack(self._tables["pack"], base)
        digests = self.mover.digests([(base + at, 0, n) for at, n in zip(starts, sizes, strict=True)])
        out: list[dict[str, object]] = []
        arena.lent = []
        for start, n, digest in zip(starts, sizes, digests, strict=True):
            number, path = _device.lend(self.session, arena.lend(start, n, self._note))
            detail = {
                "arena": arena.name, "uuid": arena.memory.uuid, "handle": arena.memory.handle,
                "offset": arena.memory.offset, "bytes": arena.memory.nbytes, "start": start, "socket": path,
            }  # fmt: skip
            out.append(_bucket(id=number, bytes=n, digest=digest, detail=bytes(msgpack.packb(detail))))
        return out

    def _free_arena(self, nbytes: int) -> _Arena:
        """Returns an arena without a version: an old one if there is."""

        def find() -> _Arena | None:
            return next((a for a in self._arenas if a.is_free()), None)

        found = find()
        if found is None and len(self._arenas) >= _ARENAS:  # the news that frees one is under way
            with self._freed:
                self._freed.wait_for(lambda: find() is not None, _FREED_WITHIN)
            found = find()
        if found is None:
            found = _Arena(self.mover.memory(nbytes))
            self._arenas.append(found)
        while len(self._arenas) > _ARENAS and (
            other := next((a for a in self._arenas if a.is_free() and a is not found), None)
        ):
            self._arenas.remove(other)
        return found

    def _note(self, _: object) -> None:
        if self._freed.acquire(blocking=False):  # otherwise the waiting thread looks again in time
            self._freed.notify_all()
            self._freed.release()

    def _take(self, base: int, starts: list[int], buckets: list[dict[str, Any]]) -> list[dict[str, object]]:
        out = [_bucket(bytes=b["bytes"]) for b in buckets]
        parts: list[tuple[int, int, int]] = []
        numbers: list[int] = []
        for i, (start, bucket) in enumerate(zip(starts, buckets, strict=True)):
            if bucket["address"]:
                _device.backend().write(base + start, bucket["address"], bucket["bytes"])()
            elif not bucket["bytes"]:
                out[i]["way"] = "device"
            elif bucket["detail"]:
                source, out[i]["way"] = self._reach(base + start, bucket)
                if out[i]["way"]:
                    parts.append((source, base + start if source != base + start else 0, bucket["bytes"]))
                    numbers.append(i)
        for i, digest in zip(numbers, self.mover.digests(parts), strict=True):
            out[i]["digest"] = digest
        self.mover.wait()
        self._takes += 1
        for name in [name for name, last in self._used.items() if self._takes - last > _UNUSED]:
            self._close(name)
        return out

    def _reach(self, target: int, bucket: dict[str, Any]) -> tuple[int, str]:
        """Returns where a bucket is on the device, which may be the target, and how it came there. No way: its bytes
        must be given."""
        own = _device.find(bucket["owner"], bucket["id"])
        if own is not None and own.device == self.device:
            return own.pointer, "device"
        try:
            detail = msgpack.unpackb(bucket["detail"])
            mode, n = _device.mode(), bucket["bytes"]
            if mode not in ("host", "bus") and (memory := self._open(detail)) is not None:
                if not 0 <= detail["start"] <= detail["start"] + n <= memory.nbytes:
                    raise ValueError("a bucket beyond the end of its arena")
                return memory.pointer + detail["start"], "device"
            source = _device._source(detail["socket"]) if mode != "bus" and detail["socket"] else None
            if source is not None and source.fetch(
                bucket["owner"],
                bucket["id"],
                n,
                lambda at, address, n: _device.backend().write(target + at, address, n),
            ):
                return target, "host"
        except (OSError, DeviceError, KeyError, ValueError, TypeError, IndexError, msgpack.UnpackException):
            pass  # the bytes are asked for
        return 0, ""

    def _open(self, detail: dict[str, Any]) -> Lent | None:
        """Opens an arena, unless it is open. Returns None if this process does not reach it."""
        name, handle, backend = detail["arena"], detail["handle"], _device.backend()
        if not handle or detail["uuid"] != self.uuid:
            return None
        if name not in self._opened:
            for other in [o for o, (known, _) in self._opened.items() if known == handle]:
                self._close(other)  # was freed; the handle is of other memory now
            memory, wait = backend.open(
                {**detail, "dtype": "uint8", "shape": (detail["bytes"],)}, detail["bytes"], True
            )
            wait()
            at = backend.address_of(memory)
            lent = Lent(memory, "uint8", (detail["bytes"],), detail["bytes"], at, self.device, detail["uuid"], b"", 0)
            self._opened[name] = handle, lent
        self._used[name] = self._takes
        return self._opened[name][1]

    def _close(self, name: bytes) -> None:
        del self._opened[name], self._used[name]


def _bucket(**fields: object) -> dict[str, object]:
    empty = {"owner": "", "id": 0, "bytes": 0, "digest": 0, "detail": b"", "way": "", "address": 0}
    return {**empty, **fields}


def _run(session: Session) -> None:
    """Carries out the orders of a session, one after the other, until it is closed."""
    core, number, failure = session.core, 0, ""
    buckets: list[dict[str, object]] = []
    with core.beside():
        while True:
            try:
                request = _seam.weights_move(runtime=session.id, number=number, buckets=buckets, failure=failure)
                order = Asked(core, request).now()
            except _errors.Error:
                return
            number, buckets, failure = order["number"], [], ""
            try:
                binding = _bindings.get(order["binding"])
                if binding is None:
                    raise DeviceError("the tensors are not bound any more")
                buckets = binding.do(order)
            except Exception as err:
                failure = f"the device of this process: {_errors.text_of(err)}"
            binding = None  # its memory ends with its last user, not with the next order
