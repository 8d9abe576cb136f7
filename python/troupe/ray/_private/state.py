"""ray._private.state: tables of the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _state
from .._ids import PlacementGroupID
from .._nodes import (
    available_resources,
    available_resources_per_node,
    cluster_resources,
    nodes,
    total_resources_per_node,
)
from ..util.placement_group import table_row

__all__ = [
    "GlobalState",
    "actors",
    "available_resources",
    "available_resources_per_node",
    "cluster_resources",
    "nodes",
    "state",
    "total_resources_per_node",
]


class GlobalState:
    """Cluster tables, by id."""

    def placement_group_table(self, placement_group_id: PlacementGroupID | None = None) -> dict[str, object]:
        if placement_group_id is None:
            return {row["placement_group_id"]: table_row(row) for row in _state.control_call("placement", "groups")}
        key = placement_group_id if isinstance(placement_group_id, str) else placement_group_id.hex()
        return table_row(_state.control_call("placement", "group", key))

    def get_placement_group_by_name(self, placement_group_name: str, ray_namespace: str) -> dict[str, object] | None:
        found = _state.control_call("placement", "group_named", placement_group_name, ray_namespace)
        return self.placement_group_table(found) if found else None

    def node_table(self) -> list[dict[str, Any]]:
        return nodes()

    def actor_table(self, actor_id: Any = None, *args: object) -> dict[str, Any]:
        rows = {row["actor_id"]: _actor(row) for row in _state.control_call("actors")}
        if actor_id is None:
            return rows
        return rows.get(actor_id if isinstance(actor_id, str) else actor_id.hex(), {})

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        return available_resources_per_node()

    def total_resources_per_node(self) -> dict[str, dict[str, float]]:
        return total_resources_per_node()

    def cluster_resources(self) -> dict[str, float]:
        return cluster_resources()

    def available_resources(self) -> dict[str, float]:
        return available_resources()


def _actor(row: Mapping[str, object]) -> dict[str, object]:
    return {
        "ActorID": row["actor_id"],
        "ActorClassName": row["class_name"],
        "State": row["state"],
        "Name": row["name"],
        "JobID": row["job_id"],
        "IsDetached": row["is_detached"],
        "Address": {"NodeID": row["node_id"], "IPAddress": "", "Port": 0},
        "Pid": row["pid"],
    }


state = GlobalState()


def actors(actor_id: str | None = None) -> dict[str, object]:
    return state.actor_table(actor_id)


def node_ids() -> list[str]:
    """Returns the "node:ADDRESS" resources of live nodes."""
    return [
        name
        for node in nodes()
        if node["Alive"]
        for name in node["Resources"]
        if name.startswith("node:") and "__" not in name
    ]
