"""_Timer: measures the duration of a block, and averages over the last ones."""

from __future__ import annotations

import time
from collections import deque


class _Timer:
    def __init__(self, window_size: int = 10) -> None:
        self._window: deque[float] = deque(maxlen=window_size)
        self._units: deque[float] = deque(maxlen=window_size)
        self._start: float | None = None
        self._total = 0.0
        self.count = 0

    def __enter__(self) -> None:
        if self._start is not None:
            raise ValueError("concurrent updates not supported")
        self._start = time.time()

    def __exit__(self, *_: object) -> None:
        assert self._start is not None
        self.push(time.time() - self._start)
        self._start = None

    def push(self, seconds: float) -> None:
        self._window.append(seconds)
        self._total += seconds
        self.count += 1

    def push_units_processed(self, n: float) -> None:
        self._units.append(n)

    def has_units_processed(self) -> bool:
        return bool(self._units)

    @property
    def mean(self) -> float:
        return sum(self._window) / len(self._window) if self._window else 0.0

    @property
    def mean_units_processed(self) -> float:
        return sum(self._units) / len(self._units) if self._units else 0.0

    @property
    def mean_throughput(self) -> float:
        taken = sum(self._window)
        return sum(self._units) / taken if taken else 0.0
