"""A reservation of nodes, for clusters that share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import _check, _errors, _session
from ._config import STRATEGIES


class ResourceManager:
    """One reservation of whole nodes. Clusters on it share a device wherever their mappings overlap."""

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
            got = self._session.core.ask(
                "reserve", runtime=self._session.id, name="resource manager", reserve={"nodes": num_nodes, "devices": num_gpus_per_node, "wait": float(wait)}
            ).get()
            self.id, self.nodes = got["id"], got["nodes"] or []

    @property
    def num_gpus(self) -> int:
        return self.num_gpus_per_node * self.num_nodes

    def destroy(self) -> None:
        """Gives the nodes back. Clusters on them must be shut down before."""
        if self.id and not self._session.closed:
            self._session.core.ask("unreserve", name=self.id).get()
            self.id = ""

    def __enter__(self) -> ResourceManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


class Reservation:
    """Bundles of resources, held together: all or none. A cluster with it as resource_manager has one worker for each bundle, or for
    those that WorkerConfig(bundles=[0, 2]) chooses.

    bundles: a dict for each, with GPU, CPU and memory (bytes, or "4GiB"). strategy: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD. name: its
    id, which `troupe reservations` shows. wait: seconds in the queue; with 0, what is not free now is an error.
    """

    def __init__(self, bundles: Sequence[Mapping[str, Any]], *, strategy: str = "PACK", name: str | None = None, wait: float = 0.0) -> None:
        if strategy not in STRATEGIES:
            raise _errors.InvalidError(f"strategy={strategy!r} is none of {', '.join(STRATEGIES)}")
        self.bundles = [dict(b) for b in bundles]
        if not self.bundles:
            raise _errors.InvalidError("bundles is empty; give a dict for each bundle, such as {\"GPU\": 1}")
        self._session = _session.current()
        request = {
            "bundles": [_bundle(i, b) for i, b in enumerate(self.bundles)], "strategy": strategy, "id": name or "",
            "wait": _check.number("wait", wait, unit="seconds"),
        }  # fmt: skip
        got = self._session.core.ask("reserve", runtime=self._session.id, name=name or "reservation", reserve=request).get()
        self.id: str = got["id"]
        self.nodes: list[str] = got["nodes"] or []  # of each bundle
        self._devices: list[list[int]] = [list(d or []) for d in got["devices"] or []]

    def _devices_of(self, indices: Sequence[int] | None) -> tuple[list[int] | None, int]:
        """The devices of bundles as a device mapping counts them, and how many bundles these are."""
        chosen = list(range(len(self.bundles))) if indices is None else [_check.integer("bundles", i) for i in indices]
        for i in chosen:
            if i >= len(self.bundles):
                raise _errors.InvalidError(f"there is no bundle {i}: the reservation has {len(self.bundles)}")
        if len({len(self._devices[i]) for i in chosen}) > 1 or any(_bundle(i, self.bundles[i]).get("devices", 0) % 1000 for i in chosen):
            raise _errors.InvalidError(f"bundles {chosen} do not have equally many whole devices each, as the workers of one role must")
        known = {n["node"]: n for n in self._session.core.ask("nodes", runtime=self._session.id).get()}
        order = sorted(set(self.nodes), key=lambda node: known[node]["rank"])
        per_node = max(len(known[node]["devices"] or []) for node in order)
        ids = [order.index(self.nodes[i]) * per_node + d for i in chosen for d in self._devices[i]]
        return ids or None, len(chosen)

    def release(self) -> None:
        """Gives the bundles back. Clusters on them must be shut down before. It may be called more than once."""
        if self.id and not self._session.closed:
            self._session.core.ask("unreserve", name=self.id).get()
            self.id = ""

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _bundle(i: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """A bundle for the core."""
    kinds = {"GPU": ("devices", _check.devices), "CPU": ("cpus", _check.thousandths), "memory": ("memory", _check.memory)}
    for name in given:
        if name not in kinds:
            raise _errors.InvalidError(f"bundles[{i}] has no resource {name!r}{_check.suggestion(name, kinds)}; there are {', '.join(kinds)}")
    return {kinds[name][0]: kinds[name][1](f"bundles[{i}][{name!r}]", value) for name, value in given.items()}
