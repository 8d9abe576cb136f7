"""The task or call that the current code runs."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any


class Task:
    """A task, or a call of an actor's method."""

    __slots__ = ("_children", "assigned", "cancelled", "devices", "function", "id", "lease", "name", "placement")

    def __init__(self, id: str, name: str, lease: str = "", devices: dict[str, list[str]] | None = None) -> None:
        self.id, self.name, self.lease = id, name, lease
        self.devices = devices or {}
        self.function = name  # or method
        self.assigned: dict[str, float] = {}
        self.placement: Any = None
        self.cancelled = False
        self._children: weakref.WeakSet[Any] | None = None

    @property
    def children(self) -> weakref.WeakSet[Any]:
        """Entries of the calls that it made."""
        if self._children is None:
            self._children = weakref.WeakSet()
        return self._children


current: ContextVar[Task | None] = ContextVar("troupe_ray_task", default=None)
