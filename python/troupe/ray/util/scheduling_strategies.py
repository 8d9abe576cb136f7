"""Scheduling strategies: placement groups, node affinity and node labels."""

from __future__ import annotations

from typing import Any

from .._ids import NodeID
from .._options import refuse


class PlacementGroupSchedulingStrategy:
    """Schedules into a bundle of a placement group; index -1: any bundle."""

    def __init__(self, placement_group: Any, placement_group_bundle_index: int = -1, placement_group_capture_child_tasks: bool | None = None) -> None:
        self.placement_group = placement_group
        self.placement_group_bundle_index = placement_group_bundle_index
        self.placement_group_capture_child_tasks = placement_group_capture_child_tasks

    def to_wire(self) -> Any:
        from .placement_group import check_placement_group_index

        group = self.placement_group
        if group is None:
            return None
        index = -1 if self.placement_group_bundle_index is None else int(self.placement_group_bundle_index)  # int() also converts NumPy integers
        check_placement_group_index(group, index)
        if group.is_empty:
            return None
        return {
            "kind": "placement_group", "id": group.id.hex(), "bundle": index, "capture": bool(self.placement_group_capture_child_tasks),
        }  # fmt: skip


class NodeAffinitySchedulingStrategy:
    """Schedules on a given node. soft: falls back to other nodes if that node does not exist or is too small."""

    def __init__(self, node_id: Any, soft: bool, _spill_on_unavailable: bool = False, _fail_on_unavailable: bool = False) -> None:
        self.node_id = node_id if isinstance(node_id, str) else node_id.hex()
        self.soft = soft
        self._spill_on_unavailable, self._fail_on_unavailable = _spill_on_unavailable, _fail_on_unavailable
        try:
            valid = not NodeID.from_hex(self.node_id).is_nil()
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"Invalid node_id '{self.node_id}'. Node ID must be a valid hex string; ray.nodes() lists the nodes.")
        if _spill_on_unavailable and not soft:
            raise ValueError("_spill_on_unavailable cannot be set when soft is False")
        if _fail_on_unavailable and soft:
            raise ValueError("_fail_on_unavailable cannot be set when soft is True")

    def to_wire(self) -> Any:
        if self._spill_on_unavailable or self._fail_on_unavailable:
            raise refuse("_spill_on_unavailable and _fail_on_unavailable of NodeAffinitySchedulingStrategy", "soft=True")
        return {"kind": "node", "node_id": self.node_id, "soft": bool(self.soft)}


class _Operator:
    def __init__(self, *values: str) -> None:
        self.values = list(values)
        for value in values:
            if not isinstance(value, str):
                raise ValueError(f"Type of value in position {values.index(value)} for the {type(self).__name__} operator must be str")


class In(_Operator):
    def __init__(self, *values: str) -> None:
        if not values:
            raise ValueError('The variadic parameter of the In operator must be a non-empty tuple: e.g. In("value1", "value2").')
        super().__init__(*values)


class NotIn(_Operator):
    pass


class Exists:
    pass


class DoesNotExist:
    pass


class NodeLabelSchedulingStrategy:
    """Schedules on nodes whose labels are In given values. Other operators and soft preferences are refused."""

    def __init__(self, hard: dict[str, Any], *, soft: dict[str, Any] | None = None) -> None:
        if not hard and not soft:
            raise ValueError("The `hard` and `soft` parameter of NodeLabelSchedulingStrategy cannot both be empty.")
        self.hard, self.soft = hard or {}, soft or {}

    def to_wire(self) -> Any:
        if self.soft or any(not isinstance(v, In) for v in self.hard.values()):
            raise refuse("soft labels, NotIn, Exists and DoesNotExist of NodeLabelSchedulingStrategy", "In(…) as hard labels, or labels of a bundle")
        return {"kind": "labels", "hard": {k: v.values for k, v in self.hard.items()}}


SchedulingStrategyT = Any
