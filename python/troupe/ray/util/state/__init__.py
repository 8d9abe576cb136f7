"""ray.util.state: tables of actors, nodes and placement groups. Tasks, objects, jobs, workers and logs are not recorded; their lists are
empty or refused."""

from __future__ import annotations

from typing import Any

from ... import _state
from ..._options import refuse_attribute


class _Row:
    """A table row whose columns are available as attributes and as dict items."""

    def __init__(self, **columns: Any) -> None:
        self.__dict__.update(columns)

    def __getitem__(self, key: str) -> Any:
        return self.__dict__[key]

    def __contains__(self, key: object) -> bool:
        return key in self.__dict__

    def get(self, key: str, default: Any = None) -> Any:
        return self.__dict__.get(key, default)

    def keys(self) -> Any:
        return self.__dict__.keys()

    def items(self) -> Any:
        return self.__dict__.items()

    def asdict(self) -> dict[str, Any]:
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


def _matches(row: dict[str, Any], filters: Any) -> bool:
    for one in filters or ():
        if len(one) != 3 or one[1] not in ("=", "!="):
            raise ValueError(f"The given filter {one!r} must be (column, '=' or '!=', value)")
        column, operator, value = one
        if column not in row:
            raise ValueError(f"The given filter column {column} is not supported; there are {sorted(row)}")
        if (str(row[column]).lower() == str(value).lower()) != (operator == "="):
            return False
    return True


def _chosen(kind: Any, rows: list[dict[str, Any]], filters: Any, limit: int) -> list[Any]:
    if limit < 1 or limit > 10_000:
        raise ValueError(f"Given limit {limit} exceeds the supported limit 10000")
    return [kind(**row) for row in rows if _matches(row, filters)][:limit]


def _actor_rows() -> list[dict[str, Any]]:
    rows = _state.control_call("actors")
    for row in rows:
        row.setdefault("placement_group_id", None)
        row.setdefault("serialized_runtime_env", None)
        row.setdefault("repr_name", "")
        row.setdefault("num_restarts", 0)
    return list(rows)


def list_actors(
    address: str | None = None, filters: Any = None, limit: int = 100, timeout: int = 30, detail: bool = False,
    raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[ActorState]:  # fmt: skip
    """Returns the live and dead actors: actor_id, class_name, state, name, node_id, pid, job_id, ray_namespace, …"""
    return _chosen(ActorState, _actor_rows(), filters, limit)


def get_actor(id: str, address: str | None = None, timeout: int = 30, _explain: bool = False) -> ActorState | None:
    """Returns the actor with this id in hex, or None."""
    return next((ActorState(**row) for row in _actor_rows() if row["actor_id"] == id), None)


def _node_rows() -> list[dict[str, Any]]:
    return [
        {
            "node_id": n["node_id"], "node_ip": n["address"], "is_head_node": "node:__internal_head__" in n["total"],
            "state": "ALIVE" if n["alive"] else "DEAD", "state_message": None, "node_name": n["name"], "resources_total": n["total"],
            "labels": dict(n["labels"]), "start_time_ms": None, "end_time_ms": None,
        }
        for n in _state.control_call("placement", "nodes")
    ]  # fmt: skip


def list_nodes(
    address: str | None = None, filters: Any = None, limit: int = 100, timeout: int = 30, detail: bool = False,
    raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[NodeState]:  # fmt: skip
    return _chosen(NodeState, _node_rows(), filters, limit)


def get_node(id: str, address: str | None = None, timeout: int = 30, _explain: bool = False) -> NodeState | None:
    return next((NodeState(**row) for row in _node_rows() if row["node_id"] == id), None)


def _group_rows() -> list[dict[str, Any]]:
    return [
        {
            "placement_group_id": g["placement_group_id"], "name": g["name"], "creator_job_id": g["placement_group_id"][28:], "state": g["state"],
            "bundles": [
                {"bundle_id": i, "node_id": g["bundles_to_node_id"].get(i) or None, "unit_resources": b} for i, b in g["bundles"].items()
            ],
            "is_detached": g["is_detached"], "stats": g["stats"],
        }
        for g in _state.control_call("placement", "groups")
    ]  # fmt: skip


def list_placement_groups(
    address: str | None = None, filters: Any = None, limit: int = 100, timeout: int = 30, detail: bool = False,
    raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[PlacementGroupState]:  # fmt: skip
    return _chosen(PlacementGroupState, _group_rows(), filters, limit)


def get_placement_group(id: str, address: str | None = None, timeout: int = 30, _explain: bool = False) -> PlacementGroupState | None:
    return next((PlacementGroupState(**row) for row in _group_rows() if row["placement_group_id"] == id), None)


def list_tasks(*args: Any, **kwargs: Any) -> list[TaskState]:
    """Returns an empty list: tasks are not recorded."""
    return []


def list_workers(*args: Any, **kwargs: Any) -> list[WorkerState]:
    """Returns an empty list: workers are not recorded."""
    return []


def list_objects(*args: Any, **kwargs: Any) -> list[ObjectState]:
    """Returns an empty list: objects are not recorded."""
    return []


def list_jobs(*args: Any, **kwargs: Any) -> list[JobState]:
    """Returns an empty list: job submission is refused and drivers are not recorded."""
    return []


def summarize_actors(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns the number of actors by class and state."""
    classes: dict[str, Any] = {}
    for row in _actor_rows():
        states = classes.setdefault(row["class_name"], {"class_name": row["class_name"], "state_counts": {}})["state_counts"]
        states[row["state"]] = states.get(row["state"], 0) + 1
    total = sum(sum(c["state_counts"].values()) for c in classes.values())
    return {"cluster": {"summary": classes, "total_actors": total, "summary_by": "class"}}


_REFUSED = {
    "get_log": "`troupe logs`", "list_logs": "`troupe logs`", "get_task": "`troupe status`", "get_objects": "`troupe status`",
    "get_job": "`troupe status`", "get_worker": "`troupe status`", "list_runtime_envs": "the drivers' own settings",
    "list_cluster_events": "`troupe events`", "summarize_tasks": "`troupe status`", "summarize_objects": "`troupe status`",
    "StateApiClient": "the functions of this module",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise refuse_attribute(f"ray.util.state.{name}", _REFUSED[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
