"""Routers: requests over the ranks of clusters, by credits. The work is Go's; see docs/pipelines.md."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from . import _check, _errors, _session, _trace
from ._cluster import Cluster
from ._future import Asked, resolve
from ._pipeline import Held, settle, warn_if_blocking


class Request(Asked):
    """A request under way: a future, which can be aborted too."""

    def __init__(self, router: Router, id: str, **fields: Any) -> None:
        self._router = router
        self.id = id
        super().__init__(
            router._session.core, "router_call", read=router._decode, codec=router._codec, router={"id": router._id, "request": id, **fields}
        )  # fmt: skip

    def abort(self, *, blocking: bool = True) -> Any:
        """Ends the request: its result is then what the rank has so far, if the router has an abort method."""
        return self._router.abort(self.id, blocking=blocking)


class Router(Held):
    """Requests over the ranks of clusters: each goes to the least loaded rank, or to the one that has its key.

        router = troupe.Router(engines, method="generate", credits=16, sticky=True)
        text = router.call(prompt, key="session-1")
        futures = [router.call(p, blocking=False) for p in prompts]

    credits: how many requests one rank may have at once. waiting: how many may wait for a rank; beyond, a request is a
    BusyError. sticky: requests of one key go to the same rank while it is there. abort: a method in the control lane that is
    given the id of a request and has the method, which was told the id too, answer with what it has; without one, an aborted
    request is cancelled.

    Every method blocks until it is done; with blocking=False it gives a future, to be awaited or asked for its result.
    """

    def __init__(
        self, *clusters: Cluster, method: str, abort: str = "", credits: int = 1, waiting: int = 1024, sticky: bool = False
    ) -> None:  # fmt: skip
        if credits < 1 or waiting < 1:
            raise _errors.InvalidError(f"credits {credits} and waiting {waiting} must be positive")
        session = _session.current()
        self.method = method
        self._codec = session.codec(True)
        request = {
            "method": method, "abort": abort, "credits": credits, "waiting": waiting, "sticky": sticky,
            "clusters": [c._open()._id for c in clusters],
        }  # fmt: skip
        self._open(session, Asked(session.core, "router_open", router=request))

    def _verb(self, verb: str, blocking: bool, read: Any = None, **fields: Any) -> Any:
        warn_if_blocking(f"router.{verb}", blocking)
        return settle(Asked(self._session.core, "router_verb", read=read, router={"id": self._id, "verb": verb, **fields}), blocking)

    def _decode(self, body: bytes) -> Any:
        return self._codec.decode(bytearray(body)) if body else None

    # Requests.

    def call(
        self, *args: Any, key: str = "", id: str = "", again: bool = False, timeout: float | None = None, blocking: bool = True, **kwargs: Any
    ) -> Any:  # fmt: skip
        """Sends a request to a rank. key: whose rank it is, for a sticky router. id: its name for abort; one is made up if none is
        given. again: send it to another rank if the one that has it dies; without, that is a WorkerLostError. timeout: seconds, the
        wait for a rank included."""
        warn_if_blocking("router.call", blocking)
        _check.seconds("timeout", timeout)
        body = self._codec.encode([[resolve(a) for a in args], {n: resolve(v) for n, v in kwargs.items()} or None])
        fields = {
            "key": key, "again": again, "timeout": timeout if timeout is None else float(timeout), "body": body if isinstance(body, bytes) else body.join(),
            "scope": _trace.where(),
        }  # fmt: skip
        return settle(Request(self, id or os.urandom(8).hex(), **fields), blocking)

    def abort(self, id: str, *, blocking: bool = True) -> Any:
        """Ends a request by its id; see Router."""
        return self._verb("abort", blocking, request=id)

    # Ranks.

    def join(self, cluster: Cluster, ranks: Sequence[int] = (), *, blocking: bool = True) -> Any:
        """Adds ranks of a cluster, all of them if none is named."""
        return self._verb("join", blocking, cluster=cluster._open()._id, ranks=list(ranks))

    def leave(self, cluster: Cluster, ranks: Sequence[int] = (), *, timeout: float | None = None, blocking: bool = True) -> Any:
        """Takes ranks out, all of the cluster's if none is named: they get nothing more, and answer what they have first."""
        return self._verb("leave", blocking, cluster=cluster._open()._id, ranks=list(ranks), timeout=timeout)

    def scale(self, cluster: Cluster, workers: int, *, timeout: float | None = None, blocking: bool = True) -> Any:
        """Gives a cluster so many ranks: new ones join, and those that go answer what they have first."""
        return self._verb("scale", blocking, cluster=cluster._open()._id, workers=workers, timeout=timeout)

    # Orders.

    def suspend(self, *, blocking: bool = True) -> Any:
        """Hands out no more requests; those that come wait."""
        return self._verb("suspend", blocking)

    def resume(self, *, blocking: bool = True) -> Any:
        """Hands out requests again."""
        return self._verb("resume", blocking)

    def stats(self, *, blocking: bool = True) -> Any:
        """How it is: ranks, credits, in_flight, waiting, served, suspended."""
        return self._verb("stats", blocking, lambda text: {"suspended": False, **json.loads(text)})

    def close(self, *, blocking: bool = True) -> Any:
        """Gives up what waits and what is under way. The clusters go on. It may be called more than once."""
        if blocking and self._session.closed:
            return None
        warn_if_blocking("router.close", blocking)
        return settle(Asked(self._session.core, "router_close", router={"id": self._id}), blocking)

    def __repr__(self) -> str:
        return f"<Router of {self.method}>"
