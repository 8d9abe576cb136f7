"""Actors created together as ranks of one role:

    with forming():
        actors = [Cls.options(…).remote(…) for …]

Their handles and names work as for any actor; _group_call.py calls all of them at once. Also, placement groups created
together: all of them are reserved, or none.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator, Mapping
from typing import Any

from . import _state


class _Group:
    """The actors that a forming block creates."""

    def __init__(self, job_id: str) -> None:
        self.name = f"{job_id}-{os.urandom(8).hex()}"
        self.size = 0
        self.given_up = False


_current: contextvars.ContextVar[_Group | None] = contextvars.ContextVar("troupe_ray_forming", default=None)


@contextlib.contextmanager
def forming() -> Iterator[None]:
    """Makes the actors created in the block the ranks of one role, in order of creation. They start only after the
    block ends, so the block must not wait for one. Actors with restarts or get_if_exists get their own roles."""
    made = _Group(_state.require().job_id)
    mark = _current.set(made)
    try:
        yield
    except BaseException:
        made.given_up = True
        raise
    finally:
        _current.reset(mark)
        state = _state.current()
        if made.size and state is not None:
            state.control.notify("group_size", made.name, 0 if made.given_up else made.size)


def membership(options: Mapping[str, object]) -> dict[str, object] | None:
    """Returns the group and rank of an actor being created, or None if it joins no group."""
    made = _current.get()
    if made is None or options.get("max_restarts") or options.get("get_if_exists"):
        return None
    made.size += 1
    return {"name": made.name, "rank": made.size - 1}


def give_up() -> None:
    """Gives up the current group after an actor could not be created; the other actors get their own roles."""
    made = _current.get()
    if made is not None:
        made.given_up = True


_gang: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("troupe_ray_gang", default=None)


@contextlib.contextmanager
def reserving(count: int) -> Iterator[None]:
    """Reserves the count placement groups created in the block together or not at all. This prevents two programs that
    each need several nodes from deadlocking, each holding some of them."""
    mark = _gang.set({"name": os.urandom(8).hex(), "size": count} if count > 1 else None)
    try:
        yield
    finally:
        _gang.reset(mark)


def gang() -> dict[str, object] | None:
    """Returns the name and size of the gang that a new placement group joins, or None."""
    return _gang.get()
