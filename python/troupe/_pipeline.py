"""Pipelines: items in durable streams, and stages that are methods of workers. The engine is Go's; see docs/pipelines.md."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import _codec, _errors, _session
from ._cluster import Cluster

_WHY_NOT = "an item may have been put by anybody and is never pickled"
_SECONDS = {"age", "every", "timeout", "backoff", "remember"}  # a number there is seconds
_LEAST = 0.25  # seconds that a take which does not want to wait may need for the answer


class Item:
    """One thing that travels: a value, and what a stage goes by.

    As an output, what is left out is that of the input: its key, group, priority and version; `to` names the stream where a
    stage has several. An item that a stage or a take gives says also which attempt it is, whether it is stale, and where it was.
    """

    __slots__ = ("attempt", "group", "id", "key", "of", "priority", "stale", "stream", "to", "value", "version")

    def __init__(
        self, value: Any = None, *, id: str = "", key: str = "", group: str = "", of: int = 0, priority: int = 0,
        version: float | None = None, to: str = "",
    ) -> None:  # fmt: skip
        self.value, self.id, self.key, self.group, self.of = value, id, key, group, of
        self.priority, self.version, self.to = priority, version, to
        self.attempt, self.stale, self.stream = 0, False, ""

    def _fields(self) -> dict[str, Any]:
        """What is set, as the wire calls it, without the value."""
        all_of_them = {"id": self.id, "key": self.key, "group": self.group, "of": self.of, "priority": self.priority}
        out = {name: value for name, value in all_of_them.items() if value}
        if self.version is not None:
            out["version"] = float(self.version)
        return out

    @classmethod
    def _of(cls, fields: Mapping[str, Any], value: Any) -> Item:
        known = ("id", "key", "group", "of", "priority", "version")
        item = cls(value, **{name: fields[name] for name in known if fields.get(name) is not None})
        item.attempt, item.stale, item.stream = fields.get("attempt") or 0, bool(fields.get("stale")), fields.get("stream") or ""
        return item

    def __repr__(self) -> str:
        said = "".join(f", {name}={value!r}" for name, value in self._fields().items())
        return f"Item({self.value!r}{said})"


def given(argument: Any) -> Any:
    """What a stage's method is given: an item, or the list of a group's."""
    if isinstance(argument, list):
        return [Item._of(fields, fields.get("body")) for fields in argument]
    return Item._of(argument, argument.get("body"))


def outputs(result: Any) -> list[dict[str, Any]]:
    """What a stage's method returned, as the wire wants it: None is no output, a list is several, anything else is one."""
    if result is None:
        return []
    out = []
    for one in result if isinstance(result, list) else [result]:
        item = one if isinstance(one, Item) else Item(one)
        out.append({**item._fields(), **({"to": item.to} if item.to else {}), "body": item.value})
    return out


class Pipeline:
    """Streams, and stages between them. A pipeline that is made runs in this process until it is closed, and goes on where
    it was if there was one of that name; `Pipeline.attach(name)` is one that runs anywhere.

        with troupe.Pipeline(
            "rl",
            streams={"prompts": {"items": 100}, "scores": {"sink": True}},
            stages={"score": {"role": judges, "method": "score", "in": "prompts", "out": "scores"}},
        ) as p:
            p.put("prompts", "why?", key="p1")
            p.drain()
            print([item.value for item in p.take("scores", 10)])

    The fields of streams and stages are those of a file (docs/pipelines.md). A stage's role is a cluster, or the name of one;
    times may be seconds. grace: how long handlers may go on when it is closed. take_over: even if another process runs it.
    """

    def __init__(
        self, name: str, streams: Mapping[str, Any], stages: Mapping[str, Any], *, grace: float = 10.0, take_over: bool = False
    ) -> None:  # fmt: skip
        session = _session.current()
        if session.is_worker:
            raise _errors.RefusedError("a worker runs no pipelines; use Pipeline.attach, and let the driver run it")
        clusters: dict[str, Cluster] = {}
        declared = {stage: _declared(_stage(stage, fields, clusters)) for stage, fields in stages.items()}
        text = json.dumps({
            "name": name,
            "roles": {role: {"command": ["python"]} for role in clusters},  # they run already
            "streams": {stream: _declared(fields or {}) for stream, fields in streams.items()},
            "stages": declared,
        })  # fmt: skip
        request = {"text": text, "clusters": [c._open()._id for c in clusters.values()], "grace": float(grace), "take_over": take_over}
        self._setup(session, name, session.core.ask("pipeline_open", runtime=session.id, name=_session._who(), pipeline=request).get())

    def _setup(self, session: _session.Session, name: str, number: int) -> None:
        self.name = name
        self._session = session
        self._id = number
        self._codec = _codec.Codec(why_not=_WHY_NOT, open_handle=session.codec(False).open_handle)

    @classmethod
    def attach(cls, name: str) -> Pipeline:
        """A pipeline that runs, in this process or another."""
        session = _session.current()
        pipeline = cls.__new__(cls)
        pipeline._setup(session, name, session.core.ask("pipeline_attach", runtime=session.id, name=name).get())
        return pipeline

    def _ask(self, op: str, **fields: Any) -> Any:
        return self._session.core.ask(op, pipeline={"id": self._id, **fields}).get()

    def _verb(self, verb: str, **fields: Any) -> Any:
        text = self._ask("pipeline_verb", verb=verb, **fields)
        return None if text is None else json.loads(text)

    # Items.

    def put(
        self, stream: str, value: Any, *, key: str = "", group: str = "", of: int = 0, priority: int = 0, version: float | None = None,
        id: str = "", timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Stores an item. It waits while the stream is full, or raises BusyError, as the stream was declared. Without a
        timeout it goes on through restarts of the head and of the pipeline."""
        self.put_many(stream, [Item(value, id=id, key=key, group=group, of=of, priority=priority, version=version)], timeout=timeout)

    def put_many(self, stream: str, items: Iterable[Any], *, timeout: float | None = None) -> None:
        """Stores items, or plain values, in order."""
        wire = []
        for one in items:
            item = one if isinstance(one, Item) else Item(one)
            wire.append({**item._fields(), "body": self._encode(item.value)})
        self._ask("pipeline_put", stream=stream, items=wire, timeout=_positive(timeout))

    def _encode(self, value: Any) -> bytes:
        body = self._codec.encode(value)
        return body if isinstance(body, bytes) else body.join()

    def take(self, stream: str, count: int = 1, timeout: float | None = None) -> list[Item]:
        """Up to count items out of a sink, when there is one at least; none, if none comes in time. They are dealt with."""
        with self.taking(stream, count, timeout) as items:
            return items

    @contextmanager
    def taking(self, stream: str, count: int = 1, timeout: float | None = None) -> Iterator[list[Item]]:
        """take for those who may fail: the items are dealt with when the block ends, and go back to their sink if it raises.
        Those of a pipeline in another process are lent for 30 seconds: they go back then, and not before."""
        if count < 1:
            raise _errors.InvalidError(f"count {count} must be positive")
        got = self._ask("pipeline_take", stream=stream, count=count, timeout=None if timeout is None else max(_LEAST, timeout))
        if not got["loan"]:
            yield []
            return
        try:
            yield [Item._of(fields, self._codec.decode(fields["body"])) for fields in got["items"]]
        except BaseException:
            self._ask("pipeline_taken", loan=got["loan"], done=False)
            raise
        self._ask("pipeline_taken", loan=got["loan"], done=True)

    # Verbs.

    def stats(self) -> dict[str, Any]:
        """How it is: version, streams and stages by name, with the fields that `troupe pipeline top --json` has."""
        status: dict[str, Any] = self._verb("stats")
        for kind in ("streams", "stages"):
            status[kind] = {one["name"]: one for one in status[kind] or []}
        return status

    def pause(self, stage: str) -> None:
        """Hands a stage nothing more; what it has goes on. It outlasts a restart."""
        self._verb("pause", stage=stage)

    def resume(self, stage: str) -> None:
        """Hands the stage items again."""
        self._verb("resume", stage=stage)

    def scale(self, stage: str, workers: int) -> None:
        """Gives a stage so many workers: its role grows or shrinks."""
        self._verb("scale", stage=stage, workers=workers)

    def abort(self, item: str) -> None:
        """Ends an item by its id. Its handler is cancelled, or told by the stage's abort method, and may hand back what it has."""
        self._verb("abort", item=item)

    def set_version(self, version: float) -> None:
        """Sets the version that items are stamped with, and measured by. It only grows."""
        self._verb("version", version=float(version))

    @property
    def version(self) -> float:
        """The version now."""
        return float(self._verb("stats")["version"])

    def drain(self, timeout: float | None = None) -> None:
        """Takes nothing more in, and waits until everything has gone through: what is left lies in sinks and dead letters."""
        self._verb("drain", timeout=_positive(timeout))

    def dead(self) -> list[dict[str, Any]]:
        """The dead letters, oldest first: seq, id, stage, stream, reason, attempts, failures (with their stacks), and value."""
        letters: list[dict[str, Any]] = self._verb("dead") or []
        for letter in letters:
            body = base64.b64decode(letter.pop("body") or "")
            letter["value"] = self._codec.decode(body) if body else None
        return letters

    def retry_dead(self, *seqs: int) -> int:
        """Puts dead letters back into their streams; without any named, all. Returns how many."""
        return int(self._verb("dead_retry", seqs=list(seqs), all=not seqs))

    def drop_dead(self, *seqs: int) -> int:
        """Removes dead letters; without any named, all. Returns how many."""
        return int(self._verb("dead_drop", seqs=list(seqs), all=not seqs))

    # The end.

    def shutdown(self) -> None:
        """Ends the pipeline wherever it runs: what is in hand is finished or back in its stream."""
        self._verb("shutdown")

    def close(self) -> None:
        """Ends a pipeline that runs here, and lets go of one that runs elsewhere. It may be called more than once."""
        if not self._session.closed:
            self._ask("pipeline_close")

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Pipeline {self.name}>"


def _positive(timeout: float | None) -> float | None:
    if timeout is not None and timeout <= 0:
        raise _errors.InvalidError(f"timeout {timeout} must be positive, or None for none")
    return None if timeout is None else float(timeout)


def _stage(name: str, fields: Mapping[str, Any], clusters: dict[str, Cluster]) -> dict[str, Any]:
    """A stage with its role by name; the cluster is noted."""
    role = fields.get("role")
    if role is None:
        return dict(fields)  # what is missing is said with everything else
    cluster = role if isinstance(role, Cluster) else clusters.get(role) or Cluster.attach(role)
    if clusters.setdefault(cluster.name, cluster) != cluster:
        raise _errors.InvalidError(f"stage {name}: another cluster is named {cluster.name} too")
    return {**fields, "role": cluster.name}


def _declared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as a file has them: numbers become times where those are wanted."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            out[name] = _declared(value)
        elif name in _SECONDS and isinstance(value, (int, float)):
            out[name] = f"{float(value):f}s"
        else:
            out[name] = value
    return out
