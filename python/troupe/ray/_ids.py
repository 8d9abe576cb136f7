"""Ray's id types: fixed length, hex() and binary(), equality and hash by value."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class BaseID:
    SIZE = 28

    __slots__ = ("_hex",)

    def __init__(self, binary: bytes) -> None:
        if not isinstance(binary, bytes) or len(binary) != self.SIZE:
            raise ValueError(f"{type(self).__name__} takes {self.SIZE} bytes")
        self._hex = binary.hex()

    @classmethod
    def from_hex(cls, text: str) -> Self:
        return cls(bytes.fromhex(text))

    @classmethod
    def from_random(cls) -> Self:
        return cls(os.urandom(cls.SIZE))

    @classmethod
    def nil(cls) -> Self:
        return cls(b"\xff" * cls.SIZE)

    @classmethod
    def size(cls) -> int:
        return cls.SIZE

    def binary(self) -> bytes:
        return bytes.fromhex(self._hex)

    def hex(self) -> str:
        return self._hex

    def is_nil(self) -> bool:
        return self._hex == "ff" * self.SIZE

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._hex == self._hex

    def __hash__(self) -> int:
        return hash(self._hex)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._hex})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.binary(),)


class UniqueID(BaseID):
    SIZE = 28


class NodeID(BaseID):
    SIZE = 28


class WorkerID(BaseID):
    SIZE = 28


class JobID(BaseID):
    SIZE = 4


class ActorID(BaseID):
    SIZE = 16


class TaskID(BaseID):
    SIZE = 24


class PlacementGroupID(BaseID):
    SIZE = 18


OBJECT_ID_SIZE = 28


def role_of(process: str) -> tuple[str, int]:
    """Returns the role and the rank of a process, from its name."""
    role, _, rank = process.partition("@")
    return role, int(rank or 0)
