"""ray.util: placement groups, ActorPool, named actors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .. import _state
from .._nodes import node_ip
from .._refused import absent
from . import accelerators, scheduling_strategies
from .actor_group import ActorGroup
from .actor_pool import ActorPool
from .check_serialize import inspect_serializability
from .placement_group import (
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

__all__ = [
    "ActorGroup",
    "ActorPool",
    "PlacementGroup",
    "accelerators",
    "as_completed",
    "get_current_placement_group",
    "get_node_instance_id",
    "get_node_ip_address",
    "get_placement_group",
    "inspect_serializability",
    "list_named_actors",
    "log_once",
    "map_unordered",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
    "scheduling_strategies",
]


def get_node_ip_address(address: str = "8.8.8.8:53") -> str:
    """Returns the IP address of this node."""
    return node_ip()


def get_node_instance_id() -> str:
    return ""


def list_named_actors(all_namespaces: bool = False) -> list[Any]:
    """Returns the names of live actors in this namespace, or, for all namespaces, dicts with name and namespace."""
    state = _state.require()
    found = _state.control_call("named_actors", None if all_namespaces else state.namespace)
    return [{"name": name, "namespace": ns} for ns, name in found] if all_namespaces else [name for _, name in found]


def as_completed(
    refs: Sequence[object], *, chunk_size: int = 10, yield_obj_refs: bool = False, **kwargs: Any
) -> Iterator[Any]:
    """Yields the values of references, or the references, as they complete, in chunks of up to chunk_size."""
    from .. import get, wait

    left = list(refs)
    while left:
        ready, left = wait(left, num_returns=min(chunk_size, len(left)), **kwargs)
        yield from ready if yield_obj_refs else get(ready)


def map_unordered(
    fn: Any, items: Iterable[object], *, backpressure_size: int | None = 100, chunk_size: int = 10, **kwargs: Any
) -> Iterator[Any]:
    """Yields the results of a remote function for the items as they complete, with at most backpressure_size calls
    pending."""
    from .. import get, wait

    if backpressure_size is None or backpressure_size <= 0:
        backpressure_size = 1 << 62
    left: list[Any] = []
    for item in items:
        left.append(fn.remote(item))
        if len(left) >= backpressure_size:
            ready, left = wait(left, num_returns=min(chunk_size, len(left)), **kwargs)
            yield from get(ready)
    yield from as_completed(left, chunk_size=chunk_size, **kwargs)


_logged: set[Any] = set()


def log_once(key: object) -> bool:
    """Returns True on the first call with a key."""
    if key in _logged:
        return False
    _logged.add(key)
    return True


def __getattr__(name: str) -> Any:
    raise absent(__name__, name)
