"""ray.util.collective is not supported: the import succeeds, but its functions are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from .._refused import refuse

_INSTEAD = "torch.distributed in the workers of a troupe.Cluster, whose ranks and master address are set"


def is_group_initialized(group_name: str = "default") -> bool:
    """Returns False: groups are not supported."""
    return False


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refused(*args: object, **kwargs: object) -> NoReturn:
        raise refuse(f"ray.util.collective.{name}", _INSTEAD)

    refused.__name__ = name
    return refused
