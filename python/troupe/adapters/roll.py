"""ROLL's Cluster and ResourceManager on Troupe, for programs that run with `python -m troupe.ray --adapter roll …`.

The workers of a cluster are one Troupe role. ROLL's dispatch modes are unchanged; arguments that several ranks share,
the same value for all or the shard of a data-parallel rank, are encoded and published once.
"""

from __future__ import annotations

import os
from typing import Any

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.platforms import current_platform

from troupe import ray
from troupe.ray import _forming
from troupe.ray.actor import make_actor

from ..ray import ObjectRef
from ..ray.actor import ActorHandle
from . import _workers

__all__ = ["TroupeCluster", "TroupeResourceManager"]

_workers.require_troupe_ray("ROLL")

_LATER = "later"  # placeholder for the address of rank 0 until it is known


class TroupeResourceManager(ResourceManager):  # type: ignore[misc]
    """The nodes and devices of clusters, reserved together: all or none."""

    def __init__(self, num_gpus_per_node: int, num_nodes: int | None) -> None:
        with _forming.reserving(num_nodes or _nodes_with(num_gpus_per_node)):
            super().__init__(num_gpus_per_node, num_nodes)


class TroupeCluster(Cluster):  # type: ignore[misc]
    """A cluster whose workers are ranks of one role."""

    worker_cls: Any

    def _create_workers(self) -> None:
        """Lets ROLL plan the workers, and creates them together. Rank 0 tells the others its address when it has
        started."""
        cls, plan = self.worker_cls, _Plan(self.worker_cls)
        self.worker_cls = plan
        try:
            super()._create_workers()
        finally:
            self.worker_cls = cls
        self.workers = plan.create()
        self.master_addr, self.master_port = ray.get(self.workers[0].get_master_addr_and_port.remote())

    def execute_all_async(self, method_name: str, *args: object, **kwargs: object) -> list[ObjectRef]:
        """Calls a method of all workers, as one call of the role. If all arguments are lists with one element per
        worker, each worker gets its element."""
        return _workers.call_all(self.workers, method_name, args, kwargs)


def _nodes_with(devices: int) -> int:
    """Returns the number of nodes with at least that many devices."""
    return sum(int(n["Resources"].get(current_platform.ray_device_key, 0)) >= devices for n in ray.nodes())


class _Plan:
    """Stands in for the decorated worker class: records the options and arguments of each worker, and forwards all else
    to the class."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls
        self._planned: list[_Planned] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cls, name)

    def options(self, **options: object) -> _Planned:
        self._planned.append(_Planned(options))
        return self._planned[-1]

    def create(self) -> list[ActorHandle]:
        """Creates the workers. Returns their handles in the order of ranks."""
        with _forming.forming():
            first, *others = self._planned
            workers = [self._cls.options(**first.options).remote(**first.arguments)]
            if others:
                master = workers[0].get_master_addr_and_port.remote()
                late = make_actor(_with_master(self._cls.__ray_metadata__.modified_class), self._cls._default_options)
                workers += [
                    late.options(**p.without_master()).remote(troupe_master=master, **p.arguments) for p in others
                ]
        return workers


class _Planned:
    """A worker to be created. It stands in for the handle while ROLL plans."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.arguments: dict[str, Any] = {}

    def remote(self, **arguments: object) -> _Planned:
        self.arguments = {
            name: ray.put(value) for name, value in arguments.items()
        }  # copied now, because ROLL changes them for the next worker
        return self

    @property
    def get_master_addr_and_port(self) -> _Master:
        return _Master()

    def without_master(self) -> dict[str, object]:
        """Returns the options without the variables that are not known yet."""
        env = self.options["runtime_env"]
        variables = {name: value for name, value in env["env_vars"].items() if value != _LATER}
        return {**self.options, "runtime_env": {**env, "env_vars": variables}}


class _Master:
    def remote(self) -> ObjectRef:
        return ray.put((_LATER, _LATER))


def _with_master(cls: type) -> type:
    """Returns the class for workers other than rank 0. Its constructor gets the address of rank 0, which has started by
    then, as ROLL's workers expect."""

    def __init__(self: object, *args: Any, troupe_master: tuple[str, int], **kwargs: object) -> None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = troupe_master[0], str(troupe_master[1])
        cls.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return type(
        cls.__name__,
        (cls,),
        {"__init__": __init__, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__},
    )
