"""The worker's view: the base class of workers, and the call being served."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, overload

from . import _call, _driver, _errors

if TYPE_CHECKING:
    import logging

    from ._cluster import WorkerHandle
    from ._config import RankInfo


class _Driver:
    """The object served by the driver or worker that created this worker: self.driver.method(…). A class may define its
    own attribute `driver` instead."""

    @overload
    def __get__(self, worker: None, owner: type) -> _Driver: ...
    @overload
    def __get__(self, worker: object, owner: type) -> WorkerHandle: ...
    def __get__(self, worker: object | None, owner: type) -> _Driver | WorkerHandle:
        if worker is None:
            return self
        return _driver.driver()


class Worker:
    """A base class for workers. Its attributes are set before __init__ is called: rank, world_size, rank_info,
    worker_config, cluster_name, worker_name, devices, logger and driver. Any plain class works as a worker too."""

    rank: int = 0
    world_size: int = 1
    rank_info: RankInfo
    worker_config: Any = None
    cluster_name: str = ""
    worker_name: str = ""
    devices: list[str] = []  # noqa: RUF012
    logger: logging.Logger
    driver = _Driver()

    def __init__(self, worker_config: object = None) -> None:
        if worker_config is not None:
            self.worker_config = worker_config

    def mesh(self) -> dict[str, int]:
        """Returns the mesh as this worker knows it: the configured one, unless the worker has set another rank_info."""
        info = self.rank_info
        return {"tp": info.tp_size, "cp": info.cp_size, "dp": info.dp_size, "pp": info.pp_size}

    @property
    def master_addr(self) -> str:
        return os.environ.get("MASTER_ADDR", "")

    @property
    def master_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))


class Call(_call.IncomingCall):
    """The call that a method serves."""

    __slots__ = ()

    @property
    def driver(self) -> WorkerHandle:
        """The object that the calling driver or worker serves. Raises NotFoundError if it serves none."""
        return _driver.of_session(self.session)


def current_call() -> Call:
    """Returns the call that this code serves. Raises InvalidError outside of a call."""
    call = _call.current.get()
    if call is None:
        raise _errors.InvalidError(
            "current_call() works only in methods of workers and functions of pipelines, while they serve a call"
        )
    return Call(*call)
