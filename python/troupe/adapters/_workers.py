"""Code shared by the adapters of frameworks on Ray. They run in programs whose `ray` is troupe.ray: the workers of a
group are actors there, and ranks of one role, so that a call of the whole group is one call of the role."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import troupe.ray
from troupe.ray import _group_call


def require_troupe_ray(framework: str) -> None:
    """Raises ImportError in a program whose `ray` is not troupe.ray."""
    found = sys.modules.get("ray")
    if getattr(found, "ObjectRef", None) is not troupe.ray.ObjectRef:
        where = getattr(found, "__file__", None) or "not imported"
        raise ImportError(
            f"the adapter for {framework} needs troupe.ray in place of ray, which is {where}: run the program with "
            "`python -m troupe.ray`"
        )


def call_all(
    workers: Sequence[object], method: str, args: tuple[Any, ...], kwargs: dict[str, Any], first: tuple[Any, ...] = ()
) -> list[Any]:
    """Calls a method of all workers and returns the references to the results. If all arguments are lists with one
    element per worker, each worker gets its element; otherwise each gets all arguments. The arguments `first` come
    before them."""
    count = len(workers)
    if all(isinstance(v, list) and len(v) == count for v in (*args, *kwargs.values())):
        calls = [((*first, *(a[i] for a in args)), {k: v[i] for k, v in kwargs.items()}) for i in range(count)]
    else:
        calls = [((*first, *args), kwargs)] * count
    return _group_call.call(workers, method, calls)


def check_nodes(what: str, wanted: list[dict[str, float]]) -> None:
    """Raises ValueError if resources that are wanted on one node each can never be provided: no node is large enough,
    or all nodes together are too small."""
    nodes = [n["Resources"] for n in troupe.ray.nodes() if n["Alive"]]
    there = "; ".join(
        ", ".join(f"{n.get(name, 0):g} {name}" for name in sorted({k for w in wanted for k in w})) for n in nodes
    )
    for one in wanted:
        if not any(all(n.get(name, 0) >= amount for name, amount in one.items()) for n in nodes):
            asked = ", ".join(f"{amount:g} {name}" for name, amount in sorted(one.items()))
            raise ValueError(f"{what} needs {asked} on one node, which no node has; the nodes have: {there}")
    for name in sorted({k for w in wanted for k in w}):
        total = sum(w.get(name, 0) for w in wanted)
        if total > sum(n.get(name, 0) for n in nodes):
            raise ValueError(
                f"{what} needs {total:g} {name} in all, which the nodes do not have together; they have: {there}"
            )
