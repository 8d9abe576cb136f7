"""Packaging of folders is not supported; troupe.init(working_dir=…) ships them."""

from __future__ import annotations

from typing import Any

from ..._options import refuse


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise refuse(f"ray._private.runtime_env.packaging.{name}", "troupe.init(working_dir=…)")

    return refused
