"""ray.types: ObjectRef for annotations."""

from ._objects import ObjectRef

__all__ = ["ObjectRef"]
