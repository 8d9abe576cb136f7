"""ray.util.metrics: Counter, Gauge and Histogram. A head with `troupe up --metrics` shows Prometheus the values of all
processes, as ray_NAME with the tags and the session of the process."""

from __future__ import annotations

import bisect
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

from ... import _errors, _seam
from ..._session import current

_EVERY = 2.0  # seconds between reports of what has changed
_IDLE = 5  # such times after which a report without a change follows: a head drops the series of silent processes
_MOST = 1000  # series of a process

_logger = logging.getLogger("ray")


class _Registry:
    """The series of this process, and the thread that reports them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, Any]] = {}
        self._changed = False
        self._warned = False
        self._pid = 0  # the process whose thread runs

    def record(self, metric: Metric, tags: dict[str, str], value: float) -> None:
        """Adds a value to a series."""
        key = metric._name, tuple(sorted(tags.items()))
        with self._lock:
            self._start()
            found = self._series.get(key)
            if found is None:
                if len(self._series) >= _MOST:
                    self._warn(metric._name)
                    return
                found = self._series[key] = {**metric._empty(), "name": metric._name, "labels": dict(key[1])}
            metric._add(found, value)
            self._changed = True

    def _warn(self, name: str) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning("ray.util.metrics: %s and others are not reported: %d series are too many", name, _MOST)

    def _start(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            threading.Thread(target=self._run, daemon=True, name="ray-metrics").start()

    def _run(self) -> None:
        idle = 0
        while True:
            threading.Event().wait(_EVERY)
            with self._lock:
                due = self._changed or idle >= _IDLE
                series = [dict(s) for s in self._series.values()] if due else []
                self._changed = False
            idle = 0 if due else idle + 1
            if series and not report(series):
                with self._lock:
                    self._changed = True


def report(series: list[dict[str, object]]) -> bool:
    """Tells the head the series of this process. Returns False if there is no session now."""
    try:
        session = current(start=False)
        session.core.ask(_seam.measured(runtime=session.id, measured=series)).get(_EVERY)
    except _errors.InvalidError as err:  # too much for one message
        _logger.warning("ray.util.metrics: %s", err)
    except _errors.Error:
        return False
    return True


_registry = _Registry()


class Metric:
    """The name, the description and the tags of a value."""

    _kind = ""

    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None) -> None:
        if not name:
            raise ValueError("Empty name is not allowed. Please provide a metric name.")
        keys = tag_keys or ()
        if not isinstance(keys, tuple):
            raise TypeError(f"tag_keys should be a tuple type, got: {type(keys)}")
        for key in keys:
            if not isinstance(key, str):
                raise TypeError(f"Tag keys must be str, got {type(key)}.")
        self._name, self._description, self._tag_keys = name, description, keys
        self._default_tags: dict[str, str] = {}

    def set_default_tags(self, default_tags: dict[str, str]) -> Metric:
        """Sets tags that every value has, unless it is recorded with others."""
        for key in default_tags:
            if key not in self._tag_keys:
                raise ValueError(f"Unrecognized tag key {key}.")
        _check_tags(default_tags)
        self._default_tags = default_tags
        return self

    @property
    def info(self) -> dict[str, object]:
        return {
            "name": self._name,
            "description": self._description,
            "tag_keys": self._tag_keys,
            "default_tags": self._default_tags,
        }

    def _empty(self) -> dict[str, object]:
        return {"kind": self._kind, "help": self._description, "value": 0.0}

    def _add(self, series: dict[str, object], value: float) -> None:
        series["value"] = float(value)

    def _record(self, value: float, tags: dict[str, str] | None) -> None:
        """Checks a value and its tags, and records it."""
        if not isinstance(value, (int, float)):
            raise TypeError(f"value must be int or float, got {type(value)}.")
        _check_tags(tags or {})
        found = {**self._default_tags, **(tags or {})}
        missing = [key for key in self._tag_keys if key not in found]
        if missing:
            raise ValueError(f"Missing value for tag key(s): {','.join(missing)}.")
        _registry.record(self, found, value)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._name, self._description, self._tag_keys)


def _check_tags(tags: dict[str, str]) -> None:
    for value in tags.values():
        if not isinstance(value, str):
            raise TypeError(f"Tag values must be str, got {type(value)}.")


class Counter(Metric):
    """A sum that only grows."""

    _kind = "counter"

    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        if isinstance(value, (int, float)) and value <= 0:
            raise ValueError(f"value must be >0, got {value}")
        self._record(value, tags)

    def _add(self, series: dict[str, Any], value: float) -> None:
        series["value"] += value


class Gauge(Metric):
    """The last value."""

    _kind = "gauge"

    def set(self, value: float | None, tags: dict[str, str] | None = None) -> None:
        if value is not None:
            self._record(value, tags)


class Histogram(Metric):
    """The number of values between boundaries."""

    _kind = "histogram"

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: Sequence[float] | None = None,
        tag_keys: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(name, description, tag_keys)
        if not boundaries:
            raise ValueError(
                "boundaries argument should be provided when using the Histogram class. e.g., "
                'Histogram("name", boundaries=[1.0, 2.0])'
            )
        for i, boundary in enumerate(boundaries):
            if boundary <= 0:
                raise ValueError(
                    f"Invalid `boundaries` argument at index {i}, {boundaries}. Use positive values for the arguments."
                )
        self.boundaries = boundaries

    def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
        self._record(value, tags)

    def _empty(self) -> dict[str, object]:
        bounds = sorted(float(b) for b in self.boundaries)
        return {**super()._empty(), "bounds": bounds, "counts": [0] * len(bounds), "count": 0}

    def _add(self, series: dict[str, Any], value: float) -> None:
        series["value"] += value
        series["count"] += 1
        first = bisect.bisect_left(series["bounds"], value)
        series["counts"] = [n + (i >= first) for i, n in enumerate(series["counts"])]

    @property
    def info(self) -> dict[str, object]:
        return {**super().info, "boundaries": self.boundaries}

    def __reduce__(self) -> tuple[object, ...]:
        return Histogram, (self._name, self._description, self.boundaries, self._tag_keys)
