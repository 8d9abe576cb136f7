"""ray._private.profiling: profile marks a section in ray.timeline() and `troupe timeline`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..._span import span


@contextmanager
def profile(event_type: str, extra_data: object = None) -> Iterator[None]:
    with span(event_type):
        yield
