"""ray.util.multiprocessing is not supported."""

from __future__ import annotations

from typing import Any

from .._options import refuse


class Pool:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refuse("ray.util.multiprocessing.Pool", "troupe.remote functions, or concurrent.futures.ProcessPoolExecutor")
