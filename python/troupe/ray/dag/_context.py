"""Settings of compiled graphs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


def _seconds(name: str, default: float) -> float:
    return float(os.environ.get(f"RAY_CGRAPH_{name}", default))


@dataclass
class DAGContext:
    """Limits of the compiled graphs of this process; a graph takes those that hold when it is compiled."""

    submit_timeout: float = field(default_factory=lambda: _seconds("submit_timeout", 10))  # of execute
    get_timeout: float = field(default_factory=lambda: _seconds("get_timeout", 10))  # of get without a timeout
    teardown_timeout: float = field(default_factory=lambda: _seconds("teardown_timeout", 30))
    max_inflight_executions: int = field(default_factory=lambda: int(_seconds("max_inflight_executions", 10)))
    max_buffered_results: int = field(default_factory=lambda: int(_seconds("max_buffered_results", 1000)))

    @staticmethod
    def get_current() -> DAGContext:
        return _current


_current = DAGContext()
