"""ray.util.ActorGroup: actors of one class that are called together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..actor import ActorHandle


@dataclass
class ActorWrapper:
    """An actor of a group, and what its get_actor_metadata returned."""

    actor: ActorHandle
    metadata: Any


class ActorGroupMethod:
    """A method of all actors of a group."""

    def __init__(self, group: ActorGroup, name: str) -> None:
        self._group, self._name = group, name

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise TypeError(
            f"ActorGroup methods cannot be called directly. Instead of running 'object.{self._name}()', try "
            f"'object.{self._name}.remote()'."
        )

    def remote(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(a.actor, self._name).remote(*args, **kwargs) for a in self._group.actors]


class ActorGroup:
    """A number of actors of one class. Its methods are those of the class, and are called on all of them."""

    def __init__(
        self,
        actor_cls: type,
        num_actors: int = 1,
        num_cpus_per_actor: float = 1,
        num_gpus_per_actor: float = 0,
        resources_per_actor: dict[str, float] | None = None,
        init_args: Sequence[Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        from .. import remote

        warnings.warn("ActorGroup is deprecated: use ray.util.multiprocessing", DeprecationWarning, stacklevel=2)
        if num_actors <= 0:
            raise ValueError(
                f"The provided `num_actors` must be greater than 0. Received num_actors={num_actors} instead."
            )
        if num_cpus_per_actor < 0 or num_gpus_per_actor < 0:
            raise ValueError(
                "The number of CPUs and GPUs per actor must not be negative. Received "
                f"num_cpus_per_actor={num_cpus_per_actor} and num_gpus_per_actor={num_gpus_per_actor}."
            )
        self.actors: list[ActorWrapper] = []
        self.num_actors = num_actors
        remote_class = remote(num_cpus=num_cpus_per_actor, num_gpus=num_gpus_per_actor, resources=resources_per_actor)
        self._create: Callable[[], Any] = lambda: remote_class(actor_cls).remote(
            *(init_args or ()), **(init_kwargs or {})
        )
        self.start()

    def __getattr__(self, name: str) -> ActorGroupMethod:
        if name.startswith("__") or not self.__dict__.get("actors"):
            raise RuntimeError("This ActorGroup has been shutdown. Please start it again.")
        return ActorGroupMethod(self, name)

    def __len__(self) -> int:
        return len(self.actors)

    def __getitem__(self, index: int) -> ActorWrapper:
        return self.actors[index]

    def start(self) -> None:
        if self.actors:
            raise RuntimeError(
                "The actors have already been started. Please call `shutdown` first if you want to restart them."
            )
        self.add_actors(self.num_actors)

    def shutdown(self, patience_s: float = 5) -> None:
        """Ends the actors: after their calls, or, past patience_s seconds, at once."""
        from .. import kill, wait

        left = [a.actor.__ray_terminate__.remote() for a in self.actors] if patience_s > 0 else []
        if not left or wait(left, num_returns=len(left), timeout=patience_s)[1]:
            for wrapper in self.actors:
                kill(wrapper.actor)
        self.actors = []

    def remove_actors(self, actor_indexes: Sequence[int]) -> None:
        self.actors = [a for i, a in enumerate(self.actors) if i not in actor_indexes]

    def add_actors(self, num_actors: int) -> None:
        from .. import get

        actors = [self._create() for _ in range(num_actors)]
        described = [a.get_actor_metadata.remote() for a in actors if hasattr(a, "get_actor_metadata")]
        metadata = get(described) or [None] * num_actors
        self.actors += [ActorWrapper(a, m) for a, m in zip(actors, metadata, strict=True)]

    @property
    def actor_metadata(self) -> list[Any]:
        return [a.metadata for a in self.actors]
