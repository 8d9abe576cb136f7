"""The task or actor call that the current code belongs to."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any


class Task:
    """A task or an actor method call."""

    __slots__ = ("_children", "assigned", "cancelled", "devices", "function", "id", "lease", "name", "placement")

    def __init__(self, id: str, name: str, lease: str = "", devices: dict[str, list[str]] | None = None) -> None:
        self.id, self.name, self.lease = id, name, lease
        self.devices = devices or {}
        self.function = name  # or method name
        self.assigned: dict[str, float] = {}
        self.placement: Any = None
        self.cancelled = False
        self._children: weakref.WeakSet[Any] | None = None

    @property
    def children(self) -> weakref.WeakSet[Any]:
        """The entries of the calls that this task made."""
        if self._children is None:
            self._children = weakref.WeakSet()
        return self._children


current: ContextVar[Task | None] = ContextVar("troupe_ray_task", default=None)
