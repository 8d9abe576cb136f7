"""Reservations of nodes and bundles, for clusters that share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import _check, _errors, _seam, _session
from ._config import STRATEGIES


class ResourceManager:
    """A reservation of whole nodes. Clusters on it share a device wherever their mappings overlap. wait: seconds to
    wait in the queue."""

    def __init__(self, num_gpus_per_node: int = 0, num_nodes: int = 1, *, wait: float = 0.0) -> None:
        _check.integer("num_gpus_per_node", num_gpus_per_node)
        _check.integer("num_nodes", num_nodes, 1)
        _check.number("wait", wait, unit="seconds")
        self.num_gpus_per_node = num_gpus_per_node
        self.num_nodes = num_nodes
        self._session = _session.current()
        self.id = ""
        self.nodes: list[str] = []
        if num_gpus_per_node:
            request = _seam.reserve(
                runtime=self._session.id,
                holder="resource manager",
                nodes=num_nodes,
                devices=num_gpus_per_node,
                wait=float(wait),
            )
            got = self._session.core.ask(request).get()
            self.id, self.nodes = got["id"], got["nodes"] or []

    @property
    def num_gpus(self) -> int:
        return self.num_gpus_per_node * self.num_nodes

    def destroy(self) -> None:
        """Releases the nodes. Shut down the clusters on them first."""
        if self.id and not self._session.closed:
            self._session.core.ask(_seam.unreserve(id=self.id)).get()
            self.id = ""

    def __enter__(self) -> ResourceManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


class Reservation:
    """Bundles of resources, reserved together: all or none.

    A cluster with a Reservation as its resource_manager has one worker for each bundle, or for each that
    WorkerConfig(bundles=[0, 2]) selects. actor(…, reservation=r, bundle=0) takes a part of a bundle, or all of it.

    - bundles: a dict for each bundle, with GPU (0.5 is a share of a device), CPU, memory (bytes, or "4GiB") and
      resources that nodes declare by name.
    - strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
    - name: a name within the run, by which Reservation.attach(name) finds it.
    - wait: seconds to wait in the queue. With 0, resources that are not free now are an error.
    """

    def __init__(
        self,
        bundles: Sequence[Mapping[str, object]],
        *,
        strategy: str = "PACK",
        name: str | None = None,
        wait: float = 0.0,
    ) -> None:
        if strategy not in STRATEGIES:
            raise _errors.InvalidError(f"strategy={strategy!r} is none of {', '.join(STRATEGIES)}")
        self.bundles = [dict(b) for b in bundles]
        if not self.bundles:
            raise _errors.InvalidError('bundles is empty; give a dict for each bundle, such as {"GPU": 1}')
        self._session = _session.current()
        self.name = "" if name is None else _check.text("name", name)
        request = _seam.reserve(
            runtime=self._session.id,
            holder=name or "reservation",
            bundles=[_bundle(i, b) for i, b in enumerate(self.bundles)],
            strategy=strategy,
            id=_id(self._session.namespace, self.name),
            wait=_check.number("wait", wait, unit="seconds"),
        )
        self._take(self._session.core.ask(request).get())
        self._owned = True

    def _take(self, got: dict[str, Any]) -> None:
        self.id: str = got["id"]
        self.nodes: list[str] = got["nodes"] or []  # the node of each bundle
        self._devices: list[list[int]] = [list(d or []) for d in got["devices"] or []]

    @classmethod
    def attach(cls, name: str) -> Reservation:
        """Returns the reservation of that name in this run, which another process holds. Raises NotFoundError if there
        is none."""
        session = _session.current()
        id = _id(session.namespace, _check.text("name", name))
        got = session.core.ask(_seam.reservation(runtime=session.id, name=id)).get()
        made = cls.__new__(cls)
        made._session, made.name, made._owned = session, name, False
        made.bundles = [_unpacked(b) for b in got["bundles"]]
        made._take(got)
        return made

    def _indices(self, chosen: Sequence[int] | None) -> list[int]:
        """Checks the chosen indices of bundles; None selects all bundles."""
        indices = list(range(len(self.bundles))) if chosen is None else [_check.integer("bundles", i) for i in chosen]
        for i in indices:
            if i >= len(self.bundles):
                raise _errors.InvalidError(f"there is no bundle {i}: the reservation has {len(self.bundles)}")
        if not indices:
            raise _errors.InvalidError("bundles is empty; give the index of a bundle for each worker")
        return indices

    def _has_share(self, indices: Sequence[int]) -> bool:
        return any(_bundle(i, self.bundles[i]).get("devices", 0) % 1000 for i in indices)

    def _devices_of(self, chosen: list[int]) -> tuple[list[int] | None, list[str]]:
        """Returns the devices of bundles, as a device mapping counts them; for bundles without devices, the node of
        each instead."""
        if self._has_share(chosen):
            raise _errors.InvalidError(
                f"bundles {chosen} have shares of devices: a role has one worker on such a bundle; make a role or an "
                f"actor for each, actor(…, reservation=r, bundle={chosen[0]})"
            )
        if len({len(self._devices[i]) for i in chosen}) > 1:
            raise _errors.InvalidError(
                f"bundles {chosen} do not have equally many devices each, as the workers of one role must"
            )
        if not self._devices[chosen[0]]:
            return None, [self.nodes[i] for i in chosen]
        known = {n["node"]: n for n in self._session.core.ask(_seam.nodes(runtime=self._session.id)).get()}
        order = sorted(set(self.nodes), key=lambda node: known[node]["rank"])
        per_node = max(len(known[node]["devices"] or []) for node in order)
        return [order.index(self.nodes[i]) * per_node + d for i in chosen for d in self._devices[i]], []

    def release(self) -> None:
        """Releases the bundles. Shut down the clusters on them first. Repeated calls have no effect."""
        if not self._owned:
            raise _errors.InvalidError(
                f"reservation {self.name} is held by another process, which releases it; `troupe release {self.id}` "
                "does too"
            )
        if self.id and not self._session.closed:
            self._session.core.ask(_seam.unreserve(id=self.id)).get()
            self.id = ""

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned:
            self.release()

    def __repr__(self) -> str:
        return f"<troupe.Reservation {self.id or 'released'}, {len(self.bundles)} bundles>"


class BundleOf:
    """One bundle of a reservation, from which one worker takes its resources."""

    def __init__(self, reservation: Reservation, index: int | None) -> None:
        if not isinstance(reservation, Reservation):
            raise _errors.InvalidError(
                f"reservation is of type {type(reservation).__name__}; give a troupe.Reservation"
            )
        self.reservation = reservation
        self.index = None if index is None else reservation._indices([index])[0]

    def _request(self, role: str, world: int, asked: Mapping[str, object]) -> dict[str, object]:
        """Returns the part of a role's request that specifies the worker's resources and the bundle they come from."""
        if world != 1:
            raise _errors.InvalidError(
                f"role {role!r}: world_size is {world}, and one worker takes a part of one bundle"
            )
        if not asked and self.index is None:
            raise _errors.InvalidError(
                f"role {role!r}: give bundle=, or what it takes of any bundle: num_gpus=, num_cpus=, memory=, "
                "resources="
            )
        if not asked and self.index is not None:
            asked = _bundle(self.index, self.reservation.bundles[self.index])
        return {
            "parent": self.reservation.id,
            "parent_bundle": -1 if self.index is None else self.index,
            "bundles": [asked],
        }


def _id(namespace: str, name: str) -> str:
    """Returns the id of a reservation by its name. All runs on a head share the ids, so the namespace is part of it,
    unless it is the default."""
    if not name or namespace == "default":
        return name
    full = f"{namespace}-{name}"
    if len(full) <= 64:
        return full
    import hashlib  # imported here, because workers import this module and do not need hashlib

    return f"{name[:40]}-{hashlib.sha256(full.encode()).hexdigest()[:16]}"


def _bundle(i: int, given: Mapping[str, object]) -> dict[str, Any]:
    """Converts a bundle to the core's format."""
    known = {
        "GPU": ("devices", _check.devices),
        "CPU": ("cpus", _check.thousandths),
        "memory": ("memory", _check.memory),
    }
    made: dict[str, Any] = {
        known[name][0]: known[name][1](f"bundles[{i}][{name!r}]", given[name]) for name in known if name in given
    }
    others = {name: given[name] for name in given if name not in known}
    for name in others:
        if near := _check.suggestion(name, known, 0.8):
            raise _errors.InvalidError(
                f"bundles[{i}] has no resource {name!r}{near}; there are {', '.join(known)}, and those that nodes "
                "declare"
            )
    if others:
        made["resources"] = _check.resources(f"bundles[{i}]", others)
    return made


def _unpacked(bundle: dict[str, Any]) -> dict[str, object]:
    """Converts a bundle from the core's format to that of the constructor."""
    amounts = {
        "GPU": bundle.get("devices", 0) / 1000,
        "CPU": bundle.get("cpus", 0) / 1000,
        "memory": bundle.get("memory", 0),
    }
    amounts |= {name: amount / 1000 for name, amount in (bundle.get("resources") or {}).items()}
    return {name: amount for name, amount in amounts.items() if amount}
