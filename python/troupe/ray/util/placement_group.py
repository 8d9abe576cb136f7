"""Placement groups: bundles of resources that are reserved together, all or none."""

from __future__ import annotations

import importlib
import os
import sys
import types
import warnings
from collections.abc import Mapping
from typing import Any

from .. import _forming, _infeasible, _labels, _objects, _state, exceptions
from .._ids import NodeID, PlacementGroupID
from .._refused import refuse

VALID_PLACEMENT_GROUP_STRATEGIES = {"PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"}
NODE_ID_LABEL_KEY = "ray.io/node-id"
_RESERVED = "bundle"  # a reserved resource name: Ray uses it for the bundles themselves


class PlacementGroup:
    """A placement group, identified by its id. It can be passed as an argument."""

    def __init__(self, id: PlacementGroupID, bundle_cache: list[dict[str, float]] | None = None) -> None:
        self.id = id
        self.bundle_cache = bundle_cache

    @staticmethod
    def empty() -> PlacementGroup:
        return PlacementGroup(PlacementGroupID.nil())

    @property
    def is_empty(self) -> bool:
        return bool(self.id.is_nil())

    def ready(self) -> _objects.ObjectRef:
        """Returns a reference to this group that becomes ready once all bundles are reserved."""
        if self.is_empty:
            return _objects.put(self)
        promise = _objects.Promise()
        asked = _state.control_async("placement", "wait_group", self.id.hex(), -1.0)

        def done(future: _state.Reply) -> None:
            try:
                state = future.result()
            except Exception as err:
                promise.set_exception(exceptions.RaySystemError(str(err)))
                return
            if state == "CREATED":
                promise.set_result(self)
            else:
                promise.set_exception(
                    exceptions.TaskPlacementGroupRemoved(
                        "The placement group corresponding to this task has been removed."
                    )
                )

        asked.add_done_callback(done)
        return promise.ref

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Waits for the bundles and returns whether all are reserved within the timeout."""
        state = _state.control_call("placement", "wait_group", self.id.hex(), float(timeout_seconds))
        if state in ("", "REMOVED"):
            raise Exception(f"Placement group {self.id} does not exist.")
        return bool(state == "CREATED")

    @property
    def bundle_specs(self) -> list[dict[str, float]]:
        if not self.bundle_cache:
            row = _state.control_call("placement", "group", self.id.hex())
            self.bundle_cache = list(row["bundles"].values()) if row else []
        return self.bundle_cache

    @property
    def bundle_count(self) -> int:
        return len(self.bundle_specs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacementGroup) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


def placement_group(
    bundles: list[dict[str, float]],
    strategy: str | None = None,
    name: str = "",
    lifetime: str | None = None,
    _soft_target_node_id: str | None = None,
    bundle_label_selector: list[dict[str, str]] | None = None,
    topology_strategy: dict[str, str] | None = None,
) -> PlacementGroup:
    """Requests a placement group without waiting for it; ready() and wait() report when it is reserved."""
    state = _state.require()
    validate_placement_group(
        bundles, strategy, lifetime, _soft_target_node_id, bundle_label_selector, topology_strategy
    )
    selectors = [[_labels.selector(s)] if s else [] for s in bundle_label_selector or ()]
    topology = dict(topology_strategy or {})
    chosen = topology.pop(NODE_ID_LABEL_KEY, strategy) or "PACK"
    if topology:
        raise refuse(f"topology_strategy by {next(iter(topology))}", "`troupe reserve --same LABEL`")
    id = PlacementGroupID(os.urandom(14) + bytes.fromhex(state.job_id))
    specs = [{k: float(v) for k, v in b.items()} for b in bundles]
    why = _state.control_call(
        "placement",
        "create_group",
        id.hex(),
        name or "",
        state.namespace,
        state.process,
        lifetime == "detached",
        specs,
        chosen,
        _soft_target_node_id or "",
        _forming.gang(),
        selectors,
    )
    if why:
        raise exceptions.RaySystemError(why)
    _infeasible.note(state)
    return PlacementGroup(id, specs)


def remove_placement_group(placement_group: PlacementGroup) -> None:
    """Removes a group. Actors and tasks in it are killed; those waiting for it fail."""
    _state.control_call("placement", "remove_group", placement_group.id.hex())


def get_placement_group(placement_group_name: str) -> PlacementGroup:
    """Returns the group with this name in the current namespace."""
    if not placement_group_name:
        raise ValueError("Please supply a non-empty value to get_placement_group")
    found = _state.control_call("placement", "group_named", placement_group_name, _state.require().namespace)
    if not found:
        raise ValueError(f"Failed to look up placement group with name: {placement_group_name}")
    return PlacementGroup(PlacementGroupID.from_hex(found))


_COLUMNS = ("placement_group_id", "name", "bundles", "bundles_to_node_id", "strategy", "state", "stats")


def table_row(row: Mapping[str, object]) -> dict[str, object]:
    return {column: row[column] for column in _COLUMNS} if row else {}


def placement_group_table(placement_group: PlacementGroup | None = None) -> dict[str, Any]:
    """Returns the state of a group, or of all groups by id."""
    if placement_group is None:
        return {row["placement_group_id"]: table_row(row) for row in _state.control_call("placement", "groups")}
    return table_row(_state.control_call("placement", "group", placement_group.id.hex()))


def get_current_placement_group() -> PlacementGroup | None:
    """Returns the placement group of the calling actor or task; None in a driver."""
    from .. import _context

    state, task = _state.current(), _context.current.get()
    group = task.placement if task is not None and task.placement else None if state is None else state.placement_group
    return None if not group else PlacementGroup(PlacementGroupID.from_hex(group["id"]))


def check_placement_group_index(placement_group: PlacementGroup, bundle_index: int) -> None:
    if placement_group.id.is_nil():
        if bundle_index != -1:
            raise ValueError("If placement group is not set, the value of bundle index must be -1.")
    elif bundle_index >= placement_group.bundle_count or bundle_index < -1:
        raise ValueError(
            f"placement group bundle index {bundle_index} is invalid. Valid placement group indexes: "
            f"0-{placement_group.bundle_count}"
        )


_SPECS_MOST = 1000
_specs: dict[str, list[dict[str, float]]] = {}  # bundles by group id; they never change


def check_fits(strategy: object, demand: dict[str, float], what: str) -> None:
    """Raises ValueError if no bundle of the group, or not the chosen one, could ever hold the demand. demand is what
    scheduling needs: one CPU for an actor without num_cpus."""
    if not isinstance(strategy, dict) or strategy.get("kind") != "placement_group":
        return
    if _RESERVED in demand:
        raise ValueError(f"The resource should not include `{_RESERVED}` which is reserved for placement groups")
    group = PlacementGroup(PlacementGroupID.from_hex(strategy["id"]), _specs.get(strategy["id"]))
    index = strategy.get("bundle", -1)
    if not group.bundle_specs:
        return  # the group was removed; the request fails when it is scheduled
    if len(_specs) > _SPECS_MOST:
        _specs.clear()
    _specs[strategy["id"]] = group.bundle_specs
    check_placement_group_index(group, index)
    specs = group.bundle_specs if index < 0 else group.bundle_specs[index : index + 1]
    if any(all(spec.get(name, 0) >= amount for name, amount in demand.items()) for spec in specs):
        return
    plain = {name: int(a) if a == int(a) else a for name, a in demand.items()}
    where = (
        "cannot fit into any bundles for the placement group"
        if index < 0
        else f"cannot fit into the bundle {index} of the placement group"
    )
    raise ValueError(
        f"Cannot schedule {what} with the placement group because the resource request {plain} {where}, "
        f"{group.bundle_specs}."
    )


def validate_placement_group(
    bundles: Any, strategy: str | None = None, lifetime: str | None = None, _soft_target_node_id: str | None = None,
    bundle_label_selector: Any = None, topology_strategy: Mapping[str, str] | None = None,
) -> bool:  # fmt: skip
    if topology_strategy is not None and strategy is not None:
        raise ValueError(
            f"`strategy` and `topology_strategy` cannot both be given: topology_strategy[{NODE_ID_LABEL_KEY!r}] is "
            "the strategy for nodes"
        )
    _check_strategy(strategy)
    if topology_strategy is not None:
        _check_topology(topology_strategy)
        strategy = topology_strategy.get(NODE_ID_LABEL_KEY)
    if _soft_target_node_id and (strategy or "PACK") != "STRICT_PACK":
        raise ValueError(f"_soft_target_node_id currently only works with STRICT_PACK but got {strategy or 'PACK'}")
    if _soft_target_node_id and NodeID.from_hex(_soft_target_node_id).is_nil():
        raise ValueError(f"Invalid hex ID of _soft_target_node_id, got {_soft_target_node_id}")
    _validate_bundles(bundles)
    if bundle_label_selector is not None:
        if len(bundles) != len(bundle_label_selector):
            raise ValueError(
                f"Invalid bundle label selector {bundle_label_selector}: there must be as many as bundles, "
                f"{len(bundles)}"
            )
        _validate_bundle_label_selector(bundle_label_selector)
    if lifetime not in (None, "detached"):
        raise ValueError(f"Placement group `lifetime` argument must be either `None` or 'detached'. Got {lifetime}.")
    return True


def _check_strategy(strategy: object) -> None:
    if strategy is not None and strategy not in VALID_PLACEMENT_GROUP_STRATEGIES:
        raise ValueError(
            f"Invalid placement group strategy {strategy}. Supported strategies are: "
            f"{VALID_PLACEMENT_GROUP_STRATEGIES}."
        )


def _check_topology(given: object) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"`topology_strategy` must be a dict, not a {type(given).__name__}")
    for key, value in given.items():
        if not isinstance(key, str) or not key:
            raise ValueError(f"`topology_strategy` keys must be non-empty strings, not {key!r}")
        if value not in VALID_PLACEMENT_GROUP_STRATEGIES:
            raise ValueError(
                f"Invalid topology strategy {value!r} for {key!r}; there are {VALID_PLACEMENT_GROUP_STRATEGIES}"
            )
        if key != NODE_ID_LABEL_KEY and value != "STRICT_PACK":
            raise ValueError(
                f"topology strategy {value!r} for {key!r}: only 'STRICT_PACK' is supported for labels other than "
                f"{NODE_ID_LABEL_KEY}"
            )
    if len([key for key in given if key != NODE_ID_LABEL_KEY]) > 1:
        raise ValueError(
            f"`topology_strategy` takes at most one topology label beside {NODE_ID_LABEL_KEY}, got {sorted(given)}"
        )


def _validate_bundles(bundles: object) -> None:
    example = 'a non-empty list of resource dictionaries, such as `[{"CPU": 1.0}, {"GPU": 1.0}]`'
    if not isinstance(bundles, list):
        raise ValueError(f"Placement group bundles must be a list, got {type(bundles)}.")
    if not bundles:
        raise ValueError(f"Bundles must be a non-empty list: {example}")
    for bundle in bundles:
        if (
            not isinstance(bundle, dict)
            or not all(isinstance(k, str) for k in bundle)
            or not all(_is_number(v) for v in bundle.values())
        ):
            raise ValueError(f"Bundles must be {example}")
        if not any(bundle.values()):
            raise ValueError(
                f"Bundles cannot be an empty dictionary or resources with only 0 values. Bundles: {bundles}"
            )
        if any(v < 0 for v in bundle.values()):
            raise ValueError(f"Bundles cannot have negative amounts. Bundles: {bundles}")
        if _RESERVED in bundle:
            raise ValueError(f"The resource `{_RESERVED}` is reserved for placement groups. Bundles: {bundles}")
        if "object_store_memory" in bundle:
            warnings.warn(
                "Setting 'object_store_memory' for bundles is deprecated since it doesn't actually reserve the "
                "required object store memory.",
                DeprecationWarning,
                stacklevel=4,
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _validate_bundle_label_selector(selectors: object) -> None:
    if not isinstance(selectors, list):
        raise ValueError(f"Placement group bundle_label_selector must be a list, got {type(selectors)}.")
    for one in selectors:
        if not isinstance(one, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in one.items()):
            raise ValueError("Bundle label selector must be a list of string dictionary label selectors.")
        try:
            _labels.selector(one)
        except ValueError as err:
            raise ValueError(f"Invalid label selector provided: {err}") from None


class _Callable(types.ModuleType):
    """Makes the module callable, because ray.util.placement_group is both this module and the function. Whichever of
    them an import binds, both uses work."""

    def __call__(self, *args: Any, **kwargs: Any) -> PlacementGroup:
        return placement_group(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Callable
