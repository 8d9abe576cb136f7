"""Clusters: the running workers of one role, as a driver holds them."""

from __future__ import annotations

import json  # here, and not where it is used: a fork during an import leaves the child with its lock
import os
import struct
import warnings
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import msgpack

from . import _call, _codec, _core, _errors, _launch, _origin, _session, _split
from ._config import RankInfo, WorkerConfig, setting
from ._future import Asked, Future, Waitable, resolve
from ._register import Broadcast, Dispatch, Scatter, Split, marks_of
from ._resources import ResourceManager

_HEAD = struct.Struct("<IIqIIIIQ")
_PART = struct.Struct("<QQ")
_ACTIVITY_TIMEOUT = 1.0  # seconds for workers to say what they are doing
_STREAM, _NO_COLLECT, _COLLECT_ALL, _CONTROL, _MORE, _NO_WAIT = 1, 2, 4, 8, 16, 32


class _Method:
    """A method of a worker: calling it blocks, .remote gives a future."""

    __slots__ = ("_call", "_name")

    def __init__(self, call: Callable[..., Any], name: str) -> None:
        self._call = call
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._name, args, kwargs, True)

    def remote(self, *args: Any, **kwargs: Any) -> Future:
        future: Future = self._call(self._name, args, kwargs, False)
        return future


class WorkerHandle(_codec.Walked):
    """One worker of a cluster: handle.method(…) blocks, handle.method.remote(…) gives a future."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self._cluster = cluster
        self._rank = rank
        self._plan: _split.Plan | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def cluster(self) -> Cluster:
        return self._cluster

    @property
    def name(self) -> str:
        return self._cluster.rank2worker[self._rank]

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("__"):
            raise AttributeError(name)
        method = _Method(self._call, name)
        self.__dict__[name] = method
        return method

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], blocking: bool) -> Any:
        plan = self._plan
        if plan is None:
            plan = self._plan = self._cluster._plan_ranks([self._rank])
        return self._cluster._short(method, args, kwargs, plan, True, blocking)

    def wire(self) -> tuple[int, Any]:
        fields = msgpack.unpackb(self._cluster._open()._handle)
        fields["rank"] = self._rank
        return _codec.HANDLE, fields

    def __repr__(self) -> str:
        return f"<WorkerHandle {self._cluster.name}[{self._rank}]>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerHandle) and (other._cluster, other._rank) == (self._cluster, self._rank)

    def __hash__(self) -> int:
        return hash((self._cluster, self._rank))


class _Options:
    """A cluster with other settings for the calls that are made through it."""

    def __init__(self, cluster: Cluster, settings: dict[str, Any]) -> None:
        self._cluster = cluster
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("execute_"):
            return lambda *args, **kwargs: getattr(self._cluster, "_" + name)(self._settings, *args, **kwargs)
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, blocking=True, timeout=None, wait=None, **kwargs: self._cluster._dispatch(
            name, args, kwargs, blocking, timeout, _with_wait(self._settings, wait)
        )


class Cluster(_codec.Walked):
    """The running workers of one role.

    Methods that the class registers are methods of the cluster: cluster.train_step(batch, blocking=False, timeout=60).
    """

    name: str
    world_size: int
    master_addr: str
    master_port: int
    worker_config: Any
    _seats: list[dict[str, Any]]
    _detached = False  # of one that was created here: it ends when it is shut down, and in no other way

    def __init__(
        self,
        name: str | None = None,
        worker_cls: type | str | None = None,
        resource_manager: ResourceManager | None = None,
        worker_config: Any = None,
        *,
        worker_args: Sequence[Any] = (),
        worker_kwargs: dict[str, Any] | None = None,
        node: str = "",
    ) -> None:
        session = _session.current()
        if session.is_worker:
            raise _errors.RefusedError("a worker creates no clusters: it holds no lease that could end them; let the driver do it")
        if worker_cls is None:
            raise _errors.InvalidError('Cluster needs worker_cls: a class, or "package.module.Class"')
        config = worker_config if worker_config is not None else WorkerConfig()
        name = name or setting(config, "name", "") or getattr(worker_cls, "__name__", "")
        spec = _launch.spec(session, name, worker_cls, resource_manager, config, tuple(worker_args), worker_kwargs or {}, node)
        try:
            fields = session.core.ask("create", runtime=session.id, spec=spec).get()
        except _errors.Error as err:
            _origin.chain(err, session.pickle)
            raise
        self._setup(session, fields, trusted=True)
        self.worker_config = config
        self._detached = bool(setting(config, "detached", False))

    def _setup(self, session: _session.Session, fields: dict[str, Any] | None, *, trusted: bool, handle: bytes | None = None, known: dict[str, Any] | None = None) -> None:
        self._session = session
        self._core = session.core
        self._trusted = trusted
        self._codec = session.codec(trusted)
        self._plans: dict[Any, _split.Plan] = {}
        self.worker_config = None
        self._warned = False
        self._workers: list[WorkerHandle] | None = None
        self._id = 0
        self._closed = False
        self._interrupted: set[int] = set()  # ranks that may still run a call which was cancelled, or whose wait was interrupted
        self._on_shutdown: Callable[[], None] | None = None
        self._handle = handle or b""
        if fields is not None:
            self._take(fields)
        else:
            assert known is not None
            self._known(known)

    def _take(self, fields: dict[str, Any]) -> None:
        self._id = fields["cluster"]
        handle = fields["handle"]
        self._handle = handle.data if isinstance(handle, msgpack.ExtType) else b""
        self._known({**fields, "role": fields["name"]})
        self._seats = fields["seats"] or []
        self.master_addr, self.master_port = fields["master_addr"], fields["master_port"]

    def _known(self, fields: dict[str, Any]) -> None:
        self.name = fields["role"]
        self.cluster_name = self.name
        self.world_size = fields["world"]
        self._mesh: dict[str, int] = fields["mesh"]
        self._incarnation: str = fields["incarnation"]
        self._modes = {m["name"]: m.get("mode") or "" for m in fields["methods"] or []}
        self._control = {m["name"] for m in fields["methods"] or [] if (m.get("lane") or {}).get("name") == "control"}
        own = self._session.own
        self._own_rank = own[2] if own[:2] == (self.name, self._incarnation) else -1
        self._beside = {m["name"] for m in fields["methods"] or [] if (m.get("lane") or {}).get("name") not in (None, "work")}
        self._seats = []
        self.master_addr, self.master_port = "", 0
        self._dp = {r: self.get_rank_info(r).dp_rank for r in range(self.world_size)}

    def _open(self) -> Cluster:
        """A cluster that came as an argument is opened when it is first used."""
        if not self._id:
            request = msgpack.packb(msgpack.ExtType(_codec.HANDLE, self._handle))
            fields = self._core.ask("open_handle", runtime=self._session.id, handle=msgpack.unpackb(request, ext_hook=msgpack.ExtType)).get()
            self._id = fields["cluster"]
        return self

    @classmethod
    def attach(cls, name: str) -> Cluster:
        """A role that another program created, by its name."""
        session = _session.current()
        fields = session.core.ask("attach", runtime=session.id, name=name).get()
        cluster = cls.__new__(cls)
        cluster._setup(session, fields, trusted=False)
        return cluster

    # What it is.

    @property
    def dp_size(self) -> int:
        return self._mesh["dp"]

    @property
    def tp_size(self) -> int:
        return self._mesh["tp"]

    @property
    def pp_size(self) -> int:
        return self._mesh["pp"]

    @property
    def cp_size(self) -> int:
        return self._mesh["cp"]

    def get_rank_info(self, rank: int) -> RankInfo:
        if not 0 <= rank < self.world_size:
            raise _errors.InvalidError(f"there is no rank {rank}: {self.name} has {self.world_size}")
        return RankInfo.of(rank, self._mesh)

    @property
    def workers(self) -> list[WorkerHandle]:
        if self._workers is None:
            self._workers = [WorkerHandle(self, r) for r in range(self.world_size)]
        return self._workers

    @property
    def rank2worker(self) -> dict[int, str]:
        """The workers' names: actor_train-0-G01."""
        if self._seats:
            return {r: s["name"] for r, s in enumerate(self._seats)}
        return {r: f"{self.name}-{r}" for r in range(self.world_size)}

    @property
    def worker2rank(self) -> dict[str, int]:
        return {name: rank for rank, name in self.rank2worker.items()}

    @property
    def rank2devices(self) -> dict[int, list[tuple[int, int]]]:
        """By rank, its devices: (node rank, index on the node)."""
        return {r: [(s["node_rank"], d) for d in s["devices"] or []] for r, s in enumerate(self._seats)}

    @property
    def worker2nodes(self) -> dict[str, str]:
        return {s["name"]: s["node"] for s in self._seats}

    def info(self) -> list[dict[str, Any]]:
        """What each worker says of itself; it answers while it is busy."""
        return list(self._core.ask("info", cluster=self._open()._id).get())

    def health(self) -> list[dict[str, Any]]:
        """What was last heard of each worker."""
        return list(self._core.ask("health", cluster=self._open()._id).get())

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until every worker is ready: at once if none is being restarted. TimedOutError after the timeout; the role's own error if
        it fails meanwhile."""
        _core.warn_in_serving_loop("`await cluster.await_ready()`")
        self._ready(timeout).now()

    async def await_ready(self, timeout: float | None = None) -> None:
        """wait_ready for event loops."""
        await self._ready(timeout)

    def _ready(self, timeout: float | None) -> Asked:
        if timeout is not None and timeout <= 0:
            raise _errors.InvalidError(f"timeout {timeout} must be positive, or None for none")
        return Asked(self._core, "wait_ready", cluster=self._open()._id, timeout=float(timeout or 0))

    def _activity(self, ranks: Sequence[int]) -> dict[int, str]:
        """By rank, what its worker is doing, in words. The core of a worker answers while Python is busy; a rank that does not answer
        within a second is described as such."""
        settings = {"collect_all": True, "timeout": _ACTIVITY_TIMEOUT}
        plan = self._plan_ranks(list(ranks))
        try:
            told: Any = self._send_bodies("@info", [msgpack.packb([[], None])] * len(plan.parts), plan, blocking=False, settings=settings)._ended_values()
        except _errors.Error:
            told = [None] * len(ranks)
        return {rank: _activity_text(info) for rank, info in zip(plan.collect, told, strict=True)}

    # Calls.

    def __getattr__(self, name: str) -> Any:
        modes = self.__dict__.get("_modes", {})
        if name in modes and not name.startswith("_"):

            def call(*args: Any, blocking: bool = True, timeout: float | None = None, wait: bool = True, **kwargs: Any) -> Any:
                return self._dispatch(name, args, kwargs, blocking, timeout, {} if wait is True else _with_wait({}, wait))

            call.__name__ = name
            self.__dict__[name] = call
            return call
        known = ", ".join(sorted(modes)) or "none"
        raise AttributeError(f"cluster {self.__dict__.get('name', '?')} has no method {name!r}; its workers have {known}")

    def options(
        self, *, timeout: float | None = None, collect: bool = True, pad: bool = False, need: int = 0, collect_all: bool = False,
        mode: Dispatch | str | None = None, ranks: Sequence[int] | None = None, engine: str = "", wait: bool = True,
    ) -> _Options:  # fmt: skip
        """Other settings for calls: cluster.options(collect=False).train_step(batch).

        collect=False: every rank computes and acknowledges alone. pad: rows are repeated until they divide, and trimmed
        again. need=k: k good answers are enough. collect_all: wait for all ranks, and give exceptions in place of values.
        mode, ranks: instead of the method's own. engine: a named object in the workers. wait=False: a call of a rank that is being
        restarted fails at once instead of waiting for it.
        """
        settings = {
            "timeout": timeout, "collect": collect, "pad": pad, "need": need, "collect_all": collect_all,
            "mode": None if mode is None else Dispatch(mode).value, "ranks": None if ranks is None else list(ranks), "engine": engine,
        }  # fmt: skip
        return _Options(self, _with_wait(settings, wait))

    def _dispatch(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], blocking: bool, timeout: float | None, settings: dict[str, Any]) -> Any:
        ranks = settings.get("ranks")
        if ranks is not None:
            return self._send(method, args, kwargs, self._plan_ranks(ranks), blocking=blocking, timeout=timeout, settings=settings)
        mode = settings.get("mode") or self._modes.get(method) or "ONE_TO_ALL"
        if isinstance(mode, Dispatch):
            mode = mode.value
        return self._in_mode(mode, method, args, kwargs, blocking, timeout, settings)

    def _in_mode(self, mode: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], blocking: bool, timeout: float | None, settings: dict[str, Any]) -> Any:
        args = tuple(resolve(a) for a in args)
        kwargs = {n: resolve(v) for n, v in kwargs.items()}
        if not _split.is_cut(mode, args, kwargs):
            args = tuple(_split.plain(a) for a in args)
            kwargs = {n: _split.plain(v) for n, v in kwargs.items()}
            return self._send(method, args, kwargs, self._plan(mode, True), blocking=blocking, timeout=timeout, settings=settings)
        plan = self._plan(mode, False)
        bodies, info = _split.encode_parts(self._codec, plan, mode, args, kwargs, settings.get("pad", False))
        return self._send_bodies(method, bodies, plan, info=info, blocking=blocking, timeout=timeout, settings=settings)

    def _plan(self, mode: str, unsplit: bool) -> _split.Plan:
        plan = self._plans.get((mode, unsplit))
        if plan is None:
            plan = self._make_plan({"mode": mode, "unsplit": unsplit, "mesh": self._mesh})
            self._plans[mode, unsplit] = plan
        return plan

    def _plan_ranks(self, ranks: list[int]) -> _split.Plan:
        key = tuple(ranks)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan({"ranks": ranks})
            self._plans[key] = plan
        return plan

    def _make_plan(self, request: dict[str, Any]) -> _split.Plan:
        if self._closed or self._session.closed:
            raise _errors.ClosedError(f"cluster {self.name} is closed")
        return _split.Plan(json.loads(self._core.plan(self._open()._id, json.dumps(request).encode())))

    def _send(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], plan: _split.Plan, *, one: bool = False, blocking: bool = True,
        timeout: float | None = None, settings: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        if plan.single and timeout is None and not settings:
            return self._short(method, args, kwargs, plan, one, blocking)
        args = tuple([resolve(a) for a in args])
        if kwargs:
            kwargs = {n: resolve(v) for n, v in kwargs.items()}
        body = self._codec.encode([list(args), kwargs or None])
        return self._send_bodies(method, [body] * len(plan.parts), plan, one=one, blocking=blocking, timeout=timeout, settings=settings)

    def _send_bodies(
        self, method: str, bodies: list[Any], plan: _split.Plan, *, one: bool = False, info: Any = None, blocking: bool = True,
        timeout: float | None = None, settings: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        settings = settings or {}
        collect, keep_all, need = settings.get("collect", True), settings.get("collect_all", False), settings.get("need", 0)
        timeout = timeout if timeout is not None else settings.get("timeout")
        if timeout is not None and timeout <= 0:
            raise _errors.InvalidError(f"timeout {timeout} must be positive, or None for none")
        flags = (
            (0 if blocking or (plan.single and len(plan.parts[0][1]) == 1) else _STREAM)
            | (0 if collect else _NO_COLLECT)
            | (_COLLECT_ALL if keep_all else 0)
            | (_CONTROL if method in self._control or method == "@info" else 0)
            | (0 if blocking else _MORE)
            | (0 if settings.get("wait", True) else _NO_WAIT)
        )
        future = Future(self._core, (self, method), plan, self._codec, one)
        if self._own_rank >= 0:
            self._mind_own(future, method, plan, blocking)
        future._collects, future._keep_all, future._info = collect, keep_all, info
        name, engine = _name("method", method), _name("engine", settings.get("engine", ""))
        head = _HEAD.pack(flags, len(bodies), 0 if timeout is None else int(timeout * 1e6) + 1, plan.id, need, len(name), len(engine), 0)
        self._start(future, self._blob([head, name, engine], bodies))
        return self._finish(future, blocking)

    def _start(self, future: Future, blob: bytes) -> None:
        core = self._core
        if core._pid != os.getpid():
            core.check()
        token = future._token = next(core._tokens)
        core._pending[token] = future
        status = core.lib.troupe_call(token, self._id, blob, len(blob))
        if status < 0:
            del core._pending[token]
            raise core.fail(status)

    def _finish(self, future: Future, blocking: bool) -> Any:
        if not blocking:
            return future
        try:
            if not future._done:
                if self._interrupted:
                    future._wait(None)
                else:
                    self._core.idle(future, get_ident())
            value = future._get()
            if future._where[1] == "initialize" and self._learns_mesh():
                self.update_mesh()
            return value
        except BaseException:
            if not future._done and self._core._pid == os.getpid():
                future.cancel()
            raise

    def _short(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], plan: _split.Plan, one: bool, blocking: bool) -> Any:
        """A call with the settings that most have: what does not change between two of them is made once."""
        for value in args:
            if isinstance(value, (Waitable, list)):
                args = tuple([resolve(a) for a in args])
                break
        if kwargs:
            kwargs = {n: resolve(v) for n, v in kwargs.items()}
        body = self._codec.encode([list(args), kwargs or None])
        prefix = plan.prefixes.get((method, blocking))
        if prefix is None:
            prefix = plan.prefixes[method, blocking] = self._prefix(method, plan, blocking)
        future = Future(self._core, (self, method), plan, self._codec, one)
        if self._own_rank >= 0:
            self._mind_own(future, method, plan, blocking)
        n = len(body)
        if type(body) is bytes and n <= _core._LARGE:
            self._start(future, prefix + _PART.pack(n, 0) + body)
        else:
            self._start(future, self._blob([prefix], [body]))
        return self._finish(future, blocking)

    def _mind_own(self, future: Future, method: str, plan: _split.Plan, blocking: bool) -> None:
        """A worker that waits for a call to itself waits for ever, if that call waits for the one that is being served."""
        serving = _call.current.get()
        if serving is not None and self._own_rank in plan.called() and _core.running_loop() in _core.serving_loops:
            future._behind_loop = _core.running_loop()
            if blocking:
                future._refuse_own_loop()
            return
        if serving is None or method in self._beside or self._own_rank not in plan.called() or _call.IncomingCall(*serving).method in self._beside:
            return
        future._behind = serving[1]
        if blocking:
            future._refuse_own()

    def _prefix(self, method: str, plan: _split.Plan, blocking: bool) -> bytes:
        flags = (0 if blocking or len(plan.parts[0][1]) == 1 else _STREAM) | (_CONTROL if method in self._control else 0) | (0 if blocking else _MORE)
        name = _name("method", method)
        return _HEAD.pack(flags, 1, 0, plan.id, 0, len(name), 0, 0) + name

    def _blob(self, pieces: list[bytes], bodies: list[Any]) -> bytes:
        inline: list[bytes] = []
        placed: list[int] = []
        try:
            for body in bodies:
                n = len(body)
                if n <= _core._LARGE:
                    pieces.append(_PART.pack(n, 0))
                    inline.append(body if isinstance(body, bytes) else body.join())
                    continue
                placed.append(self._core.place(body))
                pieces.append(_PART.pack(n, placed[-1]))
        except BaseException:
            for address in placed:
                self._core.lib.troupe_release(address)
            raise
        return b"".join(pieces + inline)

    # As existing drivers call it.

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls rank 0 alone."""
        return self._execute_rank_zero_sync({}, method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future:
        """Calls rank 0 alone and returns at once."""
        return self._execute_rank_zero_async({}, method_name, *args, **kwargs)

    execute_rank_zero = execute_rank_zero_async

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls every rank with the same arguments; Scatter([...]) gives each its own."""
        return self._execute_all_sync({}, method_name, *args, **kwargs)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future:
        """Calls every rank and returns at once."""
        return self._execute_all_async({}, method_name, *args, **kwargs)

    execute_all = execute_all_async

    def _execute_rank_zero_sync(self, settings: dict[str, Any], method: str, *args: Any, **kwargs: Any) -> Any:
        return self._send(method, args, kwargs, self._plan("RANK_ZERO", True), settings=settings)

    def _execute_rank_zero_async(self, settings: dict[str, Any], method: str, *args: Any, **kwargs: Any) -> Future:
        future: Future = self._send(method, args, kwargs, self._plan("RANK_ZERO", True), blocking=False, settings=settings)
        return future

    def _execute_all_sync(self, settings: dict[str, Any], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        result: list[Any] = self._all(settings, method, args, kwargs, True)
        return result

    def _execute_all_async(self, settings: dict[str, Any], method: str, *args: Any, **kwargs: Any) -> Future:
        future: Future = self._all(settings, method, args, kwargs, False)
        return future

    def _all(self, settings: dict[str, Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any], blocking: bool) -> Any:
        values = [*args, *kwargs.values()] if kwargs else args
        lists = 0  # that are as long as the world
        for v in values:
            if isinstance(v, (Scatter, Split, Broadcast)):
                return self._all_marked(settings, method, args, kwargs, blocking)
            if isinstance(v, list) and len(v) == self.world_size:
                lists += 1
        if lists and lists == len(values) and self.world_size > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"execute_all on {self.name} gives every rank the whole of each list, though all are as long as the world "
                f"({self.world_size}); troupe.Scatter([...]) gives each rank its element",
                stacklevel=4,
            )
        return self._send(method, args, kwargs, self._plan("ONE_TO_ALL", True), blocking=blocking, settings=settings)

    def _all_marked(self, settings: dict[str, Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any], blocking: bool) -> Any:
        """A call of all ranks where some argument says who gets what of it."""
        if not any(isinstance(v, Scatter) for v in [*args, *kwargs.values()]):
            return self._in_mode("ONE_TO_ALL", method, args, kwargs, blocking, None, settings)
        args = tuple(v if isinstance(v, (Scatter, Broadcast)) else Broadcast(v) for v in args)
        kwargs = {n: v if isinstance(v, (Scatter, Broadcast)) else Broadcast(v) for n, v in kwargs.items()}
        return self._in_mode("ALL_TO_ALL", method, args, kwargs, blocking, None, settings)

    def create_engine(self, name: str, cls: type | str, *args: Any, **kwargs: Any) -> None:
        """Makes another object in every worker, from an import path and arguments; call it with options(engine=name)."""
        request = {"name": name, "class": _launch.class_path(cls), "config": _launch.engine_config(self._codec, cls, args, kwargs)}
        body = msgpack.packb([[request], None])
        self._send_bodies("@create", [body], self._plan("ONE_TO_ALL", True))

    def update_mesh(self) -> None:
        """Asks the workers how they are laid out: an engine may learn its mesh late, and set rank_info in initialize. It is
        asked for by itself when the result of initialize is taken."""
        _core.warn_in_serving_loop("`await cluster.aupdate_mesh()`")
        self._take_mesh(self._ask_mesh(True))

    async def aupdate_mesh(self) -> None:
        """update_mesh for event loops."""
        self._take_mesh(await self._ask_mesh(False))

    def _learns_mesh(self) -> bool:
        return self._trusted and "mesh" in self._modes

    def _ask_mesh(self, blocking: bool) -> Any:
        return self._send("mesh", (), {}, self._make_plan({"mode": "ONE_TO_ALL", "unsplit": True}), blocking=blocking)

    def _take_mesh(self, told: list[dict[str, int]]) -> None:
        if any(mesh != told[0] for mesh in told):
            raise _errors.InvalidError(f"the workers of {self.name} do not agree on their mesh: {told}")
        if told[0] != self._mesh:
            self._mesh = told[0]
            self._plans.clear()
            self._workers = None
            self._dp = {r: self.get_rank_info(r).dp_rank for r in range(self.world_size)}

    # The end.

    def shutdown(self) -> None:
        """Takes the role down, whoever created it. It may be called more than once."""
        if self._closed or self._session.closed:
            return
        self._core.ask("destroy", cluster=self._open()._id).get()
        self._closed = True
        if self._on_shutdown is not None:
            self._on_shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._detached:
            self.shutdown()

    def wire(self) -> tuple[int, Any]:
        return _codec.HANDLE, bytes(self._handle)

    def __repr__(self) -> str:
        mesh = ", ".join(f"{a} {n}" for a, n in self._mesh.items())
        return f"<Cluster {self.name}, {self.world_size} workers ({mesh})>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster) and other._incarnation == self._incarnation and other.name == self.name

    def __hash__(self) -> int:
        return hash((self.name, self._incarnation))


def from_handle(data: bytes, fields: dict[str, Any]) -> Any:
    """A cluster or a worker that came as a value."""
    session = _session.current()
    cluster: Cluster | None = session.clusters.get((fields["role"], fields["incarnation"]))
    if cluster is None:
        cluster = Cluster.__new__(Cluster)
        cluster._setup(session, None, trusted=False, handle=_whole(data, fields), known=fields)
        session.clusters[fields["role"], fields["incarnation"]] = cluster
    return cluster if fields["rank"] < 0 else WorkerHandle(cluster, fields["rank"])


def _whole(data: bytes, fields: dict[str, Any]) -> bytes:
    return data if fields["rank"] < 0 else bytes(msgpack.packb({**fields, "rank": -1}))


_codec.set_handle_decoder(from_handle)


def _activity_text(info: Any) -> str:
    """The description of a worker's state, from what it says of itself."""
    if not isinstance(info, dict):
        return "does not answer"
    running = [c for c in info["calls"] or [] if c["running"] and not c["method"].startswith("@")]
    if not running:
        return str(info["state"]) if info["state"] != "ready" else "idle"
    shown = [f"runs {c['method']!r} for {c['for'] / 1e9:.1f} s{' (cancelled)' if c['cancelled'] else ''}" for c in running[:3]]
    more = f" and {len(running) - 3} more" if len(running) > 3 else ""
    waiting = sum(lane["queued"] for lane in info["lanes"] or [])
    return ", ".join(shown) + more + (f"; {waiting} calls wait" if waiting else "")


def _with_wait(settings: dict[str, Any], wait: bool | None) -> dict[str, Any]:
    """Settings with another wait; None: as they are."""
    if wait is None:
        return settings
    if not isinstance(wait, bool):
        raise _errors.InvalidError(f"wait={wait!r} must be True or False; a method's own argument of that name is given by position")
    return {**settings, "wait": wait}


def _name(what: str, name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise _errors.InvalidError(f"{what} {_errors.plain(name)!r} is no name: it has a lone surrogate") from None


def marks(cls: Any) -> dict[str, dict[str, Any]]:
    return marks_of(cls) if isinstance(cls, type) else {}
