"""ray.util.collective is not supported: the import succeeds, but its functions are refused."""

from __future__ import annotations

from typing import Any

from .._options import refuse

_INSTEAD = "torch.distributed in the workers of a troupe.Cluster, whose ranks and master address are set"


def is_group_initialized(group_name: str = "default") -> bool:
    """Returns False: groups are not supported."""
    return False


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise refuse(f"ray.util.collective.{name}", _INSTEAD)

    refused.__name__ = name
    return refused
