"""ray.nodes(), cluster_resources(), available_resources(), get_gpu_ids() and timeline()."""

from __future__ import annotations

import socket
from typing import Any

from . import _state


def _rows() -> list[dict[str, Any]]:
    return list(_state.control_call("placement", "nodes"))


def nodes() -> list[dict[str, Any]]:
    """The nodes, with the keys of Ray; ports and sockets that do not exist are 0 or empty."""
    return [
        {
            "NodeID": n["node_id"], "Alive": n["alive"], "NodeManagerAddress": n["address"], "NodeManagerHostname": socket.gethostname(),
            "NodeManagerPort": 0, "ObjectManagerPort": 0, "ObjectStoreSocketName": f"troupe-{n['name']}", "RayletSocketName": f"troupe-{n['name']}",
            "MetricsExportPort": 0, "MetricsAgentPort": 0, "DashboardAgentListenPort": 0, "NodeName": n["name"], "RuntimeEnvAgentPort": 0,
            "DeathReason": 0, "DeathReasonMessage": "" if n["alive"] else "the head lost the node", "alive": n["alive"],
            "Resources": {k: v for k, v in n["total"].items() if v} if n["alive"] else {}, "Labels": dict(n["labels"]),
        }
        for n in _rows()
    ]  # fmt: skip


def _sum(kind: str) -> dict[str, float]:
    total: dict[str, float] = {}
    for node in _rows():
        for name, amount in node[kind].items() if node["alive"] else ():
            total[name] = total.get(name, 0.0) + amount
    return {name: amount for name, amount in total.items() if amount > 0}


def cluster_resources() -> dict[str, float]:
    """What all nodes have together."""
    return _sum("total")


def available_resources() -> dict[str, float]:
    """What actors, tasks and placement groups leave of it; resources of which nothing is left are missing."""
    return _sum("free")


def available_resources_per_node() -> dict[str, dict[str, float]]:
    return {n["node_id"]: {k: v for k, v in n["free"].items() if v > 0} for n in _rows() if n["alive"]}


def total_resources_per_node() -> dict[str, dict[str, float]]:
    return {n["node_id"]: {k: v for k, v in n["total"].items() if v > 0} for n in _rows() if n["alive"]}


def get_gpu_ids() -> list[Any]:
    """The GPUs of this actor or task: numbers, or texts where CUDA_VISIBLE_DEVICES of the node has such. None in a driver."""
    state = _state.current()
    found = [] if state is None else state.accelerators.get("GPU", [])
    return [int(i) if i.isdigit() else i for i in found]


def timeline(filename: str | None = None) -> Any:
    """Ray's profile of tasks. Troupe records none of them in this form: the list is empty; `troupe timeline` shows calls of roles."""
    if filename is None:
        return []
    with open(filename, "w") as f:
        f.write("[]")
    return None


def node_ip() -> str:
    """The address of this node, as others reach it."""
    state = _state.current()
    if state is not None and state.node_ip:
        return str(state.node_ip)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))  # nothing is sent: the kernel chooses the source address
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
