"""ray.util.state: tables of actors, nodes and placement groups, as the head has them, and of tasks, objects and
workers, from the processes that run now. Jobs and logs are not recorded; their lists are empty or refused."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Mapping
from typing import Any

from ... import _processes, _state
from ..._refused import absent
from ...actor import waiting_calls
from ...remote_function import waiting_tasks

Columns = dict[str, Any]  # a row before it is of a class, or a summary


class _Row:
    """A table row whose columns are available as attributes and as dict items."""

    def __init__(self, **columns: object) -> None:
        self.__dict__.update(columns)

    def __getitem__(self, key: str) -> Any:
        return self.__dict__[key]

    def __contains__(self, key: object) -> bool:
        return key in self.__dict__

    def get(self, key: str, default: object = None) -> Any:
        return self.__dict__.get(key, default)

    def keys(self) -> KeysView[str]:
        return self.__dict__.keys()

    def items(self) -> ItemsView[str, object]:
        return self.__dict__.items()

    def asdict(self) -> dict[str, object]:
        return dict(self.__dict__)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"


class ActorState(_Row):
    pass


class NodeState(_Row):
    pass


class PlacementGroupState(_Row):
    pass


class JobState(_Row):
    pass


class TaskState(_Row):
    pass


class WorkerState(_Row):
    pass


class ObjectState(_Row):
    pass


def _matches(row: Mapping[str, object], filters: Any) -> bool:
    for one in filters or ():
        if len(one) != 3 or one[1] not in ("=", "!="):
            raise ValueError(f"The given filter {one!r} must be (column, '=' or '!=', value)")
        column, operator, value = one
        if column not in row:
            raise ValueError(f"The given filter column {column} is not supported; there are {sorted(row)}")
        if (str(row[column]).lower() == str(value).lower()) != (operator == "="):
            return False
    return True


def _chosen(kind: Any, rows: list[Columns], filters: Any, limit: int) -> list[Any]:
    if limit < 1 or limit > 10_000:
        raise ValueError(f"Given limit {limit} exceeds the supported limit 10000")
    return [kind(**row) for row in rows if _matches(row, filters)][:limit]


def _actor_rows() -> list[Columns]:
    rows = _state.control_call("actors")
    for row in rows:
        row.setdefault("placement_group_id", None)
        row.setdefault("serialized_runtime_env", None)
        row.setdefault("repr_name", "")
        row.setdefault("num_restarts", 0)
    return list(rows)


def list_actors(
    address: str | None = None, filters: object = None, limit: int = 100, timeout: int = 30, detail: bool = False,
    raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[ActorState]:  # fmt: skip
    """Returns the live and dead actors: actor_id, class_name, state, name, node_id, pid, job_id, ray_namespace, …"""
    return _chosen(ActorState, _actor_rows(), filters, limit)


def get_actor(id: str, address: str | None = None, timeout: int = 30, _explain: bool = False) -> ActorState | None:
    """Returns the actor with this id in hex, or None."""
    return next((ActorState(**row) for row in _actor_rows() if row["actor_id"] == id), None)


def _node_rows() -> list[Columns]:
    return [
        {
            "node_id": n["node_id"],
            "node_ip": n["address"],
            "is_head_node": "node:__internal_head__" in n["total"],
            "state": "ALIVE" if n["alive"] else "DEAD",
            "state_message": None,
            "node_name": n["name"],
            "resources_total": n["total"],
            "labels": dict(n["labels"]),
            "start_time_ms": None,
            "end_time_ms": None,
        }
        for n in _state.control_call("placement", "nodes")
    ]


def list_nodes(
    address: str | None = None, filters: object = None, limit: int = 100, timeout: int = 30, detail: bool = False,
    raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[NodeState]:  # fmt: skip
    return _chosen(NodeState, _node_rows(), filters, limit)


def get_node(id: str, address: str | None = None, timeout: int = 30, _explain: bool = False) -> NodeState | None:
    return next((NodeState(**row) for row in _node_rows() if row["node_id"] == id), None)


def _group_rows() -> list[Columns]:
    return [
        {
            "placement_group_id": g["placement_group_id"],
            "name": g["name"],
            "creator_job_id": g["placement_group_id"][28:],
            "state": g["state"],
            "bundles": [
                {"bundle_id": i, "node_id": g["bundles_to_node_id"].get(i) or None, "unit_resources": b}
                for i, b in g["bundles"].items()
            ],
            "is_detached": g["is_detached"],
            "stats": g["stats"],
        }
        for g in _state.control_call("placement", "groups")
    ]


def list_placement_groups(
    address: str | None = None, filters: object = None, limit: int = 100, timeout: int = 30, detail: bool = False,
    raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[PlacementGroupState]:  # fmt: skip
    return _chosen(PlacementGroupState, _group_rows(), filters, limit)


def get_placement_group(
    id: str, address: str | None = None, timeout: int = 30, _explain: bool = False
) -> PlacementGroupState | None:
    return next((PlacementGroupState(**row) for row in _group_rows() if row["placement_group_id"] == id), None)


def _task_rows() -> list[Columns]:
    rows = [row for lane, said in _processes.processes() for row in _tasks_of(lane, said)]
    started = {row["task_id"] for row in rows}
    waiting = [w for w in [*waiting_tasks(), *waiting_calls()] if w[0] not in started]
    return rows + [_task_row(id, name, state, actor_id) for id, name, state, actor_id in waiting]


def _tasks_of(lane: Columns, said: Columns) -> list[Columns]:
    found = []
    for event, name, id, failed in _processes.executions(lane, said):
        is_open = event.get("open", False)
        state = "RUNNING" if is_open else "FAILED" if failed else "FINISHED"
        row = _task_row(id, name, state, said["actor_id"])
        row |= {
            "job_id": said["job_id"],
            "node_id": said["node_id"],
            "worker_id": said["worker_id"],
            "worker_pid": said["pid"],
            "error_type": "TASK_EXECUTION_EXCEPTION" if failed else None,
            "start_time_ms": event["begin_ns"] // 1_000_000,
            "end_time_ms": None if is_open else event["end_ns"] // 1_000_000,
        }
        found.append(row)
    return found


def _task_row(id: str, name: str, state: str, actor_id: str) -> Columns:
    creates = name.endswith(".__init__")
    return {
        "task_id": id,
        "attempt_number": 0,
        "name": name if actor_id else name.rpartition(".")[2],
        "state": state,
        "job_id": _state.require().job_id,
        "actor_id": actor_id or None,
        "type": "ACTOR_CREATION_TASK" if creates else "ACTOR_TASK" if actor_id else "NORMAL_TASK",
        "func_or_class_name": name,
        "parent_task_id": None,
        "node_id": None,
        "worker_id": None,
        "worker_pid": None,
        "error_type": None,
        "start_time_ms": None,
        "end_time_ms": None,
    }


def list_tasks(
    address: str | None = None, filters: object = None, limit: int = 100, timeout: int = 30, detail: bool = False,
    raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[TaskState]:  # fmt: skip
    """Returns the tasks and calls that the processes of now have run or run, and those of this process that wait."""
    return _chosen(TaskState, _task_rows(), filters, limit)


def get_task(id: str, address: str | None = None, timeout: int = 30, _explain: bool = False) -> TaskState | None:
    return next((TaskState(**row) for row in _task_rows() if row["task_id"] == id), None)


def _worker_rows() -> list[Columns]:
    return [
        {
            "worker_id": said["worker_id"],
            "is_alive": True,
            "worker_type": "DRIVER" if said["is_driver"] else "WORKER",
            "exit_type": None,
            "exit_detail": None,
            "node_id": said["node_id"],
            "ip": said["ip"],
            "pid": said["pid"],
        }
        for _, said in _processes.processes()
    ]


def list_workers(
    address: str | None = None, filters: object = None, limit: int = 100, timeout: int = 30, detail: bool = False,
    raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[WorkerState]:  # fmt: skip
    """Returns the drivers, and the processes of actors and tasks, that run now."""
    return _chosen(WorkerState, _worker_rows(), filters, limit)


def get_worker(id: str, address: str | None = None, timeout: int = 30, _explain: bool = False) -> WorkerState | None:
    return next((WorkerState(**row) for row in _worker_rows() if row["worker_id"] == id), None)


def _object_rows() -> list[Columns]:
    return [
        {
            "object_id": id,
            "object_size": size,
            "task_status": "FINISHED" if exists else "PENDING_NODE_ASSIGNMENT",
            "reference_type": "LOCAL_REFERENCE" if local else "BORROWED" if borrowed else "PINNED_IN_MEMORY",
            "call_site": "disabled",
            "type": "DRIVER" if said["is_driver"] else "WORKER",
            "pid": said["pid"],
            "ip": said["ip"],
        }
        for _, said in _processes.processes(objects=True)
        for id, size, exists, local, borrowed in said["objects"]
    ]


def list_objects(
    address: str | None = None, filters: object = None, limit: int = 100, timeout: int = 30, detail: bool = False,
    raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[ObjectState]:  # fmt: skip
    """Returns the objects that processes own. The process that makes a call or puts a value owns the object."""
    return _chosen(ObjectState, _object_rows(), filters, limit)


def get_objects(id: str, address: str | None = None, timeout: int = 30, _explain: bool = False) -> list[ObjectState]:
    return [ObjectState(**row) for row in _object_rows() if row["object_id"] == id]


def list_jobs(*args: object, **kwargs: object) -> list[JobState]:
    """Returns an empty list: job submission is refused and drivers are not recorded."""
    return []


def summarize_tasks(*args: object, **kwargs: object) -> Columns:
    """Returns the number of tasks and calls by function and state."""
    functions: Columns = {}
    rows = _task_rows()
    for row in rows:
        name = row["func_or_class_name"]
        found = functions.setdefault(name, {"func_or_class_name": name, "type": row["type"], "state_counts": {}})
        found["state_counts"][row["state"]] = found["state_counts"].get(row["state"], 0) + 1
    totals = {
        f"total_{kind}s": sum(row["type"] == kind.upper() for row in rows)
        for kind in ("normal_task", "actor_task", "actor_creation_task")
    }
    totals["total_actor_scheduled"] = totals.pop("total_actor_creation_tasks")
    totals["total_tasks"] = totals.pop("total_normal_tasks")
    return {"cluster": {"summary": functions, **totals, "summary_by": "func_name"}}


def summarize_actors(*args: object, **kwargs: object) -> Columns:
    """Returns the number of actors by class and state."""
    classes: Columns = {}
    for row in _actor_rows():
        states = classes.setdefault(row["class_name"], {"class_name": row["class_name"], "state_counts": {}})[
            "state_counts"
        ]
        states[row["state"]] = states.get(row["state"], 0) + 1
    total = sum(sum(c["state_counts"].values()) for c in classes.values())
    return {"cluster": {"summary": classes, "total_actors": total, "summary_by": "class"}}


def __getattr__(name: str) -> Any:
    raise absent(__name__, name)
