"""Other processes of the session, addressed by name: calls to the services that they have for their objects."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from .. import _core, _errors, _seam
from .._cluster import Cluster, WorkerHandle
from .._future import Asked, Waitable
from .._session import current
from ._ids import role_of


class Peer:
    """Another process of the session, addressed by name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._handle: Any = None
        self._asked = False
        self._error: BaseException | None = None
        self._waiting: list[Callable[[Any, BaseException | None], None]] = []

    def with_handle(self, do: Callable[[WorkerHandle | None, BaseException | None], None]) -> None:
        """Calls do(handle, None) or do(None, error), at once or when the peer is resolved, in the order of the calls to
        this method."""
        with self._lock:
            if self._handle is None and self._error is None:
                self._waiting.append(do)
                if self._asked:
                    return
                self._asked = True
                ask = True
            else:
                ask = False
        if ask:
            self._attach()
        else:
            do(self._handle, self._error)

    def _attach(self) -> None:
        role, rank = role_of(self.name)
        if role != self.name:  # all ranks of a role share one cluster
            peer(role).with_handle(lambda handle, error: self._known(handle and handle.cluster.workers[rank], error))
            return
        session = current(start=False)
        with session.core.beside():
            asked = Asked(session.core, _seam.attach(runtime=session.id, name=self.name))
            asked.add_done_callback(self._attached)

    def _attached(self, asked: Asked) -> None:
        handle, error = None, None
        try:
            handle = Cluster._of(current(start=False), asked._get()).workers[0]
        except BaseException as err:
            error = err
        self._known(handle, error)

    def _known(self, handle: object, error: BaseException | None) -> None:
        with self._lock:
            self._handle, self._error = handle, error
            waiting, self._waiting = self._waiting, []
        for do in waiting:
            do(handle, error)

    def notify(self, method: str, *args: object) -> None:
        """Calls a method without waiting for the answer; a dead peer is not an error."""

        self.ask(method, args, _ignore)

    def ask(
        self,
        method: str,
        args: tuple[object, ...],
        done: Callable[[Any, BaseException | None], None],
        beside: bool = True,
    ) -> None:
        """Calls a method; done(value, None) or done(None, error) follows on any thread. Without beside, a thread that
        waits for done takes the answer itself."""

        def send(handle: WorkerHandle | None, error: BaseException | None) -> None:
            if handle is None:
                done(None, error)
                return
            try:
                with _core.get().beside() if beside else contextlib.nullcontext():
                    handle[method].remote(*args)._when_fetched(finish)
            except _errors.Error as err:
                done(None, err)
                return

        def finish(future: Waitable) -> None:
            future._seen()
            try:
                value = future._get()
            except BaseException as err:
                done(None, err)
                return
            done(value, None)

        self.with_handle(send)


def _ignore(_: object, error: BaseException | None) -> None:
    """Ignores the answer of a peer."""


_peers: dict[str, Peer] = {}
_peers_lock = threading.Lock()


def peer(name: str) -> Peer:
    with _peers_lock:
        found = _peers.get(name)
        if found is None or found._error is not None:
            found = _peers[name] = Peer(name)
        return found


def forget_peers() -> None:
    with _peers_lock:
        _peers.clear()
