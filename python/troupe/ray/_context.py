"""The task or actor call that the current code belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any


class Task:
    """A task or an actor method call."""

    id: str
    name: str
    function: str  # the name of the function or method

    # Defaults are class attributes because every call pays for creating an instance.
    lease = ""
    devices: Mapping[str, list[str]] = MappingProxyType({})
    assigned: Mapping[str, float] = MappingProxyType({})
    placement: Any = None
    cancelled = False
    _children: weakref.WeakSet[Any] | None = None

    def __init__(self, id: str, name: str, function: str) -> None:
        self.id, self.name, self.function = id, name, function

    @property
    def children(self) -> weakref.WeakSet[Any]:
        """The entries of the calls that this task made."""
        if self._children is None:
            self._children = weakref.WeakSet()
        return self._children


current: ContextVar[Task | None] = ContextVar("troupe_ray_task", default=None)
