"""Routers: distribute requests over the ranks of clusters, by credits. The engine is in Go; see docs/pipelines.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from . import _check, _errors, _seam, _session, _trace
from ._cluster import Cluster
from ._future import Asked, resolve
from ._pipeline import Held, settle, warn_if_blocking


class Request(Asked):
    """A request under way: a future that can also be aborted."""

    def __init__(self, router: Router, id: str, request: _seam.Request) -> None:
        self._router = router
        self.id = id
        super().__init__(router._session.core, request, read=router._decode, codec=router._codec)

    def abort(self, *, blocking: bool = True) -> Any:
        """Aborts the request. If the router has an abort method, the result is then what the rank has produced so
        far."""
        return self._router.abort(self.id, blocking=blocking)


class Router(Held):
    """Distributes requests over the ranks of clusters: each goes to the least loaded rank, or to the rank that has its
    key.

        router = troupe.Router(engines, method="generate", credits=16, sticky=True)
        text = router.call(prompt, key="session-1")
        futures = [router.call(p, blocking=False) for p in prompts]

    - credits: number of requests that one rank may have at once.
    - waiting: number of requests that may wait for a rank; further ones raise BusyError.
    - sticky: requests with the same key go to the same rank while it is available.
    - abort: a method in the control lane. It gets the id of a request, which the request's method got too, and makes
      that method return what it has. Without it, an aborted request is cancelled.

    Every method blocks until it is done; with blocking=False it returns a future.
    """

    def __init__(
        self,
        *clusters: Cluster,
        method: str,
        abort: str = "",
        credits: int = 1,
        waiting: int = 1024,
        sticky: bool = False,
    ) -> None:
        if credits < 1 or waiting < 1:
            raise _errors.InvalidError(f"credits {credits} and waiting {waiting} must be positive")
        session = _session.current()
        self.method = method
        self._codec = session.codec(True)
        request = _seam.router_open(
            method=method,
            abort=abort,
            credits=credits,
            waiting=waiting,
            sticky=sticky,
            clusters=[c._open()._id for c in clusters],
        )
        self._open(session, Asked(session.core, request))

    def _ask(
        self, method: str, make: Callable[..., _seam.Request], blocking: bool, read: Any = None, **fields: object
    ) -> object:
        """Sends what make makes of the fields. The warning comes first: the number of a router may be waited for."""
        warn_if_blocking(f"router.{method}", blocking)
        return settle(Asked(self._session.core, make(id=self._id, **fields), read=read), blocking)

    def _decode(self, body: bytes) -> object:
        return self._codec.decode(bytearray(body)) if body else None

    # Requests.

    def call(
        self,
        *args: object,
        key: str = "",
        id: str = "",
        again: bool = False,
        timeout: float | None = None,
        blocking: bool = True,
        **kwargs: object,
    ) -> Any:
        """Sends a request to a rank and returns its result.

        - key: selects the rank, in a sticky router.
        - id: names the request for abort; generated if omitted.
        - again: send the request to another rank if its rank dies. Otherwise that raises WorkerLostError.
        - timeout: seconds, including the wait for a rank.
        """
        warn_if_blocking("router.call", blocking)
        _check.seconds("timeout", timeout)
        body = self._codec.encode([[resolve(a) for a in args], {n: resolve(v) for n, v in kwargs.items()} or None])
        id = id or os.urandom(8).hex()
        request = _seam.router_call(
            id=self._id,
            request=id,
            key=key,
            again=again,
            timeout=timeout if timeout is None else float(timeout),
            body=body if isinstance(body, bytes) else body.join(),
            scope=_trace.where(),
        )
        return settle(Request(self, id, request), blocking)

    def abort(self, id: str, *, blocking: bool = True) -> Any:
        """Aborts a request by its id; see Router."""
        return self._ask("abort", _seam.router_abort, blocking, request=id)

    # Ranks.

    def join(self, cluster: Cluster, ranks: Sequence[int] = (), *, blocking: bool = True) -> Any:
        """Adds ranks of a cluster; without ranks, all of them."""
        return self._ask("join", _seam.router_join, blocking, cluster=cluster._open()._id, ranks=list(ranks))

    def leave(
        self, cluster: Cluster, ranks: Sequence[int] = (), *, timeout: float | None = None, blocking: bool = True
    ) -> Any:
        """Removes ranks of a cluster; without ranks, all of them. They get no more requests, and finish those that they
        have."""
        return self._ask(
            "leave", _seam.router_leave, blocking, cluster=cluster._open()._id, ranks=list(ranks), timeout=timeout
        )

    def scale(self, cluster: Cluster, workers: int, *, timeout: float | None = None, blocking: bool = True) -> Any:
        """Sets the number of a cluster's ranks: new ranks join, and departing ones first finish their requests."""
        workers = _check.integer("workers", workers)
        return self._ask(
            "scale", _seam.router_scale, blocking, cluster=cluster._open()._id, workers=workers, timeout=timeout
        )

    # Control.

    def suspend(self, *, blocking: bool = True) -> Any:
        """Sends no more requests to ranks; new requests wait."""
        return self._ask("suspend", _seam.router_suspend, blocking)

    def resume(self, *, blocking: bool = True) -> Any:
        """Sends requests to ranks again."""
        return self._ask("resume", _seam.router_resume, blocking)

    def stats(self, *, blocking: bool = True) -> Any:
        """Returns the state: ranks, credits, in_flight, waiting, served, suspended."""
        return self._ask("stats", _seam.router_stats, blocking, lambda text: {"suspended": False, **json.loads(text)})

    def close(self, *, blocking: bool = True) -> Any:
        """Cancels the waiting requests and those under way. The clusters continue. Repeated calls have no effect."""
        if blocking and self._session.closed:
            return None
        return self._ask("close", _seam.router_close, blocking)

    def __repr__(self) -> str:
        return f"<Router of {self.method}>"
