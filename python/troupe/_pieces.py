"""Calls a cluster with different arguments for its ranks: arguments that several ranks share are encoded and published
once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import _errors
from ._cluster import Cluster, _by_reference, _settings_of

_MOST_PLANS = 64  # cached divisions of one cluster's ranks; the core keeps a plan as long as the cluster


def identity(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    """Returns a key that is equal for calls with the same objects as arguments. The objects must stay alive while keys
    are compared."""
    return (*map(id, args), *((name, id(value)) for name, value in kwargs.items()))


def send(
    cluster: Cluster,
    method: str,
    calls: Sequence[tuple[tuple[object, ...], Mapping[str, object]]],
    *,
    blocking: bool = False,
    **settings: object,
) -> Any:
    """Calls every rank with its own arguments, (args, kwargs) in the order of ranks. Returns a list with one answer per
    rank, or with blocking=False a future."""
    if len(calls) != cluster.world_size:
        raise _errors.InvalidError(f"{len(calls)} arguments for the {cluster.world_size} ranks of {cluster.name}")
    found: dict[tuple[Any, ...], list[int]] = {}
    for rank, (args, kwargs) in enumerate(calls):
        found.setdefault(identity(args, kwargs), []).append(rank)
    if len(found) == 1:
        return cluster._send(
            method, *calls[0], cluster._plan("ONE_TO_ALL", True), blocking=blocking, settings=_settings_of(settings)
        )
    pieces = list(found.values())
    known = [key for key in cluster._plans if isinstance(key, tuple) and key[:1] == ("pieces",)]
    key = ("pieces", *map(tuple, pieces))
    if key not in cluster._plans:
        if len(known) >= _MOST_PLANS:  # one part per rank fits every division
            pieces = [[rank] for rank in range(cluster.world_size)]
            key = ("pieces", *map(tuple, pieces))
        cluster._plans[key] = cluster._plans.get(key) or cluster._make_plan(
            {"pieces": pieces, "collect": list(range(cluster.world_size)), "world": cluster._world}
        )
    bodies, refs = [], []
    checked = _settings_of(settings)
    codec = cluster._argument_codec(method, checked)
    for ranks in pieces:
        args, kwargs, named = _by_reference(*calls[ranks[0]])
        refs += named
        bodies.append(codec.encode([list(args), kwargs or None]))
    return cluster._send_bodies(method, bodies, cluster._plans[key], blocking=blocking, settings=checked, refs=refs)
