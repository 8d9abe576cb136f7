"""References to values that stay where they are until code asks for them. The core counts references and fetches the
values."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack

from . import _check, _codec, _core, _error_transfer, _errors, _future, _seam, _session
from ._future import Pull, R, Waitable
from ._seam import FAILED, GET_READY, LARGE, NONE, PUT_FAILED

T = TypeVar("T")

_LONG = 1 << 20  # bytes from which a value is stored without the interpreter lock: it may be written to disk
_PLACE = 512  # bytes for the description of where a value lies
_MOST = 8 << 10  # bytes of the list of references inside one value; see wire.MaxReferences


class Reference(Waitable[R]):
    """A reference to a value of this or another process, created by `put` or by a call.

    result() and await fetch the value. A reference passed as an argument of a call is replaced by its value; a
    reference inside an argument arrives as a reference. The owner keeps the value until no process has a reference to
    it.
    """

    _place = b""  # where the value lies, as the sender of the reference said; empty: unknown

    def __init__(self, session: _session.Session, owner: str, number: int) -> None:
        """Takes over one count of the reference, which __del__ gives back."""
        super().__init__(session.core)
        self._session = session
        self._owner = owner
        self._number = number
        self._error: _errors.Error | None = None
        self._watching = 0  # token of the request that reports when the value exists
        self._pull: Pull | None = None
        self._codec: _codec.Codec | None = (
            None  # codec of the caller that sent the reference; None: that of this process and its workers
        )
        self._pid = os.getpid()

    @classmethod
    def received(cls, owner: str, number: int) -> Reference:
        """Returns a new object for a reference that was decoded or copied, and increments its reference count."""
        session = _session.current(start=False)
        session.core.check()
        session.core.lib.troupe_count(session.id, owner.encode(), number, 1)
        return cls(session, owner, number)

    def __del__(self) -> None:
        try:
            if self._pid == os.getpid():
                self._core.lib.troupe_count(self._session.id, self._owner.encode(), self._number, -1)
        except Exception:  # the interpreter is exiting, or __init__ failed
            pass

    @property
    def id(self) -> str:
        """The identifier of the value, in hexadecimal digits."""
        return f"{self._owner.encode().hex()}{self._number:016x}"

    def hex(self) -> str:
        return self.id

    # Waiting.

    def deliver(self, kind: int, flags: int, rank: int, body: object) -> None:
        """Records that the value exists, or that it never will."""
        if flags & FAILED:
            self._error = _error_transfer.rebuild(_errors.from_body(body), self._values())
        self._finish()

    def _watch(self) -> None:
        if not self._watching and not self._done:
            self._watching = self._core.send(self, lambda token: self._ask(token, GET_READY))

    def _ask(self, token: int, how: int) -> int:
        place = self._place
        return int(
            self._core.lib.troupe_get(
                token, self._session.id, self._owner.encode(), self._number, how, place, len(place)
            )
        )

    def uncounted(self) -> list[object]:
        """Returns the fields of UncountedReference, for a message to a process that uses the value only while this one
        keeps its reference."""
        place = b""
        if self._owner == self._session.session:
            room = ctypes.create_string_buffer(_PLACE)
            place = room.raw[: max(self._core.lib.troupe_place(self._session.id, self._number, room, _PLACE), 0)]
        return [self._owner, self._number, place]

    def done(self) -> bool:
        """Returns whether the value exists or its call has failed. The first call asks the owner and does not wait for
        the answer."""
        self._watch()
        return super().done()

    def _wait(self, timeout: float | None) -> bool:
        self._watch()
        return super()._wait(timeout)

    def result(self, timeout: float | None = None) -> R:
        """Waits for the value and fetches it, or raises the error of its call. Each call fetches the value again."""
        _check.seconds("timeout", timeout, zero=True)
        pull = self._start()
        try:
            if not self._core.wait(pull, None if timeout is None else time.monotonic() + timeout):
                raise _errors.TimedOutError(f"no value within {timeout} s")
        except BaseException:
            pull.cancel()
            raise
        return self._read(pull)

    def _values(self) -> _codec.Codec:
        """Returns the codec that decodes the value. References received from a caller that may not send pickles keep
        that caller's codec."""
        if self._codec is None:
            self._codec = self._session.codec(True)
        return self._codec

    def _start(self, how: int = 0) -> Pull:
        return Pull(self._core, lambda token: self._ask(token, how))

    def _read(self, pull: Pull) -> R:
        codec = self._values()
        if pull.flags & FAILED:
            raise _error_transfer.rebuild(_errors.from_body(pull.body), codec)
        found: Any = None if pull.flags & NONE else codec.decode(pull.body)
        pull.body, pull.inside = b"", []
        value: R = found
        return value

    def _get(self) -> R:
        return self.result()

    def _check_failed(self) -> None:
        if self._error is not None:
            raise self._error._again()

    def _when_fetched(self, do: Any) -> None:
        pull = self._start()

        def fetched() -> None:
            pull.value = lambda: self._read(pull)
            do(pull)

        pull.when_done(fetched)

    async def _await(self) -> R:
        pull = self._start()
        try:
            await _core.wait_in_loop(self._core, pull)
        except BaseException:
            pull.cancel()
            raise
        return self._read(pull)

    def cancel(self) -> bool:
        """Returns False: a reference has no call to cancel. Cancel the future of the call instead."""
        return False

    def cancelled(self) -> bool:
        return isinstance(self._error, _errors.CancelledError)

    # As a value.

    def reference(self) -> Reference:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        if not _codec.note_pickled(self):
            _pinned.append(
                self
            )  # user code pickled the reference and may unpickle it at any time, so it is never released
        return _unpickled, (self._owner, self._number)

    def __copy__(self) -> Reference:
        return Reference.received(self._owner, self._number)

    def __deepcopy__(self, _: object) -> Reference:
        return Reference.received(self._owner, self._number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and (other._owner, other._number) == (self._owner, self._number)

    def __hash__(self) -> int:
        return hash((self._owner, self._number))

    def __repr__(self) -> str:
        return f"Reference({self.id})"


class UncountedReference(Reference[R]):
    """A reference that is not counted: its sender keeps the value until this process has answered a call. It must not
    be sent on."""

    def __init__(self, owner: str, number: int, place: bytes) -> None:
        super().__init__(_session.current(start=False), owner, number)
        self._place = place

    def __del__(self) -> None:
        pass

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("an uncounted reference cannot be sent on")


_pinned: list[Reference] = []


def _unpickled(owner: str, number: int) -> Reference:
    return Reference.received(owner, number)


def names_of(refs: Sequence[object]) -> bytes:
    """Encodes a list of references inside one value for the core."""
    data = list_of(refs)
    if len(data) > _MOST:
        raise _errors.EncodeError(
            f"a value with {len(refs)} references in it cannot be sent: their list has {len(data)} bytes, "
            f"and the most is {_MOST}; send them in several calls, or put lists of them"
        )
    return data


def list_of(refs: Sequence[Any]) -> bytes:
    """Encodes references for the core: each owner, followed by its numbers."""
    names: list[Any] = []
    owner = None
    for ref in refs:
        if ref._owner != owner:
            owner = ref._owner
            names.append(owner)
        names.append(ref._number)
    return bytes(msgpack.packb(names))


def read_names(names: bytes) -> list[tuple[str, int]]:
    """Decodes the core's list of references to pairs of owner and number."""
    out = []
    owner = ""
    for name in msgpack.unpackb(names):
        if type(name) is str:
            owner = name
        else:
            out.append((owner, name))
    return out


def _adopt(names: bytes) -> list[Reference]:
    session = _session._current
    return [] if session is None else [Reference(session, *name) for name in read_names(names)]


_core.Core.adopt = staticmethod(_adopt)


def counts() -> dict[str, int]:
    """Returns how many values this process owns, how many values of others it refers to, and how many bytes of results
    it keeps for others."""
    session = _session.current(start=False)
    found: dict[str, int] = session.core.ask(_seam.references(runtime=session.id)).get()
    return found


def put(value: T) -> Reference[T]:
    """Stores a value in this process and returns a reference to it.

    Pass the reference to calls: each worker fetches the value from this process once. The value is kept until no
    process has a reference to it. Past the bound of TROUPE_VALUES_LIMIT it is kept on disk, or RefusedError is raised;
    see docs/values.md.
    """
    if isinstance(value, Waitable):
        raise _errors.InvalidError("put takes a value; a future or a reference is a reference already")
    session = _session.current()
    codec = session.codec(True)
    body = (codec.on_device() if session.device else codec).encode(value)
    return put_body(session, body, _codec.take_references())


def put_body(session: _session.Session, body: Any, inside: Sequence[object] | None, how: int = 0) -> Reference:
    """Stores an encoded value, or with how=1 an encoded error, and returns a reference to it."""
    core = session.core
    core.check()
    names = names_of(inside) if inside else b""
    n = len(body)
    if n > LARGE:
        address: Any = core.place(body)
    else:
        address = (
            body
            if isinstance(body, bytes)
            else bytes(body)
            if isinstance(body, (bytearray, memoryview))
            else body.join()
        )
    do_put = core.put_large if n >= _LONG else core.lib.troupe_put
    number = do_put(session.id, how, address, n, names, len(names))
    if number < 0:
        raise core.fail(number)
    return Reference(session, session.session, number)


def put_error(session: _session.Session, body: Any) -> Reference:
    return put_body(session, bytes(body), None, PUT_FAILED)


def _decode(codec: _codec.Codec, fields: Any) -> Reference:
    ref = Reference.received(fields["owner"], fields["id"])
    ref._codec = codec
    return ref


_codec.set_decoder(_codec.REFERENCE, _decode)
_future.set_references(sys.modules[__name__])
