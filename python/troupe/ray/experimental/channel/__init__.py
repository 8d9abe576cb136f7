"""ray.experimental.channel: names for settings of compiled graphs. Their values go through Troupe's own transports."""

from __future__ import annotations

from ..._refused import absent

__all__: list[str] = []


def __getattr__(name: str) -> object:
    raise absent(__name__, name)
