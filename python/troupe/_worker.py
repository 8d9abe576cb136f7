"""What a worker's code sees: the base class, and the call it serves."""

from __future__ import annotations

import os
import struct
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, overload

from . import _core, _errors

if TYPE_CHECKING:
    import logging

    from ._cluster import WorkerHandle
    from ._config import RankInfo


class _Driver:
    """What the driver that created this worker serves: self.driver.method(…). A class may have a driver of its own instead."""

    @overload
    def __get__(self, worker: None, owner: type) -> _Driver: ...
    @overload
    def __get__(self, worker: object, owner: type) -> WorkerHandle: ...
    def __get__(self, worker: object | None, owner: type) -> _Driver | WorkerHandle:
        if worker is None:
            return self
        from . import _driver

        return _driver.driver()


class Worker:
    """A base class for workers. What is here is set before __init__ is called; any plain class works too."""

    rank: int = 0
    world_size: int = 1
    rank_info: RankInfo
    worker_config: Any = None
    cluster_name: str = ""
    worker_name: str = ""
    devices: list[str] = []  # noqa: RUF012
    logger: logging.Logger
    driver = _Driver()

    def __init__(self, worker_config: Any = None) -> None:
        if worker_config is not None:
            self.worker_config = worker_config

    def mesh(self) -> dict[str, int]:
        """The mesh as this worker knows it: the configured one, unless it has set another rank_info."""
        info = self.rank_info
        return {"tp": info.tp_size, "cp": info.cp_size, "dp": info.dp_size, "pp": info.pp_size}

    @property
    def master_addr(self) -> str:
        return os.environ.get("MASTER_ADDR", "")

    @property
    def master_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))


_LENGTHS = struct.Struct("<IIII")  # flags, session, method, object


class Call:
    """The call that a method serves."""

    __slots__ = ("_core", "_meta", "_token", "method", "no_data", "object")

    def __init__(self, core: _core.Core, token: int, meta: bytes) -> None:
        self._core = core
        self._token = token
        self._meta = meta
        flags, k, n, m = _LENGTHS.unpack_from(meta)
        at = 40 + k
        self.method = meta[at : at + n].decode()
        self.object = meta[at + n : at + n + m].decode() if m else ""
        self.no_data = bool(flags & 1)

    def _text(self, i: int) -> str:
        lengths = [int.from_bytes(self._meta[4 + 4 * k : 8 + 4 * k], "little") for k in range(5)]
        start = 40 + sum(lengths[:i])
        return self._meta[start : start + lengths[i]].decode(errors="replace")

    @property
    def caller(self) -> str:
        """Who calls, for people."""
        return self._text(3)

    @property
    def session(self) -> str:
        """Who calls, for programs."""
        return self._text(0)

    @property
    def driver(self) -> WorkerHandle:
        """What the driver that made this call serves; NotFoundError if it serves nothing, or a worker called."""
        from . import _driver, _session

        caller = self.session
        return _driver.of_session(caller, trusted=caller == _session.current(start=False).driver)

    @property
    def trace(self) -> str:
        """The caller's W3C traceparent, or an empty text."""
        return self._text(4)

    @property
    def remaining(self) -> float | None:
        """Seconds until the caller's patience ends; None: it does not."""
        end = int.from_bytes(self._meta[32:40], "little")
        return end / 1e6 - time.time() if end else None

    @property
    def deadline(self) -> float | None:
        """When that is, on the clock of time.monotonic()."""
        left = self.remaining
        return None if left is None else time.monotonic() + left

    @property
    def cancelled(self) -> bool:
        """Whether the caller gave up, its time is up, or the worker is stopping. Go notices while Python runs."""
        return self._token in _aborted or int(self._core.lib.troupe_cancelled(self._token)) != 0

    def check(self) -> None:
        """Raises CancelledError if the call should end: for loops in methods that run long."""
        if self.cancelled:
            raise _errors.CancelledError("the call was cancelled")


# Calls whose item was aborted: they may still answer, with what they have.
_aborted: set[int] = set()

# What a call is made of when somebody asks for it.
_call: ContextVar[tuple[_core.Core, int, bytes] | None] = ContextVar("troupe_call", default=None)


def current_call() -> Call:
    """The call that this code serves."""
    call = _call.get()
    if call is None:
        raise _errors.InvalidError("current_call() is for methods of workers and functions of pipelines, while they serve a call")
    return Call(*call)
