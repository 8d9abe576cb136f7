"""ray.nodes(), cluster_resources() and available_resources()."""

from __future__ import annotations

import socket
from typing import Any

from . import _state
from ._labels import HOST_LABEL, IP_LABEL


def _rows() -> list[dict[str, Any]]:
    return list(_state.control_call("placement", "nodes"))


def nodes() -> list[dict[str, Any]]:
    """Returns the nodes with Ray's keys. Ports are 0, and socket names are placeholders."""
    return [
        {
            "NodeID": n["node_id"],
            "Alive": n["alive"],
            "NodeManagerAddress": n["address"],
            "NodeManagerHostname": n["labels"].get(HOST_LABEL, n["name"]),
            "NodeManagerPort": 0,
            "ObjectManagerPort": 0,
            "ObjectStoreSocketName": f"troupe-{n['name']}",
            "RayletSocketName": f"troupe-{n['name']}",
            "MetricsExportPort": 0,
            "MetricsAgentPort": 0,
            "DashboardAgentListenPort": 0,
            "NodeName": n["name"],
            "RuntimeEnvAgentPort": 0,
            "DeathReason": 0,
            "DeathReasonMessage": "" if n["alive"] else "the head lost the node",
            "alive": n["alive"],
            "Resources": {k: v for k, v in n["total"].items() if v} if n["alive"] else {},
            "Labels": {k: v for k, v in n["labels"].items() if k not in (HOST_LABEL, IP_LABEL)},
        }
        for n in _rows()
    ]


def _sum(kind: str) -> dict[str, float]:
    total: dict[str, float] = {}
    for node in _rows():
        for name, amount in node[kind].items() if node["alive"] else ():
            total[name] = total.get(name, 0.0) + amount
    return {name: amount for name, amount in total.items() if amount > 0}


def cluster_resources() -> dict[str, float]:
    """Returns the total resources of all live nodes."""
    return _sum("total")


def available_resources() -> dict[str, float]:
    """Returns the resources not used by actors, tasks and placement groups. A resource that is used up is missing."""
    return _sum("free")


def available_resources_per_node() -> dict[str, dict[str, float]]:
    return {n["node_id"]: {k: v for k, v in n["free"].items() if v > 0} for n in _rows() if n["alive"]}


def total_resources_per_node() -> dict[str, dict[str, float]]:
    return {n["node_id"]: {k: v for k, v in n["total"].items() if v > 0} for n in _rows() if n["alive"]}


def node_ip() -> str:
    """Returns the IP address at which other nodes reach this one."""
    state = _state.current()
    if state is not None and state.node_ip:
        return str(state.node_ip)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                ("8.8.8.8", 80)
            )  # connect on a UDP socket sends nothing; the kernel only chooses the source address
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
