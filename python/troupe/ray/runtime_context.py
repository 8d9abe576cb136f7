"""get_runtime_context: the ids, resources and placement of the current process, task or actor."""

from __future__ import annotations

import warnings
from typing import Any

from . import _context, _state
from ._ids import ActorID, JobID, NodeID, PlacementGroupID, TaskID
from .actor import ActorHandle


class _Worker:
    """The `worker` attribute of a runtime context."""

    def __init__(self, state: _state.State) -> None:
        self.mode = state.mode
        self.worker_id = bytes.fromhex(state.worker_id) if state.worker_id else b""
        self.current_job_id = state.job_id
        self.node_ip_address = state.node_ip


class RuntimeContext:
    def __init__(self, state: _state.State) -> None:
        self._state = state

    @property
    def worker(self) -> _Worker:
        return _Worker(self._state)

    @property
    def gcs_address(self) -> str:
        return self._state.address

    @property
    def namespace(self) -> str:
        return self._state.namespace

    @property
    def job_id(self) -> JobID:
        _deprecated("get_job_id()")
        return self._job_id()

    @property
    def node_id(self) -> NodeID:
        _deprecated("get_node_id()")
        return self._node_id()

    @property
    def task_id(self) -> TaskID | None:
        _deprecated("get_task_id()")
        found = self.get_task_id()
        return None if found is None else TaskID(bytes.fromhex(found))

    @property
    def actor_id(self) -> ActorID | None:
        _deprecated("get_actor_id()")
        return ActorID(bytes.fromhex(self._state.actor_id)) if self._state.actor_id else None

    @property
    def current_placement_group_id(self) -> PlacementGroupID | None:
        _deprecated("get_placement_group_id()")
        found = self.get_placement_group_id()
        return None if found is None else PlacementGroupID(bytes.fromhex(found))

    def _job_id(self) -> JobID:
        return JobID(bytes.fromhex(self._state.job_id))

    def _node_id(self) -> NodeID:
        return NodeID(bytes.fromhex(self._state.node_id))

    @property
    def was_current_actor_reconstructed(self) -> bool:
        return self._state.restarted > 0

    def is_canceled(self) -> bool:
        """Returns whether the current task or call has been cancelled. A sync actor method is not interrupted; it must
        poll this."""
        if self._state.mode != _state.WORKER_MODE:
            raise RuntimeError(
                f"This method is only available when the process is a worker. Current mode: {self._state.mode}"
            )
        if self._state.host.service.kind == "async":
            raise RuntimeError("This method is not supported in an async actor.")
        task = _context.current.get()
        return task is not None and task.cancelled

    @property
    def current_actor(self) -> ActorHandle:
        """Returns a weak handle of the current actor."""
        from . import actor

        if not self._state.actor_id:
            raise RuntimeError("This method is only available in an actor.")
        for _ in range(2):
            found = _state.control_call("actor_handle", self._state.actor_id)
            if found is not None:
                return actor._weak_handle(found)
        raise RuntimeError("The actor is not known any more.")

    def get(self) -> dict[str, object]:
        found = {"job_id": self._job_id(), "node_id": self._node_id(), "namespace": self.namespace}
        task = _context.current.get()
        if task is not None:
            found["task_id"] = TaskID(bytes.fromhex(task.id))
        if self._state.actor_id:
            found["actor_id"] = ActorID(bytes.fromhex(self._state.actor_id))
        return found

    def get_job_id(self) -> str:
        return self._state.job_id

    def get_node_id(self) -> str:
        return self._state.node_id

    def get_worker_id(self) -> str:
        return self._state.worker_id or "f" * 56

    def get_task_id(self) -> str | None:
        task = _context.current.get()
        return None if task is None else task.id

    def get_task_name(self) -> str | None:
        task = _context.current.get()
        return None if task is None else task.name

    def get_task_function_name(self) -> str | None:
        task = _context.current.get()
        return None if task is None else self._state.host.service.function_title(task.function)

    def get_actor_id(self) -> str | None:
        return self._state.actor_id or None

    def get_actor_name(self) -> str | None:
        return self._state.actor_name if self._state.actor_id else None

    def get_session_name(self) -> str:
        """Returns the same name in all processes of the session."""
        return "session_" + self._state.address.replace(":", "_")

    def get_placement_group_id(self) -> str | None:
        task = _context.current.get()
        group = task.placement if task is not None and task.placement else self._state.placement_group
        return group["id"] if group else None

    @property
    def should_capture_child_tasks_in_placement_group(self) -> bool:
        task = _context.current.get()
        group = task.placement if task is not None and task.placement else self._state.placement_group
        return bool(group and group.get("capture"))

    def get_assigned_resources(self) -> dict[str, float]:
        task = _context.current.get()
        return dict(task.assigned if task is not None and task.assigned else self._state.assigned)

    def get_runtime_env_string(self) -> str:
        import json

        return json.dumps(self._state.runtime_env)

    @property
    def runtime_env(self) -> Any:
        from .runtime_env import RuntimeEnv

        return RuntimeEnv(**self._state.runtime_env)

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        task = _context.current.get()
        devices = task.devices if task is not None and task.devices else self._state.accelerators
        found: dict[str, list[str]] = {k: [] for k in ("GPU", "TPU", "NPU", "HPU", "neuron_cores", "FPGA")}
        found.update({k: [str(d) for d in v] for k, v in devices.items()})
        return found


def _deprecated(instead: str) -> None:
    warnings.warn(f"Use {instead} instead", DeprecationWarning, stacklevel=3)


def get_runtime_context() -> RuntimeContext:
    return RuntimeContext(_state.require())


def get_gpu_ids() -> list[int | str]:
    """Returns the ids of the GPUs assigned to this actor or task, as in the CUDA_VISIBLE_DEVICES of the process."""
    state = _state.require()
    task = _context.current.get()
    devices = task.devices if task is not None and task.devices else state.accelerators
    found = list(devices.get("GPU", []))
    return [int(d) if str(d).isdigit() else d for d in found]
