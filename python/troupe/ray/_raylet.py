"""ray._raylet: ids and references."""

from __future__ import annotations

from ._ids import ActorID, BaseID, JobID, NodeID, PlacementGroupID, TaskID, UniqueID, WorkerID
from ._refused import absent
from .exceptions import ObjectRefStreamEndOfStreamError

__all__ = [
    "ActorID",
    "BaseID",
    "JobID",
    "NodeID",
    "ObjectRefStreamEndOfStreamError",
    "PlacementGroupID",
    "TaskID",
    "UniqueID",
    "WorkerID",
]


RAY_NODE_ID_KEY = "ray.io/node-id"


def __getattr__(name: str) -> object:
    if name in ("ObjectRef", "ObjectID"):
        from ._objects import ObjectRef

        return ObjectRef
    if name in ("ObjectRefGenerator", "StreamingObjectRefGenerator", "DynamicObjectRefGenerator"):
        from . import _generators

        return getattr(_generators, name.removeprefix("Streaming"))
    raise absent(__name__, name)
