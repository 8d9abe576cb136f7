"""ray._private.worker: the current process as an object, and names that programs only import."""

from __future__ import annotations

import logging
import sys
from typing import Any, Generic, TypeVar

from .. import _state
from .._options import refuse_attribute

logger = logging.getLogger("ray")

SCRIPT_MODE, WORKER_MODE, RESTORE_WORKER_MODE, SPILL_WORKER_MODE, LOCAL_MODE = 0, 1, 3, 4, 2

R = TypeVar("R")


class RemoteFunctionNoArgs(Generic[R]):
    """A type for annotations."""


class RemoteFunction0(Generic[R]):
    """A type for annotations."""


class _GcsClient:
    @property
    def address(self) -> str:
        return _state.require().address

    def __getattr__(self, name: str) -> Any:
        raise refuse_attribute(f"ray._private.worker.global_worker.gcs_client.{name}", "troupe.nodes() and `troupe status`")


class _Node:
    """The node of this process."""

    def __init__(self, state: _state.State) -> None:
        self.unique_id = self.node_id = state.node_id
        self.node_ip_address = state.node_ip
        self.address = self.gcs_address = state.address


class Worker:
    """The current process. Attributes that are not defined here are refused."""

    gcs_client = _GcsClient()

    @property
    def mode(self) -> int | None:
        state = _state.current()
        return None if state is None else state.mode

    @property
    def connected(self) -> bool:
        return _state.current() is not None

    @property
    def node_ip_address(self) -> str:
        from .._nodes import node_ip

        return node_ip()

    @property
    def namespace(self) -> str:
        return _state.require().namespace

    @property
    def current_job_id(self) -> Any:
        from .._ids import JobID

        return JobID.from_hex(_state.require().job_id)

    @property
    def current_node_id(self) -> Any:
        from .._ids import NodeID

        return NodeID.from_hex(_state.require().node_id)

    @property
    def actor_id(self) -> Any:
        from .._ids import ActorID

        state = _state.current()
        return ActorID.from_hex(state.actor_id) if state is not None and state.actor_id else ActorID.nil()

    @property
    def worker_id(self) -> bytes:
        return bytes.fromhex(_state.require().worker_id or "ff" * 28)

    @property
    def placement_group_id(self) -> Any:
        from ..util.placement_group import PlacementGroup, get_current_placement_group

        return (get_current_placement_group() or PlacementGroup.empty()).id

    @property
    def node(self) -> Any:
        return _Node(_state.require())

    def check_connected(self) -> None:
        _state.require()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refuse_attribute(f"ray._private.worker.global_worker.{name}", "the functions of ray.get_runtime_context()")


global_worker = Worker()


def _unhandled_error_handler(error: BaseException) -> None:
    """Logs the error of a call or task whose last reference was dropped before the program got it. Programs may replace this function."""
    logger.error("Unhandled error (suppress with 'RAY_IGNORE_UNHANDLED_ERRORS=1'): %s", error)


def print_to_stdstream(data: dict[str, Any], ignore_prefix: bool = False) -> None:
    """Prints log lines of a worker unchanged. Troupe prints the output of workers without this function."""
    stream = sys.stderr if data.get("is_err") else sys.stdout
    for line in data.get("lines", ()):
        print(line, file=stream)


def print_worker_logs(data: dict[str, Any], print_file: Any) -> None:
    for line in data.get("lines", ()):
        print(line, file=print_file)


def __getattr__(name: str) -> Any:
    import importlib

    package = importlib.import_module(__name__.rpartition("._private")[0])
    if name in ("init", "shutdown", "get", "put", "wait", "kill", "cancel", "remote", "get_actor", "is_initialized", "get_gpu_ids"):
        return getattr(package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; see docs/ray.md")
