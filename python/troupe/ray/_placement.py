"""Resources of actors, tasks and placement groups: on which node a request runs, which devices it gets, and when.

The control service (_control.py) has one Placement, which runs on its event loop. ray.util and ray.nodes() reach it through
`_state.control_call("placement", method, …)`, which calls `rpc_<method>`; some of these are coroutines.

A demand is a dict of amounts by name: {"CPU": 1, "GPU": 0.5, "memory": 1e9, "NPU": 2}. A strategy is one of
    None or "DEFAULT" or "SPREAD"
    {"kind": "node", "node_id": hex, "soft": bool}
    {"kind": "placement_group", "id": hex, "bundle": int, "capture": bool}       bundle -1: any bundle of the group
    {"kind": "labels", "hard": {label: [accepted values]}}

Amounts are integers in units of 1/10,000, as in Ray, so that sums are exact.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

UNIT = 10_000
DEVICES = ("GPU", "NPU", "TPU", "HPU", "neuron_cores", "RBLN")  # resources whose units have an index
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_REMOVED_MOST = 10_000  # number of removed groups to remember
_HYBRID = 0.5  # nodes with a load below this fraction count as equally loaded, so one is filled up to it before the next is used


class Unschedulable(Exception):
    """Raised when a request can never run, because its node or placement group is gone. The control service converts it into Ray's
    exception."""


class GroupRemoved(Unschedulable):
    """Raised when the request's placement group has been removed."""


class Allocation:
    """The resources granted to a request: the node, and the indices of its devices by resource."""

    def __init__(self, key: str, node: Node, room: Room, demand: dict[str, float], shares: dict[str, dict[int, int]]) -> None:
        self.key, self.node_id, self.node, self.demand = key, node.node_id, node.name, demand
        self.devices = {name: [str(i) for i in held] for name, held in shares.items()}
        self.room = room  # the node, or a bundle of a placement group
        self.shares = shares
        self.suspended = False


def _units(demand: dict[str, float]) -> dict[str, int]:
    return {name: round(amount * UNIT) for name, amount in demand.items() if round(amount * UNIT)}


class Room:
    """A pool of resources that requests share: a node, or a bundle of a placement group."""

    def __init__(self, total: dict[str, int], devices: dict[str, dict[int, int]]) -> None:
        self.total, self.free = dict(total), dict(total)
        self.devices = devices  # free amount of each device, by resource and index

    def fits(self, demand: dict[str, int]) -> bool:
        return all(self.free.get(n, 0) >= a and self.pick(n, a) is not None for n, a in demand.items())

    def could_fit(self, demand: dict[str, int]) -> bool:
        """Returns whether the demand would fit if the room were empty."""
        return all(self.total.get(n, 0) >= a for n, a in demand.items())

    def pick(self, name: str, amount: int) -> dict[int, int] | None:
        """Chooses the devices for an amount: whole ones, and for a fraction the device with the smallest sufficient free share. Returns
        None if they do not suffice."""
        free = self.devices.get(name)
        if free is None:
            return {}
        whole, part = divmod(amount, UNIT)
        chosen = dict.fromkeys([i for i, f in free.items() if f == UNIT][:whole], UNIT)
        if len(chosen) < whole:
            return None
        if part:
            able = [i for i, f in free.items() if i not in chosen and f >= part]
            if not able:
                return None
            chosen[min(able, key=lambda i: (free[i], i))] = part
        return chosen

    def take(self, demand: dict[str, int]) -> dict[str, dict[int, int]]:
        shares = {name: self.pick(name, amount) or {} for name, amount in demand.items() if name in self.devices}
        for name, amount in demand.items():
            self.free[name] = self.free.get(name, 0) - amount
        self.move(shares, -1)
        return shares

    def give(self, demand: dict[str, int], shares: dict[str, dict[int, int]]) -> None:
        for name, amount in demand.items():
            self.free[name] = self.free.get(name, 0) + amount
        self.move(shares, +1)

    def move(self, shares: dict[str, dict[int, int]], sign: int) -> None:
        for name, held in shares.items():
            for index, share in held.items():
                self.devices[name][index] += sign * share

    def load(self) -> float:
        """Returns the used fraction of the busiest among CPU, memory and devices."""
        return max((1 - self.free[n] / t for n, t in self.total.items() if t and (n in ("CPU", "memory") or n in self.devices)), default=0.0)


class Node(Room):
    """A node of the cluster, with an agent process."""

    def __init__(self, name: str, address: str, total: dict[str, float]) -> None:
        units = _units(total)
        indexed = {n: dict.fromkeys(range(units[n] // UNIT), UNIT) for n in DEVICES if units.get(n, 0) >= UNIT}
        super().__init__(units, indexed)
        self.node_id = node_id(name)
        self.name, self.address, self.alive = name, address, True
        self.order = 0  # order of arrival
        self.labels: dict[str, str] = {}


def node_id(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest() + "0" * 16


class Group:
    """A placement group: its bundles, and the room of each bundle that is held."""

    def __init__(self, id: str, name: str, namespace: str, owner: str, detached: bool, bundles: list[dict[str, float]], strategy: str, target: str) -> None:
        self.id, self.name, self.namespace, self.owner, self.detached = id, name, namespace, owner, detached
        self.bundles, self.strategy, self.target = bundles, strategy, target
        self.demands = [_units(b) for b in bundles]
        self.rooms: dict[int, tuple[Node, Room, dict[str, dict[int, int]]]] = {}  # held bundles, by index
        self.placed: list[str] = [""] * len(bundles)  # node id of each bundle
        self.state = "PENDING"
        self.made, self.took = time.time(), 0.0  # took: milliseconds until creation
        self.changed = asyncio.Event()  # set when the group is created or removed
        self.gang: list[Any] | None = None  # name and size of the gang, the placement groups to be created together with this one

    def row(self) -> dict[str, Any]:
        return {
            "placement_group_id": self.id, "name": self.name, "bundles": dict(enumerate(self.bundles)),
            "bundles_to_node_id": dict(enumerate(self.placed)),
            "strategy": self.strategy, "state": self.state, "is_detached": self.detached, "namespace": self.namespace, "owner": self.owner,
            "stats": {
                "end_to_end_creation_latency_ms": self.took, "scheduling_latency_ms": 0.0, "scheduling_attempt": 1,
                "highest_retry_delay_ms": 0.0, "scheduling_state": {"CREATED": "FINISHED", "PENDING": "QUEUED"}.get(self.state, self.state),
            },
        }  # fmt: skip


class Placement:
    """Grants requests as soon as they fit, oldest first. A request that does not fit waits without blocking later ones."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.groups: dict[str, Group] = {}
        self.held: dict[str, Allocation] = {}
        self.waiting: dict[str, tuple[dict[str, int], dict[str, float], Any, asyncio.Future[Allocation]]] = {}
        self._numbers = itertools.count()
        self._spread = itertools.count(1)

    # Nodes.

    def add_node(self, name: str, address: str, total: dict[str, float], labels: dict[str, str] | None = None) -> Node:
        """Adds a node, or updates the totals of the live node with this name."""
        old = self.nodes.get(node_id(name))
        if old is not None and old.alive:
            for n, amount in _units(total).items():
                old.free[n] = old.free.get(n, 0) + amount - old.total.get(n, 0)
                old.total[n] = amount
            self.grant()
            return old
        node = Node(name, address, total)
        node.order = next(self._numbers)
        node.labels = {"ray.io/node-id": node.node_id, **(labels or {})}
        self.nodes[node.node_id] = node
        self.grant()
        return node

    def remove_node(self, name: str) -> list[str]:
        """Marks a node dead and returns the keys of the allocations on it, which the caller must end. Its bundles are placed on other
        nodes."""
        node = self.nodes.get(node_id(name))
        if node is None or not node.alive:
            return []
        node.alive = False
        lost = [key for key, a in self.held.items() if a.node_id == node.node_id]
        for group in self.groups.values():
            gone = [i for i, (at, _, _) in group.rooms.items() if at is node]
            for i in gone:
                del group.rooms[i]
                group.placed[i] = ""
            if gone:
                group.state = "RESCHEDULING"
                group.changed.clear()
        for key in lost:
            self.held.pop(key, None)
        self._refuse_lost_nodes()
        self.grant()
        return lost

    def _refuse_lost_nodes(self) -> None:
        for key, (_, _, strategy, future) in list(self.waiting.items()):
            why = self._impossible(strategy)
            if why and not future.done():
                del self.waiting[key]
                future.set_exception(why)

    # Requests.

    async def acquire(self, key: str, demand: dict[str, float], strategy: Any) -> Allocation:
        """Waits until the demand fits. Cancelling the wait withdraws the request. Raises Unschedulable if it can never fit."""
        why = self._impossible(strategy)
        if why is not None:
            raise why
        future: asyncio.Future[Allocation] = asyncio.get_running_loop().create_future()
        self.waiting[key] = (_units(demand), demand, strategy, future)
        self.grant()
        try:
            return await future
        except asyncio.CancelledError:
            self.waiting.pop(key, None)
            self.release(key)
            raise

    def try_acquire(self, key: str, demand: dict[str, float], strategy: Any) -> Allocation | None:
        """Grants a request at once if it fits, otherwise returns None."""
        why = self._impossible(strategy)
        if why is not None:
            raise why
        units = _units(demand)
        found = self._room_for(units, strategy)
        return None if found is None else self._take(key, *found, units, demand)

    def release(self, key: str) -> None:
        """Releases the allocation of a key, if it has one."""
        held = self.held.pop(key, None)
        if held is not None:
            units = _units(held.demand)
            if held.suspended:
                units.pop("CPU", None)
            held.room.give(units, held.shares)
            self.grant()

    def suspend(self, key: str) -> None:
        """Frees the CPUs of a task while it waits in get."""
        held = self.held.get(key)
        if held is not None and not held.suspended and held.demand.get("CPU"):
            held.suspended = True
            held.room.give({"CPU": round(held.demand["CPU"] * UNIT)}, {})
            self.grant()

    def resume(self, key: str) -> None:
        """Takes the CPUs of a resumed task back, even if that oversubscribes the node."""
        held = self.held.get(key)
        if held is not None and held.suspended:
            held.suspended = False
            held.room.free["CPU"] -= round(held.demand["CPU"] * UNIT)

    def grant(self) -> None:
        """Creates the groups and grants the requests that fit now."""
        for group in list(self.groups.values()):
            if group.state in ("PENDING", "RESCHEDULING"):
                self._create_gang(group)
        failed: list[tuple[dict[str, int], Any]] = []
        for key, (units, demand, strategy, future) in list(self.waiting.items()):
            if future.done():
                self.waiting.pop(key, None)
                continue
            if (units, strategy) in failed:  # an equal request did not fit
                continue
            found = self._room_for(units, strategy)
            if found is None:
                failed.append((units, strategy))
                continue
            del self.waiting[key]
            future.set_result(self._take(key, *found, units, demand))

    def _take(self, key: str, node: Node, room: Room, units: dict[str, int], demand: dict[str, float]) -> Allocation:
        self.held[key] = Allocation(key, node, room, demand, room.take(units))
        return self.held[key]

    def _impossible(self, strategy: Any) -> Unschedulable | None:
        if not isinstance(strategy, dict):
            return None
        if strategy["kind"] == "placement_group":
            group = self.groups.get(strategy["id"])
            if group is None or group.state == "REMOVED":
                return GroupRemoved(f"the placement group {strategy['id']} was removed")
        elif strategy["kind"] == "node" and not strategy.get("soft"):
            node = self.nodes.get(strategy["node_id"])
            if node is None or not node.alive:
                return Unschedulable(f"the node {strategy['node_id']} of NodeAffinitySchedulingStrategy(soft=False) does not exist or is dead")
        return None

    def _room_for(self, units: dict[str, int], strategy: Any) -> tuple[Node, Room] | None:
        if isinstance(strategy, dict) and strategy["kind"] == "placement_group":
            group = self.groups[strategy["id"]]
            index = strategy.get("bundle", -1)
            rooms = [r for i, r in sorted(group.rooms.items()) if index < 0 or i == index]
            return next(((node, room) for node, room, _ in rooms if room.fits(units)), None)
        alive = [n for n in self.nodes.values() if n.alive]
        if isinstance(strategy, dict) and strategy["kind"] == "node":
            wanted = self.nodes.get(strategy["node_id"])
            if wanted is not None and wanted.alive and (not strategy.get("soft") or wanted.could_fit(units)):
                alive = [wanted]
        if isinstance(strategy, dict) and strategy["kind"] == "labels":
            alive = [n for n in alive if all(n.labels.get(k) in v for k, v in strategy["hard"].items())]
        able = [n for n in alive if n.fits(units)]
        if not able:
            return None
        if strategy == "SPREAD":
            turn = next(self._spread)
            node = able[turn % len(able)]
        else:
            wants_devices = any(n in DEVICES for n in units)
            node = min(able, key=lambda n: (not wants_devices and bool(n.devices), max(n.load(), _HYBRID), n.order))
        return node, node

    # Placement groups.

    def _create_gang(self, group: Group) -> None:
        """Creates a group together with the other groups of its gang: all of them, or none."""
        gang = [group]
        if group.gang and group.state == "PENDING":
            name, size = group.gang
            members = [g for g in self.groups.values() if g.gang and g.gang[0] == name]
            if len(members) < size:
                return  # the other groups have not been requested yet
            gang = [g for g in members if g.state == "PENDING"]  # the others were removed
        for i, one in enumerate(gang):
            if not self._hold(one):
                for held in gang[:i]:
                    self._free_rooms(held)
                    held.placed = [""] * len(held.bundles)
                return
        for one in gang:
            one.state, one.took = "CREATED", (time.time() - one.made) * 1000
            one.changed.set()

    def _hold(self, group: Group) -> bool:
        """Reserves the bundles of a group that are not held yet: all of them, or none."""
        chosen = self._nodes_for(group)
        if chosen is None:
            return False
        for i, node in chosen.items():
            shares = node.take(group.demands[i])
            group.rooms[i] = (node, Room(group.demands[i], {n: dict(held) for n, held in shares.items()}), shares)
            group.placed[i] = node.node_id
        return True

    def _nodes_for(self, group: Group) -> dict[int, Node] | None:
        """Chooses a node for each bundle that is not held, by index. Returns None if they do not all fit."""
        alive = sorted((n for n in self.nodes.values() if n.alive), key=lambda n: n.order)
        missing = [i for i in range(len(group.demands)) if i not in group.rooms]
        missing.sort(key=lambda i: sorted(((n in DEVICES, a) for n, a in group.demands[i].items()), reverse=True), reverse=True)
        there = [node for node, _, _ in group.rooms.values()]
        if group.strategy == "STRICT_SPREAD":
            return self._assign(group, missing, [n for n in alive if n not in there], lambda used, n: n.order, True)
        if group.strategy == "SPREAD":
            return self._assign(group, missing, alive, lambda used, n: (used.get(n.node_id, 0) + there.count(n), n.order), False)
        single = there[:1] if group.strategy == "STRICT_PACK" and there else sorted(alive, key=lambda n: (n not in there, n.node_id != group.target, -n.load(), n.order))
        for node in single:
            found = self._assign(group, missing, [node], lambda used, n: 0, False)
            if found is not None:
                return found
        if group.strategy == "STRICT_PACK":
            return None
        return self._assign(
            group, missing, alive, lambda used, n: (-used.get(n.node_id, 0) - there.count(n), -n.free.get("GPU", 0), -n.free.get("CPU", 0), n.order), False
        )

    def _assign(
        self, group: Group, order: Iterable[int], nodes: list[Node], rank: Callable[[dict[str, int], Node], Any], once: bool
    ) -> dict[int, Node] | None:
        """Assigns to each bundle the lowest-ranked node that has room for it; once: no node gets two bundles."""
        chosen: dict[int, tuple[Node, dict[str, dict[int, int]]]] = {}
        used: dict[str, int] = {}
        try:
            for i in order:
                able = [n for n in nodes if n.fits(group.demands[i]) and not (once and n.node_id in used)]
                if not able:
                    return None
                node = min(able, key=lambda n: rank(used, n))
                chosen[i] = (node, node.take(group.demands[i]))
                used[node.node_id] = used.get(node.node_id, 0) + 1
        finally:
            for i, (node, shares) in chosen.items():
                node.give(group.demands[i], shares)
        return {i: node for i, (node, _) in chosen.items()}

    def _free_rooms(self, group: Group) -> None:
        for i, (node, _, shares) in group.rooms.items():
            node.give(group.demands[i], shares)
        group.rooms = {}

    def remove_group(self, id: str, why: str) -> list[str]:
        """Removes a group. Requests waiting for it fail; allocations in it are dropped, and their keys returned."""
        group = self.groups.get(id)
        if group is None or group.state == "REMOVED":
            return []
        inside = [key for key, a in self.held.items() if any(a.room is room for _, room, _ in group.rooms.values())]
        self._free_rooms(group)
        group.state = "REMOVED"
        group.changed.set()
        for key in inside:
            self.held.pop(key, None)
        for key, (_, _, strategy, future) in list(self.waiting.items()):
            if isinstance(strategy, dict) and strategy.get("id") == id and not future.done():
                del self.waiting[key]
                future.set_exception(GroupRemoved(why))
        removed = [g for g in self.groups.values() if g.state == "REMOVED"]
        for old in removed[: max(0, len(removed) - _REMOVED_MOST)]:
            del self.groups[old.id]
        self.grant()
        return inside

    def owner_ended(self, owner: str) -> list[str]:
        """Removes the groups of an ended process, except detached ones. Returns the keys of the allocations in them."""
        inside: list[str] = []
        for group in list(self.groups.values()):
            if group.owner == owner and not group.detached and group.state != "REMOVED":
                inside += self.remove_group(group.id, f"the creator of the placement group {group.id} has ended")
        return inside

    # Methods called by other processes.

    def rpc_create_group(
        self, id: str, name: str, namespace: str, owner: str, detached: bool, bundles: list[dict[str, float]], strategy: str, target: str,
        gang: list[Any] | None = None,
    ) -> str:
        """Queues a group; gang: name and size of the set of groups to create together. Returns an empty string, or the reason for a
        refusal."""
        if name and any(g.name == name and g.namespace == namespace and g.state != "REMOVED" for g in self.groups.values()):
            return f"Failed to create placement group '{id}' because name '{name}' already exists."
        self.groups[id] = Group(id, name, namespace, owner, detached, [{k: float(v) for k, v in b.items()} for b in bundles], strategy, target)
        self.groups[id].gang = gang
        self.grant()
        return ""

    def rpc_remove_group(self, id: str) -> dict[str, Any]:
        return {"kill": self.remove_group(id, f"the placement group {id} was removed")}

    async def rpc_wait_group(self, id: str, timeout: float) -> str:
        """Waits until the group is created or removed, for at most timeout seconds (negative: without limit). Returns its state."""
        group = self.groups.get(id)
        if group is None:
            return ""
        if group.state in ("PENDING", "RESCHEDULING"):
            try:
                await asyncio.wait_for(group.changed.wait(), None if timeout < 0 else timeout)
            except asyncio.TimeoutError:
                pass
        return group.state

    def rpc_group(self, id: str) -> dict[str, Any]:
        group = self.groups.get(id)
        return {} if group is None else group.row()

    def rpc_groups(self) -> list[dict[str, Any]]:
        return [g.row() for g in self.groups.values()]

    def rpc_group_named(self, name: str, namespace: str) -> str:
        """Returns the id of the group with this name, or an empty string."""
        return next((g.id for g in self.groups.values() if g.name == name and g.namespace == namespace and g.state != "REMOVED"), "")

    def rpc_nodes(self) -> list[dict[str, Any]]:
        def plain(amounts: dict[str, int]) -> dict[str, float]:
            return {n: a / UNIT for n, a in amounts.items()}

        return [
            {"node_id": n.node_id, "name": n.name, "address": n.address, "alive": n.alive, "total": plain(n.total), "free": plain(n.free), "labels": n.labels}
            for n in sorted(self.nodes.values(), key=lambda n: n.order)
        ]

    def rpc_refresh(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Replaces the node list by the head's: name, address, total, labels. Nodes missing from it are marked dead."""
        for one in found:
            self.add_node(one["name"], one["address"], one["total"], one.get("labels"))
        there = {one["name"] for one in found}
        return {"kill": [key for n in list(self.nodes.values()) if n.alive and n.name not in there for key in self.remove_node(n.name)]}

    def rpc_waiting(self) -> list[dict[str, float]]:
        """Returns the demands of the waiting requests."""
        return [demand for _, demand, _, future in self.waiting.values() if not future.done()]


def totals(node: dict[str, Any], address: str, head: bool, declared: dict[str, Any] | None = None) -> dict[str, float]:
    """Returns the resources of a node as listed by the head (see cmd/libtroupe/resources.go). Declared amounts override detected ones."""
    found = {"CPU": float(node["cpus"]), "GPU": float(len(node["devices"] or [])), "memory": float(node["memory"])}
    found |= {name: amount / 1000 for name, amount in (node.get("resources") or {}).items()}
    found |= {name: float(amount) for name, amount in (declared or {}).items() if amount is not None}
    found.setdefault("object_store_memory", float(int(found["memory"] * 0.3)))
    found[f"node:{address}"] = 1.0
    if head:
        found["node:__internal_head__"] = 1.0
    return {name: amount for name, amount in found.items() if amount}
