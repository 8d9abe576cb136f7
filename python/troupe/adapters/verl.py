"""verl's WorkerGroup and ResourcePool on Troupe, for programs that run with `python -m troupe.ray`.

    RayPPOTrainer(…, ray_worker_group_cls=TroupeWorkerGroup)

or, for unmodified programs, `python -m troupe.ray --adapter verl …`.

The workers of a group are one Troupe role. verl's dispatch modes are unchanged; arguments that several ranks share, the
same value for all or the shard of a data-parallel rank, are encoded and published once.
"""

from __future__ import annotations

from typing import Any

from verl.plugin.platform import get_platform
from verl.single_controller.ray.base import RayResourcePool, RayWorkerGroup

from troupe import ray
from troupe.ray import _forming

from ..ray import ObjectRef
from . import _workers

__all__ = ["TroupeResourcePool", "TroupeWorkerGroup"]

_workers.require_troupe_ray("verl")


class TroupeResourcePool(RayResourcePool):  # type: ignore[misc]
    """The nodes and devices of worker groups, reserved together: all or none. A pool that the nodes can never satisfy
    is refused immediately."""

    pgs: list[Any] | None

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> Any:
        if self.pgs is not None:
            return self.pgs
        if strategy == "STRICT_PACK":
            _workers.check_nodes(
                f"the resource pool {self.name_prefix}", [self._on_one_node(count) for count in self.store]
            )
        with _forming.reserving(len(self.store)):
            return super().get_placement_groups(strategy, name, device_name)

    def _on_one_node(self, processes: int) -> dict[str, float]:
        wanted = {"CPU": float(processes * self.max_colocate_count)}
        if self.use_gpu:
            wanted[get_platform().ray_resource_name()] = float(processes)
        return wanted

    def release(self) -> None:
        """Releases the resources and ends the workers on them."""
        groups, self.pgs = self.pgs or [], None
        for group in groups:
            ray.util.remove_placement_group(group)


class TroupeWorkerGroup(RayWorkerGroup):  # type: ignore[misc]
    """A worker group whose workers are ranks of one role."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        with _forming.forming():
            super().__init__(*args, **kwargs)

    def execute_all_async(self, method_name: str, *args: object, **kwargs: object) -> list[ObjectRef]:
        """Calls a method of all workers, as one call of the role. If all arguments are lists with one element per
        worker, each worker gets its element."""
        if self.fused_worker_used and method_name not in self.method_names:
            return _workers.call_all(
                self._workers,
                self.fused_worker_execute_fn_name,
                args,
                kwargs,
                first=(f"{self.sub_cls_name}_fwmn_{method_name}",),
            )
        return _workers.call_all(self._workers, method_name, args, kwargs)
