"""ray._private.profiling: profile has no effect; `troupe timeline` and Troupe's spans record calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def profile(event_type: str, extra_data: Any = None) -> Iterator[None]:
    yield
