"""References: values that stay where they are until code asks for them. The core counts them and fetches what they refer to."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgpack

from . import _check, _codec, _core, _error_transfer, _errors, _future, _session
from ._core import FAILED, NONE
from ._future import Pull, Waitable

_READY = 1  # of troupe_get: only whether the value is there
_PUT_FAILED = 1
_MOST = 8 << 10  # bytes of the list of references in one value; see wire.MaxReferences


class Reference(Waitable):
    """A value of this or another process: of `put`, or the result of a call that some process made.

    result() and await fetch the value. As an argument of a call the reference is replaced by its value; inside one it arrives as a
    reference. The owner keeps the value until no process has a reference to it.
    """

    def __init__(self, session: _session.Session, owner: str, number: int) -> None:
        """One use of the reference belongs to the new object."""
        super().__init__(session.core)
        self._session = session
        self._owner = owner
        self._number = number
        self._error: _errors.Error | None = None
        self._watching = 0  # the token of the request that tells when the value is there
        self._pull: Pull | None = None
        self._codec: _codec.Codec | None = None  # of the caller it came from; None: of this process and its workers
        self._pid = os.getpid()

    @classmethod
    def received(cls, owner: str, number: int) -> Reference:
        """Another use of a reference, for one that was received or copied."""
        session = _session.current(start=False)
        session.core.check()
        session.core.lib.troupe_count(session.id, owner.encode(), number, 1)
        return cls(session, owner, number)

    def __del__(self) -> None:
        try:
            if self._pid == os.getpid():
                self._core.lib.troupe_count(self._session.id, self._owner.encode(), self._number, -1)
        except Exception:  # the interpreter ends, or __init__ failed
            pass

    @property
    def id(self) -> str:
        """The name of the value, in hexadecimal digits."""
        return f"{self._owner.encode().hex()}{self._number:016x}"

    def hex(self) -> str:
        return self.id

    # Waiting.

    def deliver(self, kind: int, flags: int, rank: int, body: Any) -> None:
        """The value is there, or will never be."""
        if flags & FAILED:
            self._error = _error_transfer.rebuild(_errors.from_body(body), self._values())
        self._finish()

    def _watch(self) -> None:
        if not self._watching and not self._done:
            self._watching = self._core.send(self, lambda token: self._ask(token, _READY))

    def _ask(self, token: int, how: int) -> int:
        return int(self._core.lib.troupe_get(token, self._session.id, self._owner.encode(), self._number, how))

    def done(self) -> bool:
        """Whether the value is there, or its call failed. The first call asks the owner, and does not wait for the answer."""
        self._watch()
        return super().done()

    def _wait(self, timeout: float | None) -> bool:
        self._watch()
        return super()._wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the value and fetches it, anew each time; or raises what went wrong."""
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
        """How the value is read: one that came from a caller without the right to send pickles has none."""
        if self._codec is None:
            self._codec = self._session.codec(True)
        return self._codec

    def _start(self) -> Pull:
        return Pull(self._core, lambda token: self._ask(token, 0))

    def _read(self, pull: Pull) -> Any:
        codec = self._values()
        if pull.flags & FAILED:
            raise _error_transfer.rebuild(_errors.from_body(pull.body), codec)
        value = None if pull.flags & NONE else codec.decode(pull.body)
        pull.body, pull.inside = b"", []
        return value

    def _get(self) -> Any:
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

    async def _await(self) -> Any:
        pull = self._start()
        try:
            await _core.wait_in_loop(self._core, pull)
        except BaseException:
            pull.cancel()
            raise
        return self._read(pull)

    def cancel(self) -> bool:
        """A reference has no call to cancel; cancel the future of the call."""
        return False

    def cancelled(self) -> bool:
        return isinstance(self._error, _errors.CancelledError)

    # As a value.

    def reference(self) -> Reference:
        return self

    def __reduce__(self) -> Any:
        if not _codec.note_pickled(self):
            _pinned.append(self)  # pickled by other code: the last read of that pickle is unknown
        return _unpickled, (self._owner, self._number)

    def __copy__(self) -> Reference:
        return Reference.received(self._owner, self._number)

    def __deepcopy__(self, _: Any) -> Reference:
        return Reference.received(self._owner, self._number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and (other._owner, other._number) == (self._owner, self._number)

    def __hash__(self) -> int:
        return hash((self._owner, self._number))

    def __repr__(self) -> str:
        return f"Reference({self.id})"


_pinned: list[Reference] = []


def _unpickled(owner: str, number: int) -> Reference:
    return Reference.received(owner, number)


def names_of(refs: Sequence[Any]) -> bytes:
    """A list of references as the core takes it: each owner, and its numbers."""
    names: list[Any] = []
    owner = None
    for ref in refs:
        if ref._owner != owner:
            owner = ref._owner
            names.append(owner)
        names.append(ref._number)
    data = bytes(msgpack.packb(names))
    if len(data) > _MOST:
        raise _errors.EncodeError(
            f"a value with {len(refs)} references in it cannot be sent: their list has {len(data)} bytes, and the most is {_MOST}; "
            "send them in several calls, or put lists of them"
        )
    return data


def read_names(names: bytes) -> list[tuple[str, int]]:
    """Owner and number of each reference in a list of the core."""
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
    """How many values this process owns, how many of other processes it refers to, and how many bytes of results it keeps for others."""
    session = _session.current(start=False)
    found: dict[str, int] = session.core.ask("references", runtime=session.id).get()
    return found


def put(value: Any) -> Reference:
    """Keeps a value in this process and gives a reference to it, to be passed to workers: they fetch it from here, once each."""
    if isinstance(value, Waitable):
        raise _errors.InvalidError("put takes a value; a future or a reference is a reference already")
    session = _session.current()
    codec = session.codec(True)
    body = (codec.on_device() if session.device else codec).encode(value)
    return put_body(session, body, _codec.take_references())


def put_body(session: _session.Session, body: Any, inside: Sequence[Any] | None, how: int = 0) -> Reference:
    """Keeps an encoded value, or with how=1 an error."""
    core = session.core
    core.check()
    names = names_of(inside) if inside else b""
    n = len(body)
    if n > _core._LARGE:
        address: Any = core.place(body)
    else:
        address = body if isinstance(body, bytes) else bytes(body) if isinstance(body, (bytearray, memoryview)) else body.join()
    number = core.lib.troupe_put(session.id, how, address, n, names, len(names))
    if number < 0:
        if n > _core._LARGE:
            core.lib.troupe_release(address)
        raise core.fail(number)
    return Reference(session, session.session, number)


def put_error(session: _session.Session, body: Any) -> Reference:
    return put_body(session, bytes(body), None, _PUT_FAILED)


def _decode(codec: _codec.Codec, fields: Any) -> Reference:
    ref = Reference.received(fields["owner"], fields["id"])
    ref._codec = codec
    return ref


_codec.set_decoder(_codec.REFERENCE, _decode)
_future.set_references(sys.modules[__name__])
