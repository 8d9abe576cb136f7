"""ray.experimental: only state.api is supported."""

from __future__ import annotations

from .._refused import absent


def __getattr__(name: str) -> object:
    if name == "state":
        raise AttributeError(name)  # a module that is imported by its name
    raise absent(__name__, name)
