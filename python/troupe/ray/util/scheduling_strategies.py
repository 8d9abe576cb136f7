"""Scheduling strategies: placement groups, node affinity and node labels."""

from __future__ import annotations

from typing import Any

from .. import _labels
from .._ids import NodeID
from .._refused import refuse
from .placement_group import PlacementGroup, check_placement_group_index


class PlacementGroupSchedulingStrategy:
    """Schedules into a bundle of a placement group; index -1: any bundle."""

    def __init__(
        self,
        placement_group: PlacementGroup | None,
        placement_group_bundle_index: int = -1,
        placement_group_capture_child_tasks: bool | None = None,
    ) -> None:
        self.placement_group = placement_group
        self.placement_group_bundle_index = placement_group_bundle_index
        self.placement_group_capture_child_tasks = placement_group_capture_child_tasks

    def to_wire(self) -> dict[str, object] | None:
        group = self.placement_group
        if group is None:
            return None
        # int() also converts NumPy integers
        index = -1 if self.placement_group_bundle_index is None else int(self.placement_group_bundle_index)
        check_placement_group_index(group, index)
        if group.is_empty:
            return None
        return {
            "kind": "placement_group",
            "id": group.id.hex(),
            "bundle": index,
            "capture": bool(self.placement_group_capture_child_tasks),
        }


class NodeAffinitySchedulingStrategy:
    """Schedules on a given node. soft: falls back to other nodes if that node does not exist or is too small."""

    def __init__(
        self, node_id: str | NodeID, soft: bool, _spill_on_unavailable: bool = False, _fail_on_unavailable: bool = False
    ) -> None:
        self.node_id = node_id if isinstance(node_id, str) else node_id.hex()
        self.soft = soft
        self._spill_on_unavailable, self._fail_on_unavailable = _spill_on_unavailable, _fail_on_unavailable
        try:
            valid = not NodeID.from_hex(self.node_id).is_nil()
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(
                f"Invalid node_id '{self.node_id}'. Node ID must be a valid hex string; ray.nodes() lists the nodes."
            )
        if _spill_on_unavailable and not soft:
            raise ValueError("_spill_on_unavailable cannot be set when soft is False")
        if _fail_on_unavailable and soft:
            raise ValueError("_fail_on_unavailable cannot be set when soft is True")

    def to_wire(self) -> dict[str, object]:
        if self._spill_on_unavailable or self._fail_on_unavailable:
            raise refuse(
                "_spill_on_unavailable and _fail_on_unavailable of NodeAffinitySchedulingStrategy", "soft=True"
            )
        return {"kind": "node", "node_id": self.node_id, "soft": bool(self.soft)}


class _Operator:
    """A condition for the value of a label."""

    def __init__(self, *values: str) -> None:
        name = type(self).__name__
        if not values:
            raise ValueError(
                f'The variadic parameter of the {name} operator must be a non-empty tuple: e.g. {name}("value1", '
                '"value2").'
            )
        self.values = list(values)
        for value in values:
            if not isinstance(value, str):
                raise ValueError(
                    f"Type of value in position {values.index(value)} for the {type(self).__name__} operator must be "
                    "str"
                )


class In(_Operator):
    """The label has one of the values."""


class NotIn(_Operator):
    """The label has none of the values, or the node does not carry it."""


class Exists(_Operator):
    """The node carries the label."""

    def __init__(self) -> None:
        self.values = []


class DoesNotExist(Exists):
    """The node does not carry the label."""


class NodeLabelSchedulingStrategy:
    """Schedules on nodes whose labels match hard, those first that match soft too."""

    def __init__(self, hard: dict[str, Any], *, soft: dict[str, Any] | None = None) -> None:
        _check_operators("hard", hard)
        _check_operators("soft", soft)
        if not hard and not soft:
            raise ValueError("The `hard` and `soft` parameter of NodeLabelSchedulingStrategy cannot both be empty.")
        self.hard, self.soft = hard or {}, soft or {}

    def to_wire(self) -> dict[str, object]:
        hard = [_term(*item) for item in self.hard.items()]
        preferred = [[*hard, *(_term(*item) for item in self.soft.items())]] if self.soft else []
        return {"where": [*preferred, hard]}


def _term(key: str, operator: _Operator) -> dict[str, object]:
    return _labels.term(key, operator.values, isinstance(operator, (NotIn, DoesNotExist)))


def _check_operators(what: str, given: object) -> None:
    if given is None:
        return
    if not isinstance(given, dict):
        raise ValueError(
            f"The {what} parameter must be a map (e.g. {{'key1': In('value1')}}) but got type {type(given)}."
        )
    for key, value in given.items():
        if not isinstance(key, str):
            raise ValueError(
                f"The map key of the {what} parameter must be of type str (e.g. {{'key1': In('value1')}}) but got "
                f"{key!r} of type {type(key)}."
            )
        if not isinstance(value, _Operator):
            raise ValueError(
                f"The map value of the {what} parameter must be one of the `In`, `NotIn`, `Exists` or `DoesNotExist` "
                f"operators, but got {value!r}."
            )


SchedulingStrategyT = Any
