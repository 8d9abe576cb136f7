"""ray._raylet: ids and references."""

from __future__ import annotations

from typing import Any

from ._ids import ActorID, BaseID, JobID, NodeID, PlacementGroupID, TaskID, UniqueID, WorkerID
from ._options import refuse

__all__ = ["ActorID", "BaseID", "JobID", "NodeID", "ObjectRefGenerator", "PlacementGroupID", "TaskID", "UniqueID", "WorkerID"]


class ObjectRefGenerator:
    """The result type of streaming generators, for isinstance. It is never instantiated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refuse("ObjectRefGenerator", "a method that yields, which gives a troupe.ResultStream")


StreamingObjectRefGenerator = DynamicObjectRefGenerator = ObjectRefGenerator


def __getattr__(name: str) -> Any:
    if name in ("ObjectRef", "ObjectID"):
        from ._objects import ObjectRef

        return ObjectRef
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; see docs/ray.md")
