"""ray._private.worker: the current process as an object, and names that programs only import."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, Generic, NoReturn, TextIO, TypeVar

from .. import _objects, _state, _waiting
from .._ids import ActorID, JobID, NodeID, PlacementGroupID
from .._refused import import_only, refuse_attribute

logger = logging.getLogger("ray")

SCRIPT_MODE, WORKER_MODE, RESTORE_WORKER_MODE, SPILL_WORKER_MODE, LOCAL_MODE = 0, 1, 3, 4, 2

R = TypeVar("R")

_wait_generators_bulk = _waiting.wait_generators_bulk


class RemoteFunctionNoArgs(Generic[R]):
    """A type for annotations."""


class RemoteFunction0(Generic[R]):
    """A type for annotations."""


class _GcsClient:
    @property
    def address(self) -> str:
        return _state.require().address

    def __getattr__(self, name: str) -> NoReturn:
        raise refuse_attribute(
            f"ray._private.worker.global_worker.gcs_client.{name}", "troupe.nodes() and `troupe status`"
        )


class _Node:
    """The node of this process."""

    def __init__(self, state: _state.State) -> None:
        self.unique_id = self.node_id = state.node_id
        self.node_ip_address = state.node_ip
        self.address = self.gcs_address = state.address


class _CoreWorker:
    """What programs ask about the objects of this process, and about its actor."""

    def current_actor_is_asyncio(self) -> bool:
        host = _state.require().host
        return host is not None and host.service.kind == "async"

    def object_exists(self, ref: _objects.ObjectRef) -> bool:
        return any(entry.id == ref.hex() and entry._done for entry in _objects.all_entries())

    def get_memory_store_size(self) -> int:
        """Returns the number of objects whose values this process keeps."""
        return sum(entry._done and entry.kind != _objects.PENDING for entry in _objects.all_entries())

    def get_all_reference_counts(self) -> dict[bytes, dict[str, int]]:
        """Returns the objects that this process owns or borrows: their references here, and those of other
        processes."""
        store = _state.require().store
        return {
            entry.id.encode(): {"local": count, "submitted": sum(store.borrowed.get(entry.id, (None, {}))[1].values())}
            for entry, count in _objects.reference_counts().items()
        }

    def __getattr__(self, name: str) -> NoReturn:
        raise refuse_attribute(
            f"ray._private.worker.global_worker.core_worker.{name}", "the functions of ray.get_runtime_context()"
        )


class Worker:
    """The current process. Attributes that are not defined here are refused."""

    gcs_client = _GcsClient()
    core_worker = _CoreWorker()

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
    def current_job_id(self) -> JobID:
        from .._ids import JobID

        return JobID.from_hex(_state.require().job_id)

    @property
    def current_node_id(self) -> NodeID:
        from .._ids import NodeID

        return NodeID.from_hex(_state.require().node_id)

    @property
    def actor_id(self) -> ActorID:
        from .._ids import ActorID

        state = _state.current()
        return ActorID.from_hex(state.actor_id) if state is not None and state.actor_id else ActorID.nil()

    @property
    def worker_id(self) -> bytes:
        return bytes.fromhex(_state.require().worker_id or "ff" * 28)

    @property
    def placement_group_id(self) -> PlacementGroupID:
        from ..util.placement_group import PlacementGroup, get_current_placement_group

        return (get_current_placement_group() or PlacementGroup.empty()).id

    @property
    def node(self) -> _Node | None:
        return _Node(_state.require())

    def check_connected(self) -> None:
        _state.require()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refuse_attribute(
            f"ray._private.worker.global_worker.{name}", "the functions of ray.get_runtime_context()"
        )


global_worker = Worker()


# Programs may replace this function.
_unhandled_error_handler = _objects.log_unhandled
_objects.on_unhandled = lambda error: _unhandled_error_handler(error)


def print_to_stdstream(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    """Prints log lines of a worker unchanged. Troupe prints the output of workers without this function."""
    stream = sys.stderr if data.get("is_err") else sys.stdout
    for line in data.get("lines", ()):
        print(line, file=stream)


def print_worker_logs(data: dict[str, Any], print_file: TextIO) -> None:
    for line in data.get("lines", ()):
        print(line, file=print_file)


def __getattr__(name: str) -> object:
    import importlib

    package = importlib.import_module(__name__.rpartition("._private")[0])
    if name in (
        "init",
        "shutdown",
        "get",
        "put",
        "wait",
        "kill",
        "cancel",
        "remote",
        "get_actor",
        "is_initialized",
        "get_gpu_ids",
    ):
        return getattr(package, name)
    return import_only(__name__, name)
