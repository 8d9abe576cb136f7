"""ray.experimental: only state.api is supported."""

from __future__ import annotations

from typing import Any

from .._options import refuse_attribute


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name in ("state", "tqdm_ray"):
        raise AttributeError(name)
    raise refuse_attribute(f"ray.experimental.{name}", "nothing; see docs/ray.md")
