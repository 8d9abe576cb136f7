"""Resources of actors and tasks: which node a request runs on, which devices it gets, and when.

One Placement lives in the control service (see _control.py), on its event loop. Its users are the control service itself, and
the functions of ray.util and ray.nodes() through `_state.control_call("placement", method, …)`, which calls `rpc_<method>`.

A demand is a dict of amounts by name: {"CPU": 1, "GPU": 0.5, "memory": 1e9, "NPU": 2}. A strategy is one of
    None or "DEFAULT" or "SPREAD"
    {"kind": "node", "node_id": hex, "soft": bool}
    {"kind": "placement_group", "id": hex, "bundle": int, "capture": bool}       bundle -1: any bundle of the group
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

_EPSILON = 1e-6


class Allocation:
    """What a request was given: the node, and by resource the indices of its devices."""

    def __init__(self, key: str, node_id: str, node: str, demand: dict[str, float], devices: dict[str, list[str]]) -> None:
        self.key, self.node_id, self.node, self.demand, self.devices = key, node_id, node, demand, devices


class Node:
    def __init__(self, name: str, address: str, total: dict[str, float]) -> None:
        self.node_id = hashlib.sha1(name.encode()).hexdigest() + "0" * 16
        self.name, self.address, self.total = name, address, dict(total)
        self.free = dict(total)
        self.devices = [1.0] * int(total.get("GPU", 0))


class Placement:
    """Grants demands in the order of the requests; one that does not fit waits."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.held: dict[str, Allocation] = {}
        self.shares: dict[str, dict[int, float]] = {}  # by key, the devices and how much of each
        self.waiting: dict[str, tuple[dict[str, float], Any, asyncio.Future[Allocation]]] = {}

    def add_node(self, name: str, address: str, total: dict[str, float]) -> Node:
        node = Node(name, address, total)
        self.nodes[node.node_id] = node
        self.grant()
        return node

    async def acquire(self, key: str, demand: dict[str, float], strategy: Any) -> Allocation:
        """Waits until the demand fits. Cancelling the wait withdraws the request."""
        future: asyncio.Future[Allocation] = asyncio.get_running_loop().create_future()
        self.waiting[key] = (demand, strategy, future)
        self.grant()
        try:
            return await future
        except asyncio.CancelledError:
            self.waiting.pop(key, None)
            self.release(key)
            raise

    def release(self, key: str) -> None:
        """Gives back what the key holds; one that holds nothing is no error."""
        held = self.held.pop(key, None)
        if held is not None:
            node = self.nodes[held.node_id]
            for name, amount in held.demand.items():
                node.free[name] = node.free.get(name, 0.0) + amount
            for index, share in self.shares.pop(key, {}).items():
                node.devices[index] += share
        self.grant()

    def suspend(self, key: str) -> None:
        """The task waits in get: its CPUs are free for others."""
        held = self.held.get(key)
        if held is not None and held.demand.get("CPU"):
            self.nodes[held.node_id].free["CPU"] += held.demand["CPU"]
            self.grant()

    def resume(self, key: str) -> None:
        """The task runs again: it takes its CPUs back, also where others have them by now."""
        held = self.held.get(key)
        if held is not None and held.demand.get("CPU"):
            self.nodes[held.node_id].free["CPU"] -= held.demand["CPU"]

    def grant(self) -> None:
        for key, (demand, strategy, future) in list(self.waiting.items()):
            if future.done():
                self.waiting.pop(key, None)
                continue
            node = self._fitting(demand, strategy)
            if node is not None:
                del self.waiting[key]
                future.set_result(self._take(key, node, demand))

    def _fitting(self, demand: dict[str, float], strategy: Any) -> Node | None:
        wanted = strategy.get("node_id") if isinstance(strategy, dict) and strategy.get("kind") == "node" else None
        nodes = sorted(self.nodes.values(), key=lambda n: n.node_id != wanted)
        for node in nodes:
            if wanted is not None and node.node_id != wanted and not strategy.get("soft"):
                continue
            if all(node.free.get(name, 0.0) + _EPSILON >= amount for name, amount in demand.items() if amount):
                return node
        return None

    def _take(self, key: str, node: Node, demand: dict[str, float]) -> Allocation:
        for name, amount in demand.items():
            if amount:
                node.free[name] -= amount
        shares: dict[int, float] = {}
        left = demand.get("GPU", 0.0)
        if 0 < left < 1:
            index = max((i for i, f in enumerate(node.devices) if f + _EPSILON >= left), key=lambda i: (node.devices[i] < 1 - _EPSILON, -i), default=0)
            shares[index] = left
        else:
            for index in [i for i, f in enumerate(node.devices) if f >= 1 - _EPSILON][: int(left)]:
                shares[index] = 1.0
        for index, share in shares.items():
            node.devices[index] -= share
        self.shares[key] = shares
        self.held[key] = Allocation(key, node.node_id, node.name, demand, {"GPU": [str(i) for i in shares]})
        return self.held[key]

    # What other processes ask for.

    def rpc_nodes(self) -> list[dict[str, Any]]:
        return [
            {"node_id": n.node_id, "name": n.name, "address": n.address, "alive": True, "total": n.total, "free": n.free} for n in self.nodes.values()
        ]
