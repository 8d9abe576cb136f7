"""Pipelines: items in durable streams, and stages that are methods of workers or functions. The engine is Go's; see docs/pipelines.md."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from . import _check, _codec, _core, _errors, _session
from ._cluster import Cluster
from ._future import Asked
from ._item import Item
from ._session import Session

_WHY_NOT = "an item may have been put by anybody and is never pickled"
_SECONDS = {"age", "every", "timeout", "backoff", "remember"}  # a number there is seconds
_LEAST = 0.25  # seconds that a take which does not want to wait may need for the answer

Self = TypeVar("Self", bound="Held")


class Held:
    """Something that the core holds for us under a number. In a running event loop the
    constructor does not block: `x = await Class(…)` and `async with Class(…) as x` wait without blocking the loop, and the first use
    blocks it otherwise."""

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

    def __await__(self: Self) -> Generator[Any, None, Self]:
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
    """The result of what was asked, or the future itself."""
    return asked.now() if blocking else asked


def warn_if_blocking(what: str, blocking: bool) -> None:
    """Warns if a method blocks an event loop that serves calls."""
    if blocking and _core.serving_loops:
        _core.warn_in_serving_loop(f"`await {what}(…, blocking=False)`")


class Pipeline(Held):
    """Streams, and stages between them. A pipeline that is made runs in this process until it is closed, and goes on where
    it was if there was one of that name; `Pipeline.attach(name)` is one that runs anywhere.

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

    Streams and stages may be plain dicts too, with the fields of a file (docs/pipelines.md). replicas: how many servers of a NATS
    cluster keep what is stored. grace: how long handlers may go on when it is closed. take_over: even if another process runs it.

    Every method blocks until it is done; with blocking=False it gives a future, to be awaited or asked for its result. In a
    running event loop the pipeline itself is awaited too: `async with troupe.Pipeline(…) as p`.
    """

    def __init__(
        self, name: str, streams: Mapping[str, Any], stages: Mapping[str, Any], *, replicas: int = 1, grace: float = 10.0, take_over: bool = False
    ) -> None:  # fmt: skip
        session = _session.current()
        if session.is_worker:
            raise _errors.RefusedError("a worker runs no pipelines; use Pipeline.attach, and let the driver run it")
        declared = _Declared(name, streams, stages, replicas)
        clusters = [c._open()._id for c in declared.clusters().values()]
        self._name(session, name)
        token = 0
        if declared.functions:
            from . import _stage_functions

            functions = {stage: _stage_functions.Function(work, stages[stage]) for stage, work in declared.functions.items()}
            token = _stage_functions.FunctionRunner(session.core, self._codec, functions).token
        request = {"text": declared.text(), "clusters": clusters, "functions": token, "grace": float(grace), "take_over": take_over}
        self._open(session, Asked(session.core, "pipeline_open", runtime=session.id, name=_session._who(), pipeline=request))

    def _name(self, session: Session, name: str) -> None:
        self.name = name
        self._codec = _codec.Codec(why_not=_WHY_NOT, handles=True)

    @classmethod
    def attach(cls, name: str) -> Pipeline:
        """A pipeline that runs, in this process or another."""
        session = _session.current()
        pipeline = cls.__new__(cls)
        pipeline._name(session, name)
        pipeline._open(session, Asked(session.core, "pipeline_attach", runtime=session.id, name=name))
        return pipeline

    @staticmethod
    def check(name: str, streams: Mapping[str, Any], stages: Mapping[str, Any]) -> None:
        """Raises InvalidError with everything that is wrong with the declaration. Nothing is started, and no head is needed."""
        _core.get().ask("pipeline_check", pipeline={"text": _Declared(name, streams, stages).text()}).get()

    @staticmethod
    def remove(name: str, *, blocking: bool = True) -> Any:
        """Removes what a pipeline that does not run has stored, with all that is in its streams and dead letters. Until then it
        keeps its place on the head's disk."""
        warn_if_blocking("troupe.Pipeline.remove", blocking)
        session = _session.current()
        return settle(Asked(session.core, "pipeline_remove", runtime=session.id, name=name), blocking)

    def _ask(self, op: str, method: str, blocking: bool, read: Any = None, **fields: Any) -> Any:
        warn_if_blocking(f"pipeline.{method}", blocking)
        return settle(Asked(self._session.core, op, read=read, pipeline={"id": self._id, **fields}), blocking)

    def _verb(self, verb: str, blocking: bool = True, read: Any = None, method: str = "", **fields: Any) -> Any:
        def result(text: Any) -> Any:
            value = None if text is None else json.loads(text)
            return value if read is None else read(value)

        return self._ask("pipeline_verb", method or verb, blocking, result, verb=verb, **fields)

    # Items.

    def put(
        self, stream: str, value: Any, *, key: str = "", group: str = "", of: int = 0, priority: int = 0, version: float | None = None,
        id: str = "", timeout: float | None = None, blocking: bool = True,
    ) -> Any:  # fmt: skip
        """Stores an item. It waits while the stream is full, or raises BusyError, as the stream was declared. Without a
        timeout it goes on through restarts of the head and of the pipeline."""
        item = Item(value, id=id, key=key, group=group, of=of, priority=priority, version=version)
        return self._put("put", stream, [item], timeout, blocking)

    def put_many(self, stream: str, items: Iterable[Any], *, timeout: float | None = None, blocking: bool = True) -> Any:
        """Stores items, or plain values, in order."""
        return self._put("put_many", stream, items, timeout, blocking)

    def _put(self, method: str, stream: str, items: Iterable[Any], timeout: float | None, blocking: bool) -> Any:
        wire = []
        for one in items:
            item = one if isinstance(one, Item) else Item(one)
            wire.append({**item._fields(), "body": self._encode(item.value)})
        return self._ask("pipeline_put", method, blocking, stream=stream, items=wire, timeout=_positive(timeout))

    def _encode(self, value: Any) -> bytes:
        body = self._codec.encode(value)
        return body if isinstance(body, bytes) else body.join()

    def take(self, stream: str, count: int = 1, timeout: float | None = None, *, blocking: bool = True) -> Any:
        """Up to count items out of a sink, when there is one at least; none, if none comes in time. They are dealt with."""
        warn_if_blocking("pipeline.take", blocking)
        return settle(_Take(self, stream, count, timeout, keep=False), blocking)

    def taking(self, stream: str, count: int = 1, timeout: float | None = None) -> Taking:
        """take for code that may fail, as a block (`with` or `async with`): the items are dealt with when it ends, and go back to
        their sink if it raises. If this process dies they go back too; to a pipeline in another process within seconds."""
        return Taking(self, stream, count, timeout)

    # Orders.

    def stats(self, *, blocking: bool = True) -> Any:
        """How it is: version, streams and stages by name, with the fields that `troupe pipeline top --json` has."""
        return self._verb("stats", blocking, _by_name)

    def pause(self, stage: str, *, blocking: bool = True) -> Any:
        """Hands a stage nothing more; what it has goes on. It outlasts a restart."""
        return self._verb("pause", blocking, stage=stage)

    def resume(self, stage: str, *, blocking: bool = True) -> Any:
        """Hands the stage items again."""
        return self._verb("resume", blocking, stage=stage)

    def scale(self, stage: str, workers: int, *, blocking: bool = True) -> Any:
        """Gives a stage so many workers: its role grows or shrinks, its function is run so many times at once."""
        return self._verb("scale", blocking, stage=stage, workers=workers)

    def join(self, stage: str, cluster: Cluster, ranks: Sequence[int] = (), *, blocking: bool = True) -> Any:
        """Gives a stage that runs here more workers: ranks of another cluster, all if none is named."""
        return self._verb("join", blocking, stage=stage, cluster=cluster._open()._id, ranks=list(ranks))

    def leave(self, stage: str, cluster: Cluster, ranks: Sequence[int] = (), *, timeout: float | None = None, blocking: bool = True) -> Any:
        """Takes ranks of a cluster out of a stage that runs here. They get nothing more, and finish what they have first."""
        return self._verb("leave", blocking, stage=stage, cluster=cluster._open()._id, ranks=list(ranks), timeout=_positive(timeout))

    def abort(self, item: str, *, blocking: bool = True) -> Any:
        """Ends an item by its id. Its handler is cancelled, or told by the stage's abort method, and may hand back what it has:
        a function finds current_call().cancelled true, and what it returns then travels on."""
        return self._verb("abort", blocking, item=item)

    def set_version(self, version: float, *, blocking: bool = True) -> Any:
        """Sets the version that items are stamped with, and measured by. It only grows."""
        return self._verb("version", blocking, method="set_version", version=float(version))

    @property
    def version(self) -> float:
        """The version now."""
        return float(self._verb("stats")["version"])

    def drain(self, timeout: float | None = None, *, blocking: bool = True) -> Any:
        """Takes nothing more in, and waits until everything has gone through: what is left lies in sinks and dead letters."""
        return self._verb("drain", blocking, timeout=_positive(timeout))

    def dead(self, *, blocking: bool = True) -> Any:
        """The dead letters, oldest first: seq, id, stage, stream, reason, attempts, failures (with their stacks), and value."""
        return self._verb("dead", blocking, self._letters)

    def _letters(self, letters: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        import base64

        for letter in letters or []:
            body = base64.b64decode(letter.pop("body") or "")
            letter["value"] = self._codec.decode(body) if body else None
        return letters or []

    def retry_dead(self, *seqs: int, blocking: bool = True) -> Any:
        """Puts dead letters back into their streams; without any named, all. Returns how many."""
        return self._verb("dead_retry", blocking, method="retry_dead", seqs=list(seqs), all=not seqs)

    def drop_dead(self, *seqs: int, blocking: bool = True) -> Any:
        """Removes dead letters; without any named, all. Returns how many."""
        return self._verb("dead_drop", blocking, method="drop_dead", seqs=list(seqs), all=not seqs)

    # The end.

    def shutdown(self, *, blocking: bool = True) -> Any:
        """Ends the pipeline wherever it runs: what is in hand is finished or back in its stream."""
        return self._verb("shutdown", blocking)

    def close(self, *, blocking: bool = True) -> Any:
        """Ends a pipeline that runs here, and lets go of one that runs elsewhere. It may be called more than once."""
        if blocking and self._session.closed:
            return None
        return self._ask("pipeline_close", "close", blocking)

    def __repr__(self) -> str:
        return f"<Pipeline {self.name}>"


class _Take(Asked):
    """Items on their way out of a sink. Unless they are kept they are dealt with by the time it is over."""

    def __init__(self, pipeline: Pipeline, stream: str, count: int, timeout: float | None, *, keep: bool) -> None:
        if count < 1:
            raise _errors.InvalidError(f"count {count} must be positive")
        self._pipeline = pipeline
        self._keep = keep
        self.loan = 0
        fields = {"id": pipeline._id, "stream": stream, "count": count, "timeout": None if timeout is None else max(_LEAST, timeout)}
        super().__init__(pipeline._session.core, "pipeline_take", pipeline=fields)

    def deliver(self, kind: int, flags: int, rank: int, body: Any) -> None:
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
        """Says that the items are dealt with, or to go back."""
        return Asked(self._core, "pipeline_taken", pipeline={"id": self._pipeline._id, "loan": self.loan, "done": done})

    def _dealt(self, asked: Asked) -> None:
        self._error = self._error or asked._error
        self._finish()


class Taking:
    """Items out of a sink, for the time of a block."""

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


def _by_name(status: dict[str, Any]) -> dict[str, Any]:
    for kind in ("streams", "stages"):
        status[kind] = {one["name"]: one for one in status[kind] or []}
    return status


def _positive(timeout: float | None) -> float | None:
    return _check.seconds("timeout", timeout)


class _Declared:
    """A pipeline as a file has it, and what a file cannot have: clusters and functions."""

    def __init__(self, name: str, streams: Mapping[str, Any], stages: Mapping[str, Any], replicas: int = 1) -> None:
        self.name = name
        self._replicas = replicas
        self.functions: dict[str, Any] = {}  # by stage
        self._roles: dict[str, Cluster | str] = {}  # by name
        self._streams = {stream: _plain(fields or {}) for stream, fields in streams.items()}
        self._stages = {stage: _plain(self._stage(stage, fields)) for stage, fields in stages.items()}

    def _stage(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A stage with its role by name."""
        out = dict(fields)
        work, role = out.pop("function", None), fields.get("role")
        if work is not None:
            if role is not None or not callable(work):
                raise _errors.InvalidError(f"stage {name}: function {work!r} {'and a role' if role else 'is none'}; give a role and its method, or a function")
            self.functions[name] = work
            return {**out, "role": _function(name)}
        if role is None:
            return out  # what is missing is said with everything else
        title = role.name if isinstance(role, Cluster) else str(role)
        known = self._roles.get(title)
        if isinstance(role, Cluster) and isinstance(known, Cluster) and known != role:
            raise _errors.InvalidError(f"stage {name}: another cluster is named {title} too")
        if not isinstance(known, Cluster):
            self._roles[title] = role
        return {**out, "role": title}

    def clusters(self) -> dict[str, Cluster]:
        """The clusters of the stages; those that are known by name are attached to."""
        return {name: role if isinstance(role, Cluster) else Cluster.attach(role) for name, role in self._roles.items()}

    def text(self) -> str:
        running = {role: {"command": ["python"]} for role in self._roles}
        here = {_function(stage): {"function": "driver.function"} for stage in self.functions}
        return json.dumps({"name": self.name, "replicas": self._replicas, "roles": {**running, **here}, "streams": self._streams, "stages": self._stages})


def _function(stage: str) -> str:
    """The role that represents a stage's function; its name is unique."""
    return f"function-of-{stage}"


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as a file has them: numbers become times where those are wanted."""
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
