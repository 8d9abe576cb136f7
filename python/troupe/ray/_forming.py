"""Actors that are created together, as ranks of one role:

    with forming():
        actors = [Cls.options(…).remote(…) for …]

Handles, names and everything else are those of any actors; _group_call.py calls all of them at once. And placement groups that are created
together: all of them are held, or none.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import Any

from . import _state


class _Group:
    """The actors that a block creates."""

    def __init__(self, job_id: str) -> None:
        self.name = f"{job_id}-{os.urandom(8).hex()}"
        self.size = 0
        self.given_up = False


_current: contextvars.ContextVar[_Group | None] = contextvars.ContextVar("troupe_ray_forming", default=None)


@contextlib.contextmanager
def forming() -> Iterator[None]:
    """The actors that the block creates are ranks of one role, in the order of their creation. None of them starts before the end of the
    block: the block must not wait for one. Actors with restarts, and those of get_if_exists, have roles of their own."""
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


def membership(options: dict[str, Any]) -> dict[str, Any] | None:
    """The group and the rank of an actor that is being created, if it is to have one."""
    made = _current.get()
    if made is None or options.get("max_restarts") or options.get("get_if_exists"):
        return None
    made.size += 1
    return {"name": made.name, "rank": made.size - 1}


def give_up() -> None:
    """An actor of the block could not be created: the others have roles of their own."""
    made = _current.get()
    if made is not None:
        made.given_up = True


_gang: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("troupe_ray_gang", default=None)


@contextlib.contextmanager
def reserving(count: int) -> Iterator[None]:
    """The placement groups that the block creates, so many, are held together or not at all: two programs that each need several nodes
    do not hold some of them each and wait for the rest."""
    mark = _gang.set({"name": os.urandom(8).hex(), "size": count} if count > 1 else None)
    try:
        yield
    finally:
        _gang.reset(mark)


def gang() -> dict[str, Any] | None:
    """The name and the size of the gang of a placement group that is being created, if it has one."""
    return _gang.get()
