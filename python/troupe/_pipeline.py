"""Pipelines: items in durable streams, and stages that are methods of workers or functions. The engine is in Go; see
docs/pipelines.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from . import _check, _codec, _core, _errors, _seam, _session
from ._cluster import Cluster
from ._future import Asked
from ._item import Item
from ._session import Session

_WHY_NOT = "an item may have been put by anybody and is never pickled"
_SECONDS = {"age", "every", "timeout", "backoff", "remember"}  # fields in which a number means seconds
_LEAST = 0.25  # seconds that a take with a shorter timeout still allows for the answer

Self = TypeVar("Self", bound="Held")


class Held:
    """An object that the core keeps under a number. In a running event loop the constructor does not block: `x = await
    Class(…)` and `async with Class(…) as x` wait without blocking the loop; otherwise the first use blocks it."""

    _session: Session
    _opening: Asked
    _number: int | None = None

    def _open(self, session: Session, opening: Asked) -> None:
        self._session, self._opening = session, opening
        if _core.running_loop() is None:
            self._number = opening.now()

    @property
    def _id(self) -> int:
        if self._number is None:
            self._number = self._opening.now()
        return self._number

    def __await__(self: Self) -> Generator[object, None, Self]:
        return self._opened().__await__()

    async def _opened(self: Self) -> Self:
        self._number = await self._opening
        return self

    async def __aenter__(self: Self) -> Self:
        return await self

    async def __aexit__(self, *_: object) -> None:
        await self.close(blocking=False)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, blocking: bool = True) -> Any:
        raise NotImplementedError


def settle(asked: Asked, blocking: bool) -> Any:
    """Waits for a request and returns its result, or returns the future if not blocking."""
    return asked.now() if blocking else asked._report()


def warn_if_blocking(what: str, blocking: bool) -> None:
    """Warns if a blocking method is called in an event loop that serves calls."""
    if blocking and _core.serving_loops:
        _core.warn_in_serving_loop(f"`await {what}(…, blocking=False)`")


class Pipeline(Held):
    """Streams, and the stages between them.

    A pipeline created here runs in this process until it is closed. If a pipeline of that name has run before, it
    continues where that one stopped. `Pipeline.attach(name)` gives access to a pipeline that runs in any process.

        def train(group):
            ...

        with troupe.Pipeline(
            "rl",
            streams={"prompts": troupe.Stream(items=100), "scored": troupe.Stream()},
            stages={
                "score": troupe.Stage(judges, "score", in_="prompts", out="scored"),
                "train": troupe.Stage(train, in_="scored", group={"count": 64}),
            },
        ) as p:
            p.put("prompts", "why?", key="p1")
            p.drain()

    Streams and stages may also be plain dicts with the fields of a pipeline file (docs/pipelines.md).

    - replicas: number of servers of a NATS cluster that store the data.
    - grace: seconds that handlers may continue after the pipeline is closed.
    - take_over: take the pipeline over even if another process runs it.

    Every method blocks until it is done; with blocking=False it returns a future. In a running event loop, await the
    pipeline too: `async with troupe.Pipeline(…) as p`.
    """

    def __init__(
        self,
        name: str,
        streams: Mapping[str, object],
        stages: Mapping[str, Any],
        *,
        replicas: int = 1,
        grace: float = 10.0,
        take_over: bool = False,
    ) -> None:
        session = _session.current()
        if session.is_worker:
            raise _errors.RefusedError("a worker runs no pipelines; use Pipeline.attach, and let the driver run it")
        declared = _Declared(name, streams, stages, replicas)
        clusters = [c._open()._id for c in declared.clusters().values()]
        self._name(session, name)
        token = 0
        if declared.functions:
            from . import _stage_functions

            functions = {
                stage: _stage_functions.Function(work, stages[stage]) for stage, work in declared.functions.items()
            }
            token = _stage_functions.FunctionRunner(session.core, self._codec, functions).token
        request = _seam.pipeline_open(
            runtime=session.id,
            by=_session._who(),
            text=declared.text(),
            clusters=clusters,
            functions=token,
            grace=float(grace),
            take_over=take_over,
        )
        self._open(session, Asked(session.core, request))

    def _name(self, session: Session, name: str) -> None:
        self.name = name
        self._codec = _codec.Codec(why_not=_WHY_NOT, handles=True)

    @classmethod
    def attach(cls, name: str) -> Pipeline:
        """Returns a pipeline that is running, in this process or another."""
        session = _session.current()
        pipeline = cls.__new__(cls)
        pipeline._name(session, name)
        pipeline._open(session, Asked(session.core, _seam.pipeline_attach(runtime=session.id, name=name)))
        return pipeline

    @staticmethod
    def check(name: str, streams: Mapping[str, object], stages: Mapping[str, object]) -> None:
        """Raises InvalidError with everything that is wrong with the declaration. Starts nothing and needs no head."""
        _core.get().ask(_seam.pipeline_check(text=_Declared(name, streams, stages).text())).get()

    @staticmethod
    def remove(name: str, *, blocking: bool = True) -> Any:
        """Deletes everything that a pipeline which is not running has stored, including its streams and dead letters.
        Until then, the data stays on the head's disk."""
        warn_if_blocking("troupe.Pipeline.remove", blocking)
        session = _session.current()
        return settle(Asked(session.core, _seam.pipeline_remove(runtime=session.id, name=name)), blocking)

    def _ask(
        self, method: str, make: Callable[..., _seam.Request], blocking: bool, read: Any = None, **fields: object
    ) -> Any:
        """Sends what make makes of the fields. The warning comes first: the number of a pipeline may be waited for."""
        warn_if_blocking(f"pipeline.{method}", blocking)
        return settle(Asked(self._session.core, make(id=self._id, **fields), read=read), blocking)

    # Items.

    def put(
        self,
        stream: str,
        value: object,
        *,
        key: str = "",
        group: str = "",
        of: int = 0,
        priority: int = 0,
        version: float | None = None,
        id: str = "",
        timeout: float | None = None,
        blocking: bool = True,
    ) -> Any:
        """Stores an item. If the stream is full, waits or raises BusyError, as the stream was declared. Without a
        timeout, waits even through restarts of the head and of the pipeline."""
        item = Item(value, id=id, key=key, group=group, of=of, priority=priority, version=version)
        return self._put("put", stream, [item], timeout, blocking)

    def put_many(
        self, stream: str, items: Iterable[object], *, timeout: float | None = None, blocking: bool = True
    ) -> Any:
        """Stores items or plain values, in order."""
        return self._put("put_many", stream, items, timeout, blocking)

    def _put(self, method: str, stream: str, items: Iterable[object], timeout: float | None, blocking: bool) -> Any:
        wire = []
        for one in items:
            item = one if isinstance(one, Item) else Item(one)
            wire.append({**item._fields(), "body": self._encode(item.value)})
        return self._ask(method, _seam.pipeline_put, blocking, stream=stream, items=wire, timeout=_positive(timeout))

    def _encode(self, value: object) -> bytes:
        body = self._codec.encode(value)
        return body if isinstance(body, bytes) else body.join()

    def take(self, stream: str, count: int = 1, timeout: float | None = None, *, blocking: bool = True) -> Any:
        """Takes up to count items out of a sink and acknowledges them. Waits for the first one; returns an empty list
        if none arrives within timeout seconds."""
        warn_if_blocking("pipeline.take", blocking)
        return settle(_Take(self, stream, count, timeout, keep=False), blocking)

    def taking(self, stream: str, count: int = 1, timeout: float | None = None) -> Taking:
        """Takes items for a block, `with` or `async with`, that may fail: they are acknowledged at its end, and return
        to their sink if it raises. They also return if this process dies; if the pipeline runs in another process,
        within seconds."""
        return Taking(self, stream, count, timeout)

    # Control.

    def stats(self, *, blocking: bool = True) -> Any:
        """Returns the state: version, and streams and stages by name, with the fields of `troupe pipeline top --json`.
        A stage whose role has died has "death": role, at and cause."""
        return self._ask("stats", _seam.pipeline_stats, blocking, lambda text: _by_name(json.loads(text)))

    def pause(self, stage: str, *, blocking: bool = True) -> Any:
        """Gives a stage no more items; items in progress continue. A pause outlasts a restart."""
        return self._ask("pause", _seam.pipeline_pause, blocking, stage=stage)

    def resume(self, stage: str, *, blocking: bool = True) -> Any:
        """Gives a paused stage items again."""
        return self._ask("resume", _seam.pipeline_resume, blocking, stage=stage)

    def scale(self, stage: str, workers: int, *, blocking: bool = True) -> Any:
        """Sets the number of workers of a stage: its role grows or shrinks, or its function runs that many times in
        parallel."""
        return self._ask(
            "scale", _seam.pipeline_scale, blocking, stage=stage, workers=_check.integer("workers", workers)
        )

    def join(self, stage: str, cluster: Cluster, ranks: Sequence[int] = (), *, blocking: bool = True) -> Any:
        """Adds workers to a stage that runs here: the given ranks of another cluster, or all of them."""
        return self._ask(
            "join", _seam.pipeline_join, blocking, stage=stage, cluster=cluster._open()._id, ranks=list(ranks)
        )

    def leave(
        self,
        stage: str,
        cluster: Cluster,
        ranks: Sequence[int] = (),
        *,
        timeout: float | None = None,
        blocking: bool = True,
    ) -> Any:
        """Removes ranks of a cluster from a stage that runs here. They get no more items, and finish those that they
        have."""
        return self._ask(
            "leave",
            _seam.pipeline_leave,
            blocking,
            stage=stage,
            cluster=cluster._open()._id,
            ranks=list(ranks),
            timeout=_positive(timeout),
        )

    def abort(self, item: str, *, blocking: bool = True) -> Any:
        """Aborts an item by its id. Its handler is cancelled, or notified through the stage's abort method, and may
        return a partial result: a function sees current_call().cancelled as true, and the value that it then returns
        continues downstream."""
        return self._ask("abort", _seam.pipeline_abort, blocking, item=item)

    def set_version(self, version: float, *, blocking: bool = True) -> Any:
        """Sets the version that items are stamped with and compared to. It can only grow."""
        return self._ask("set_version", _seam.pipeline_version, blocking, version=float(version))

    @property
    def version(self) -> float:
        """The current version."""
        return float(self.stats()["version"])

    def drain(self, timeout: float | None = None, *, blocking: bool = True) -> Any:
        """Accepts no more items, and waits until all have been processed. The items left are in sinks and dead letters.
        Raises WorkerLostError when items wait for a stage whose role has died."""
        return self._ask("drain", _seam.pipeline_drain, blocking, timeout=_positive(timeout))

    def dead(self, *, blocking: bool = True) -> Any:
        """Returns the dead letters, oldest first: seq, id, stage, stream, reason, attempts, failures (with stack
        traces) and value."""
        return self._ask("dead", _seam.pipeline_dead, blocking, self._letters)

    def _letters(self, text: str) -> list[dict[str, Any]]:
        import base64

        letters: list[dict[str, Any]] = json.loads(text)
        for letter in letters:
            body = base64.b64decode(letter.pop("body") or "")
            letter["value"] = self._codec.decode(body) if body else None
        return letters

    def retry_dead(self, *seqs: int, blocking: bool = True) -> Any:
        """Puts dead letters back into their streams; without arguments, all of them. Returns their number."""
        return self._ask("retry_dead", _seam.pipeline_retry_dead, blocking, seqs=list(seqs), all=not seqs)

    def drop_dead(self, *seqs: int, blocking: bool = True) -> Any:
        """Deletes dead letters; without arguments, all of them. Returns their number."""
        return self._ask("drop_dead", _seam.pipeline_drop_dead, blocking, seqs=list(seqs), all=not seqs)

    # Shutdown.

    def shutdown(self, *, blocking: bool = True) -> Any:
        """Stops the pipeline wherever it runs. Items in progress are finished or returned to their streams."""
        return self._ask("shutdown", _seam.pipeline_stop, blocking)

    def close(self, *, blocking: bool = True) -> Any:
        """Stops a pipeline that runs here, or detaches from one that runs elsewhere. Repeated calls have no effect."""
        if blocking and self._session.closed:
            return None
        return self._ask("close", _seam.pipeline_close, blocking)

    def __repr__(self) -> str:
        return f"<Pipeline {self.name}>"


class _Take(Asked):
    """A request for items out of a sink. Without keep, the items are acknowledged before it completes."""

    def __init__(self, pipeline: Pipeline, stream: str, count: int, timeout: float | None, *, keep: bool) -> None:
        if count < 1:
            raise _errors.InvalidError(f"count {count} must be positive")
        self._pipeline = pipeline
        self._keep = keep
        self.loan = 0
        timeout = None if timeout is None else max(_LEAST, timeout)
        request = _seam.pipeline_take(id=pipeline._id, stream=stream, count=count, timeout=timeout)
        super().__init__(pipeline._session.core, request)

    def deliver(self, kind: int, flags: int, rank: int, body: object) -> None:
        self._store(flags, body)
        if self._error is None:
            try:
                self._take(self._value)
            except _errors.Error as err:
                self._error = err
        if not self.loan or self._keep:
            self._finish()
            return
        self.ended(self._error is None).add_done_callback(self._dealt)

    def _take(self, got: dict[str, Any]) -> None:
        self.loan = got["loan"]
        decode = self._pipeline._codec.decode
        self._value = [Item._of(fields, decode(bytearray(fields["body"]))) for fields in got["items"] or []]

    def ended(self, done: bool) -> Asked:
        """Acknowledges the items, or returns them to their sink."""
        return Asked(self._core, _seam.pipeline_taken(id=self._pipeline._id, loan=self.loan, done=done))

    def _dealt(self, asked: Asked) -> None:
        self._error = self._error or asked._error
        self._finish()


class Taking:
    """A block that takes items out of a sink."""

    def __init__(self, pipeline: Pipeline, stream: str, count: int, timeout: float | None) -> None:
        self._pipeline, self._stream, self._count, self._timeout = pipeline, stream, count, timeout

    def _start(self) -> _Take:
        return _Take(self._pipeline, self._stream, self._count, self._timeout, keep=True)

    def __enter__(self) -> list[Item]:
        _core.warn_in_serving_loop("`async with pipeline.taking(…) as items`")
        self._take = self._start()
        items: list[Item] = self._take.now()
        return items

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._take.loan:
            self._take.ended(kind is None).now()

    async def __aenter__(self) -> list[Item]:
        self._take = self._start()
        items: list[Item] = await self._take
        return items

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._take.loan:
            await self._take.ended(kind is None)


def _by_name(status: dict[str, Any]) -> dict[str, object]:
    for kind in ("streams", "stages"):
        status[kind] = {one["name"]: one for one in status[kind] or []}
    return status


def _positive(timeout: float | None) -> float | None:
    return _check.seconds("timeout", timeout)


class _Declared:
    """A pipeline's declaration in the form of a file, and what a file cannot express: clusters and functions."""

    def __init__(self, name: str, streams: Mapping[str, Any], stages: Mapping[str, Any], replicas: int = 1) -> None:
        self.name = name
        self._replicas = replicas
        self.functions: dict[str, Any] = {}  # functions by stage
        self._roles: dict[str, Cluster | str] = {}  # clusters, or their names, by name
        self._streams = {stream: _plain(fields or {}) for stream, fields in streams.items()}
        self._stages = {stage: _plain(self._stage(stage, fields)) for stage, fields in stages.items()}

    def _stage(self, name: str, fields: Mapping[str, Any]) -> dict[str, object]:
        """Returns a stage with its role replaced by the role's name."""
        out = dict(fields)
        work, role = out.pop("function", None), fields.get("role")
        if work is not None:
            if role is not None or not callable(work):
                raise _errors.InvalidError(
                    f"stage {name}: function {work!r} {'and a role' if role else 'is none'}; give a role and its "
                    "method, or a function"
                )
            self.functions[name] = work
            return {**out, "role": _function(name)}
        if role is None:
            return out  # the check of the whole declaration reports the missing role
        if isinstance(role, Cluster):
            for method in (fields.get("method"), fields.get("abort")):
                role._check_method(f"stage {name}", method)
        title = role.name if isinstance(role, Cluster) else str(role)
        known = self._roles.get(title)
        if isinstance(role, Cluster) and isinstance(known, Cluster) and known != role:
            raise _errors.InvalidError(f"stage {name}: another cluster is named {title} too")
        if not isinstance(known, Cluster):
            self._roles[title] = role
        return {**out, "role": title}

    def clusters(self) -> dict[str, Cluster]:
        """Returns the clusters of the stages, and attaches to those given by name."""
        return {name: role if isinstance(role, Cluster) else Cluster.attach(role) for name, role in self._roles.items()}

    def text(self) -> str:
        running = {role: {"command": ["python"]} for role in self._roles}
        here = {_function(stage): {"function": "driver.function"} for stage in self.functions}
        return json.dumps(
            {
                "name": self.name,
                "replicas": self._replicas,
                "roles": {**running, **here},
                "streams": self._streams,
                "stages": self._stages,
            }
        )


def _function(stage: str) -> str:
    """Returns the name of the role that represents a stage's function. It is unique."""
    return f"function-of-{stage}"


def _plain(fields: Mapping[str, object]) -> dict[str, object]:
    """Converts fields to the form of a file: numbers become durations where a duration is expected."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            out[name] = _plain(value)
        elif name in _SECONDS and isinstance(value, (int, float)):
            out[name] = f"{float(value):f}s"
        elif isinstance(value, tuple):
            out[name] = list(value)
        else:
            out[name] = value
    return out
