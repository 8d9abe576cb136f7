"""Warns about requests for resources that no node can fulfil, as long as they wait."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

from . import _state

_DELAY = 5.0  # seconds between a request and the first look, and between two looks while requests of this process wait
_logger = logging.getLogger("ray")


class Watch:
    """The looks of one session at what this process waits for."""

    def __init__(self, state: _state.State) -> None:
        self.state = state
        self._lock = threading.Lock()  # guards the fields below
        self._running = False  # whether a look is due or under way
        self._noted = False  # whether a request was made since the last look began
        self._warned: set[str] = set()  # demands

    def note(self) -> None:
        """Looks in a while, because a request was made."""
        with self._lock:
            self._noted = True
            if self._running:
                return
            self._running = True
        self._later()

    def _later(self) -> None:
        timer = threading.Timer(_DELAY, self._look)
        timer.daemon = True
        timer.name = "ray-infeasible"
        timer.start()

    def _look(self) -> None:
        with self._lock:
            self._noted = False
        if _state.current() is self.state:
            self.state.control.ask("placement", ("needs",), self._told)

    def _told(self, needs: Any, error: BaseException | None) -> None:
        if error is not None:
            return  # the session has ended
        with self._lock:
            self._running = needs["waits"] or self._noted
            if not self._running:
                return
        for demand in needs["infeasible"]:
            self._warn(demand)
        self._later()

    def _warn(self, demand: dict[str, float]) -> None:
        text = json.dumps(demand, sort_keys=True)
        if text in self._warned:
            return
        self._warned.add(text)
        _logger.warning(
            "No node can fulfill the resource request %s. It waits until such a node joins this cluster: ask for "
            "less, or "
            "add one. ray.nodes() shows what each node has.",
            demand,
        )


_watch: Watch | None = None
_lock = threading.Lock()


def note(state: _state.State) -> None:
    """Records that this process has requested resources, so that a warning follows if no node has them."""
    global _watch
    with _lock:
        if _watch is None or _watch.state is not state:
            _watch = Watch(state)
        watch = _watch
    watch.note()
