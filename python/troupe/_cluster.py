"""Clusters: a driver's handle to the running workers of one role."""

from __future__ import annotations

import functools

# imported here, not where it is used: a fork during an import would leave the child with a held import lock
import json
import os
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypedDict, TypeVar, overload

import msgpack

from . import (
    _call,
    _check,
    _codec,
    _core,
    _deaths,
    _error_transfer,
    _errors,
    _introspection,
    _launch,
    _members,
    _progress,
    _reference,
    _seam,
    _session,
    _split,
    _trace,
    _traceback,
)
from ._config import RankInfo, WorkerConfig, setting
from ._future import Asked, Future, Waitable, resolve
from ._register import Broadcast, Dispatch, Scatter, Split, marks_of
from ._resources import BundleOf, Reservation, ResourceManager
from ._seam import CallHead, CallPart

if TYPE_CHECKING:
    from typing_extensions import ParamSpec as ParamSpecWithDefault
    from typing_extensions import TypeVar as TypeVarWithDefault

    W = TypeVarWithDefault("W", default=Any)
    P = ParamSpecWithDefault("P", default=...)
    R = TypeVarWithDefault("R", default=Any)
else:
    W, P, R = TypeVar("W"), ParamSpec("P"), TypeVar("R")  # a worker's class; the parameters and result of its method
Q = ParamSpec("Q")
S = TypeVar("S")

_HEAD, _PART = CallHead.layout, CallPart.layout
_opening = threading.Lock()  # held while the number of a received cluster is set
_INSPECT_TIMEOUT = 10.0  # seconds for agents to inspect workers
_ACTIVITY_TIMEOUT = 1.0  # seconds for workers to report what they are doing


class Settings(TypedDict, total=False):
    """Settings of a call; Cluster.options describes them."""

    timeout: float | None
    collect: bool
    pad: bool
    need: int
    collect_all: bool
    mode: Dispatch | str | None
    ranks: Sequence[int] | None
    engine: str
    wait: bool
    copy: bool
    share: bool
    device: bool
    num_returns: int


_SETTINGS = tuple(name for name in Settings.__annotations__ if name != "num_returns")


def _by_reference(
    args: tuple[object, ...], kwargs: Mapping[str, object], share: bool = False
) -> tuple[tuple[object, ...], dict[str, object], list[_reference.Reference]]:
    """Replaces futures and references among the arguments by Argument objects, and returns the references too. The
    workers fetch the values without going through this process."""
    refs: list[Any] = []
    return tuple([_named(a, refs, share) for a in args]), {n: _named(v, refs, share) for n, v in kwargs.items()}, refs


def _named(value: object, refs: list[Any], share: bool) -> object:
    if isinstance(value, Broadcast) and isinstance(value.value, Waitable):
        return Broadcast(_named(value.value, refs, share))
    if not isinstance(value, Waitable):
        return value
    found = value.reference()
    if found is None:
        return value.arrived()
    refs.append(found)
    return _codec.Argument(found, share=share)


class Method(_introspection.PublicNames, Generic[P, R]):
    __slots__ = ("_call", "_name", "_settings")
    __doc__ = _introspection.Documentation(
        "A method of one worker, or of a cluster. Calling it blocks, .remote(…) returns a future, and .options(…) "
        "changes settings of the call.\n\n"
        "All arguments go to the method, whatever their names.",
    )
    __signature__ = _introspection.Signature()
    __wrapped__ = _introspection.Wrapped()

    def __init__(
        self,
        call: Callable[[str, tuple[object, ...], Mapping[str, object], bool, Settings | None], Any],
        name: str,
        settings: Settings | None = None,
    ) -> None:
        self._call = call
        self._name = name
        self._settings = settings

    @property
    def __name__(self) -> str:
        return self._name

    def __get__(self, instance: object, owner: type | None = None) -> Method[P, R]:
        """Makes help() and inspect take a Method for a function, and show its signature."""
        return self

    def _function(self) -> Callable[..., object] | None:
        holder = getattr(self._call, "__self__", None)
        cluster = getattr(holder, "_cluster", holder)
        return _introspection.find_function(getattr(cluster, "_worker_cls", None), self._name)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            value: R = self._call(self._name, args, kwargs, True, self._settings)
            return value
        except _errors.Error as err:
            raise _traceback.cut(err) from err.__cause__

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Starts the call and returns its future immediately; with num_returns, a list of futures."""
        future: Any = self._call(self._name, args, kwargs, False, self._settings)
        count = (self._settings or {}).get("num_returns")
        made: Future[R] = future if count is None else future._elements(count)
        return made

    @overload
    def options(self, *, num_returns: int, **settings: object) -> Any: ...
    @overload
    def options(self, *, num_returns: None = None, **settings: object) -> Method[P, R]: ...
    def options(self, *, num_returns: int | None = None, **settings: object) -> object:
        """Returns the method with other settings, those of Cluster.options. With num_returns=n, .remote returns n
        futures, one for each element of the tuple or list that the method returns."""
        made: Settings = {**(self._settings or {}), **_settings_of(settings)}
        if num_returns is not None:
            made["num_returns"] = _check.integer("num_returns", num_returns, 1)
        return type(self)(self._call, self._name, made)

    def __repr__(self) -> str:
        return f"<method {self._name} of {getattr(self._call, '__self__', '?')!r}>"


class ClusterMethod(Method[P, R]):
    __slots__ = ()
    __doc__ = _introspection.Documentation(
        "A cluster's method as an attribute. The keywords `blocking`, `timeout` and `wait` are settings of the call; "
        'cluster["method"] passes all keywords to the method instead.',
    )

    if not TYPE_CHECKING:  # the keywords cannot be written beside those of a ParamSpec

        def __call__(self, /, *args, blocking=True, timeout=None, wait=None, **kwargs):
            return self._call_with(args, kwargs, blocking, timeout, wait)

    def _call_with(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        blocking: bool,
        timeout: float | None,
        wait: bool | None,
    ) -> object:
        settings = self._settings
        if timeout is not None or wait is not None or blocking is not True:
            self._refuse_ambiguous(timeout=timeout, wait=wait, blocking=None if blocking is True else blocking)
            settings = _with_wait(
                {**(settings or {}), **({} if timeout is None else {"timeout": _check.seconds("timeout", timeout)})},
                wait,
            )
            _check.flag("blocking", blocking)
        if not blocking:
            started: Method[..., Any] = Method(self._call, self._name, settings)
            return started.remote(*args, **kwargs)
        try:
            return self._call(self._name, args, kwargs, True, settings)
        except _errors.Error as err:
            raise _traceback.cut(err) from err.__cause__

    def _refuse_ambiguous(self, **given: object) -> None:
        """Raises InvalidError for a keyword that is both a setting of the call and a parameter of the method."""
        own = getattr(getattr(self._call, "__self__", None), "_own_parameters", {}).get(self._name, ())
        for name in (n for n, value in given.items() if value is not None and n in own):
            raise _errors.InvalidError(
                f"{name}= is a parameter of {self._name} and a setting of the call: give the parameter with "
                f"cluster[{self._name!r}](…, {name}=…) or "
                f"cluster.{self._name}.remote(…, {name}=…), the setting with cluster.options({name}=…) or "
                f"cluster.{self._name}.options({name}=…)"
            )


class Stacks(list[dict[str, Any]]):
    """What workers are doing, a dict for each: rank, node, pid, calls, threads. str() gives a readable text."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__(sorted(found["ranks"] or [], key=lambda one: int(one["rank"])))
        self._text: str = found["text"]

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


class WorkerHandle(_introspection.PublicNames, _codec.Walked, Generic[W]):
    """One worker of a cluster: handle.method(…) blocks, handle.method.remote(…) returns a future."""

    def __init__(self, cluster: Cluster[W], rank: int) -> None:
        self._cluster = cluster
        self._rank = rank
        self._plan: _split.Plan | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def cluster(self) -> Cluster[W]:
        return self._cluster

    @property
    def name(self) -> str:
        return self._cluster.rank2worker[self._rank]

    def __getattr__(self, name: str) -> Method:
        if name.startswith("__"):
            raise AttributeError(name)
        method: Method[..., Any] = Method(self._call, name)
        self.__dict__[name] = method
        return method

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._cluster._method_names()})

    @overload
    def __getitem__(self, method: Callable[Concatenate[W, Q], Awaitable[S]]) -> Method[Q, S]: ...
    @overload
    def __getitem__(self, method: Callable[Concatenate[W, Q], S]) -> Method[Q, S]: ...
    @overload
    def __getitem__(self, method: str) -> Method: ...
    def __getitem__(self, method: str | Callable[..., object]) -> Method:
        """Returns a method by its name, including one whose name is an attribute of every handle, such as `rank`. Given
        as a function of the class, as in handle[Judge.score], a type checker knows its parameters and result."""
        return Method(self._call, method if isinstance(method, str) else method.__name__)

    def _call(
        self,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        blocking: bool,
        settings: Settings | None = None,
    ) -> Any:
        plan = self._plan
        if plan is None:
            plan = self._plan = self._cluster._plan_ranks([self._rank])
        if settings:
            return self._cluster._send(method, args, kwargs, plan, one=True, blocking=blocking, settings=settings)
        return self._cluster._short(method, args, kwargs, plan, True, blocking)

    def _begin(self, method: str, args: Sequence[object], receiver: object) -> None:
        """Starts a call without keyword arguments whose arguments contain no futures, references or device tensors. The
        receiver takes the answer as a Future does."""
        plan, cluster = self._plan, self._cluster
        if plan is None:
            plan = self._plan = cluster._plan_ranks([self._rank])
        cluster._send_short(receiver, method, cluster._codec.encode([args, None]), plan, False)

    def __reduce__(self) -> tuple[object, ...]:
        self._cluster._await_start()
        return _unpickled, (bytes(self._cluster._handle), self._rank)

    def wire(self) -> tuple[int, object]:
        self._cluster._await_start()
        self._cluster._layout()
        fields = msgpack.unpackb(self._cluster._open()._handle)
        fields["rank"] = self._rank
        return _codec.HANDLE, fields

    def __repr__(self) -> str:
        return f"<WorkerHandle {self._cluster.name}[{self._rank}]>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerHandle) and (other._cluster, other._rank) == (self._cluster, self._rank)

    def __hash__(self) -> int:
        return hash((self._cluster, self._rank))


_EXECUTE = tuple(f"execute_{ranks}{how}" for ranks in ("all", "rank_zero") for how in ("", "_sync", "_async"))


class _Options:
    """A cluster with other settings for the calls made through it."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        if name in _EXECUTE:
            return functools.partial(self._cluster._execute, name, self._settings)
        if name.startswith("_"):
            raise AttributeError(name)
        return ClusterMethod(self._cluster._dispatch, name, self._settings)

    def __dir__(self) -> list[str]:
        return sorted([*_EXECUTE, *self._cluster._method_names()])

    def __getitem__(self, name: str) -> Method:
        return Method(self._cluster._dispatch, name, self._settings)


class Cluster(_introspection.PublicNames, _codec.Walked, Generic[W]):
    """The running workers of one role.

    Cluster(name, worker_cls, resource_manager, worker_config) starts the workers and waits until they are ready. The
    registered methods of the worker class become methods of the cluster: cluster.train_step(batch, blocking=False,
    timeout=60). With replace=True, a role of that name in this namespace ends first, whichever program created it. As a
    context manager, a cluster that is not detached shuts down at the end of the block.
    """

    name: str
    master_addr: str
    master_port: int
    worker_config: Any
    _placements: list[dict[str, Any]]
    _detached = False  # for a cluster created here: whether it ends only by an explicit shutdown
    _worker_cls: type | str | None = None  # the class or its import path; None if another process created the role

    def __init__(
        self,
        name: str | None = None,
        worker_cls: type[W] | str | None = None,
        resource_manager: ResourceManager | Reservation | BundleOf | None = None,
        worker_config: object = None,
        *,
        config: object = None,
        worker_args: Sequence[object] = (),
        worker_kwargs: Mapping[str, object] | None = None,
        node: str = "",
        background: bool = False,
        replace: bool = False,
    ) -> None:
        session = _session.current()
        if worker_cls is None:
            raise _errors.InvalidError('Cluster needs worker_cls: a class, or "package.module.Class"')
        if config is not None and worker_config is not None:
            raise _errors.InvalidError("config and worker_config are two names for the same argument: give one of them")
        config = worker_config if worker_config is not None else config if config is not None else WorkerConfig()
        name = name or setting(config, "name", "") or getattr(worker_cls, "__name__", "")
        spec = _launch.spec(
            session, name, worker_cls, resource_manager, config, tuple(worker_args), worker_kwargs or {}, node
        )
        spec["replace"] = _check.flag("replace", replace)
        try:
            fields = session.core.ask(
                _seam.create(runtime=session.id, spec=spec, background=_check.flag("background", background))
            ).get(wait=functools.partial(_progress.wait, session, name))
        except _errors.Error as err:
            if isinstance(err, _errors.ExistsError):
                err.message += "; replace=True ends it first"
            raise _error_transfer.rebuild(_not_started(err), session.codec(True)).with_traceback(None) from None
        self._setup(session, fields)
        self.worker_config = config
        self._worker_cls = worker_cls
        if background:
            self._begin(worker_cls)
        if isinstance(worker_cls, type):
            self._own_parameters.update(_own_parameters(worker_cls))
            _warn_of_hidden_methods(
                worker_cls, Cluster if self.world_size > 1 or marks_of(worker_cls) else WorkerHandle
            )
        self._detached = bool(setting(config, "detached", False))

    def _setup(
        self,
        session: _session.Session,
        fields: dict[str, Any] | None,
        *,
        handle: bytes | None = None,
        known: dict[str, Any] | None = None,
    ) -> None:
        self._session = session
        self._core = session.core
        self._codec = session.codec(True)
        self._plans: dict[Any, _split.Plan] = {}
        self.worker_config = None
        self._warned = False
        self._workers: list[WorkerHandle[W]] | None = None
        self._id = 0
        self._closed = False
        self._own_parameters: dict[
            str, set[str]
        ] = {}  # by method, its parameters whose names are also settings of calls
        # ranks that may still run a call that was cancelled or whose wait was interrupted
        self._interrupted: set[int] = set()
        self._on_shutdown: Callable[[], None] | None = None
        self._start_asked: Asked | None = None  # the background start; None if it is complete or there was none
        self._watch: _deaths.Watch | None = None  # delivers deaths to callbacks
        self._handle = handle or b""
        self._dp: dict[
            int, int
        ] = {}  # by rank, its place among the data-parallel replicas; also of ranks that were removed
        self._reported: dict[str, int] | None = (
            None  # the mesh that the workers report, if it is not the configured one
        )
        if fields is not None:
            self._take(fields)
        else:
            assert known is not None
            self._known(known)

    # Background start.

    @classmethod
    def create(
        cls,
        name: str | None = None,
        worker_cls: type[W] | str | None = None,
        resource_manager: ResourceManager | Reservation | BundleOf | None = None,
        worker_config: Any = None,
        **settings: Any,
    ) -> Cluster[W]:
        """Creates a cluster without waiting for the workers, which start in the background. Calls wait for the start,
        and raise the error if a constructor failed. `await cluster` and `cluster.wait_ready()` wait for the start
        itself."""
        return cls(name, worker_cls, resource_manager, worker_config, background=True, **settings)

    def _begin(self, worker_cls: type | str) -> None:
        """Takes the methods from the class until its workers have reported them."""
        self._start_asked = Asked(self._core, _seam.started(cluster=self._id), codec=self._codec)
        if isinstance(worker_cls, type):
            marks = marks_of(worker_cls)
            methods = [n for n in dir(worker_cls) if not n.startswith("_") and callable(getattr(worker_cls, n, None))]
            self._modes = {n: str((marks.get(n) or {}).get("mode") or "") for n in methods}
            self._replayed = {n for n in methods if (marks.get(n) or {}).get("replay")}
        self._keep_on_device(True)
        del self.master_addr, self.master_port

    def _await_start(self) -> None:
        """Waits for a background start. If the start failed, each call raises its error."""
        if self._start_asked is not None:
            _progress.wait(self._session, self.name, self._start_asked, None)
            self._take_start(self._start_asked.result())

    def _take_start(self, fields: dict[str, Any]) -> None:
        if self._start_asked is not None:
            self._take(fields)
            self._plans.clear()
            self._start_asked = None

    def __await__(self) -> Generator[object, None, Cluster[W]]:
        """Waits for a background start and returns the cluster."""
        if self._start_asked is not None:
            self._take_start((yield from self._start_asked.__await__()))
        return self

    def _take(self, fields: dict[str, Any]) -> None:
        self._id = fields["cluster"]
        handle = fields["handle"]
        self._handle = handle.data if isinstance(handle, msgpack.ExtType) else b""
        self._known({**fields, "role": fields["name"]})
        self._placements = fields["placements"] or []
        self.master_addr, self.master_port = fields["master_addr"], fields["master_port"]

    def _known(self, fields: dict[str, Any]) -> None:
        self.name = fields["role"]
        self.cluster_name = self.name
        self._world: int = fields["world"]
        self._mesh: dict[str, int] = fields["mesh"] if self._reported is None else self._resized(self._reported)
        self._incarnation: str = fields["incarnation"]
        self._modes = {m["name"]: m.get("mode") or "" for m in fields["methods"] or []}
        self._any_method = bool(fields.get("open"))  # the class answers methods that it does not declare
        self._control = {m["name"] for m in fields["methods"] or [] if (m.get("lane") or {}).get("name") == "control"}
        own = self._session.own
        self._own_rank = own[2] if own[:2] == (self.name, self._incarnation) else -1
        self._beside = {
            m["name"] for m in fields["methods"] or [] if (m.get("lane") or {}).get("name") not in (None, "work")
        }
        self._placements = []
        self.master_addr, self.master_port = "", 0
        self._dp.update({r: RankInfo.of(r, self._mesh).dp_rank for r in range(self._world)})
        self._keep_on_device(bool(fields.get("device_tensors")))
        self._replayed = {m["name"] for m in fields["methods"] or [] if m.get("replay")}

    def _keep_on_device(self, accepted: bool) -> None:
        """Makes large tensors of arguments stay on their device, if the workers accept such tensors."""
        self._device_codec = self._codec.on_device() if accepted and self._session.device else self._codec

    def _argument_codec(self, method: str, settings: Mapping[str, object] | None = None) -> _codec.Codec:
        """Returns the codec for the arguments of a call. Arguments that may be replayed to a restarted worker are
        copied, because they outlive device tensors."""
        codec = self._device_codec
        if codec is self._codec or method in self._replayed:
            return self._codec
        if settings and not settings.get("device", True):
            return self._codec
        return codec.on_device(snapshot=False, share=True) if settings and settings.get("share") else codec

    def _open(self) -> Cluster[W]:
        """Opens a cluster that was received as a value, on first use."""
        if not self._id:
            request = msgpack.packb(msgpack.ExtType(_codec.HANDLE, self._handle))
            handle = msgpack.unpackb(request, ext_hook=msgpack.ExtType)
            fields = self._core.ask(_seam.open_handle(runtime=self._session.id, handle=handle)).get()
            with _opening:  # another thread may have opened it meanwhile, and plans belong to one opening
                self._id = self._id or fields["cluster"]
        return self

    @classmethod
    def attach(cls, name: str) -> Cluster:
        """Returns the cluster of a role that another program created, by its name."""
        session = _session.current()
        return cls._of(session, session.core.ask(_seam.attach(runtime=session.id, name=name)).get())

    @classmethod
    def _of(cls, session: _session.Session, fields: dict[str, Any]) -> Cluster:
        """Returns the cluster of a role that the core has described."""
        cluster = cls.__new__(cls)
        cluster._setup(session, fields)
        return cluster

    # Layout and state.

    @property
    def world_size(self) -> int:
        """The number of workers, as far as this process knows. It learns within a second that another process has
        resized the role."""
        here = self._id and self._core._pid == os.getpid()
        if here and self._core.lib.troupe_world(self._id) not in (self._world, _seam.STATUS_UNKNOWN):
            self._learn_size()
        return self._world

    def _learn_size(self) -> None:
        """Takes the layout of a role that has been resized."""
        self._take(self._core.ask(_seam.describe(cluster=self._id)).get())
        self._plans.clear()
        if self._workers is not None:
            known = self._workers[: self._world]
            self._workers = known + [WorkerHandle(self, r) for r in range(len(known), self._world)]

    def _layout(self) -> dict[str, int]:
        """Returns the mesh of the present size."""
        return self._mesh if self.world_size else {}

    def _resized(self, mesh: dict[str, int]) -> dict[str, int]:
        """Returns a mesh that workers report with the data-parallel size of the whole role: workers that were started
        before the role was resized report the earlier one."""
        replica = mesh["tp"] * mesh["cp"] * mesh["pp"]
        if self._world % replica:
            raise _errors.InvalidError(
                f"role {self.name} has {self._world} workers, which is no multiple of the {replica} workers of one "
                "replica "
                "(tp × cp × pp) that they report themselves; scale it to a multiple"
            )
        return {**mesh, "dp": self._world // replica}

    @property
    def dp_size(self) -> int:
        return self._layout()["dp"]

    @property
    def tp_size(self) -> int:
        return self._layout()["tp"]

    @property
    def pp_size(self) -> int:
        return self._layout()["pp"]

    @property
    def cp_size(self) -> int:
        return self._layout()["cp"]

    def get_rank_info(self, rank: int) -> RankInfo:
        if not 0 <= rank < self.world_size:
            raise _errors.InvalidError(f"there is no rank {rank}: {self.name} has {self.world_size}")
        return RankInfo.of(rank, self._mesh)

    @property
    def workers(self) -> list[WorkerHandle[W]]:
        world = self.world_size
        if self._workers is None:
            self._workers = [WorkerHandle(self, r) for r in range(world)]
        return self._workers

    @property
    def rank2worker(self) -> dict[int, str]:
        """The workers' names by rank, such as actor_train-0-G01."""
        self._await_start()
        world = self.world_size
        if self._placements:
            return {r: s["name"] for r, s in enumerate(self._placements)}
        return {r: f"{self.name}-{r}" for r in range(world)}

    @property
    def worker2rank(self) -> dict[str, int]:
        return {name: rank for rank, name in self.rank2worker.items()}

    @property
    def rank2devices(self) -> dict[int, list[tuple[int, int]]]:
        """The devices by rank, as pairs (node rank, index on the node)."""
        self._await_start()
        self._layout()
        return {r: [(s["node_rank"], d) for d in s["devices"] or []] for r, s in enumerate(self._placements)}

    @property
    def worker2nodes(self) -> dict[str, str]:
        self._await_start()
        self._layout()
        return {s["name"]: s["node"] for s in self._placements}

    def info(self) -> list[dict[str, Any]]:
        """Asks every worker for a description of itself. A busy worker answers too."""
        return list(self._core.ask(_seam.info(cluster=self._open()._id)).get())

    def health(self) -> list[dict[str, Any]]:
        """Returns the last known state of each worker."""
        return list(self._core.ask(_seam.health(cluster=self._open()._id)).get())

    def stacks(self, *ranks: int) -> Stacks:
        """Returns what the workers of the given ranks, or of all, are doing: the running methods, since when and with
        which arguments, and the stacks of all threads. Workers answer while they compute, even while native code holds
        the interpreter lock. In print, ranks that do the same appear once."""
        request = _seam.stacks(cluster=self._open()._id, ranks=[_check.integer("rank", r) for r in ranks])
        return Stacks(self._core.ask(request).get(_INSPECT_TIMEOUT))

    def interrupt(self, *ranks: int) -> dict[int, list[str]]:
        """Raises KeyboardInterrupt in the methods that the workers of the given ranks, or of all, are running. Returns
        names of the methods by rank, without ranks that run none. The callers get CancelledError, and the workers
        An empty list means that the worker does not answer; it is interrupted when it next runs Python code. A given
        rank that runs no method raises NotFoundError."""
        request = _seam.interrupt(cluster=self._open()._id, ranks=[_check.integer("rank", r) for r in ranks])
        found = self._core.ask(request).get(_INSPECT_TIMEOUT)
        return {one["rank"]: one["methods"] for one in found}

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until every worker is ready; returns immediately if none is being restarted. Raises TimedOutError after
        timeout seconds, or the role's error if it fails meanwhile."""
        _core.warn_in_serving_loop("`await cluster.await_ready()`")
        if self._start_asked is not None:
            _check.seconds("timeout", timeout)
            deadline = None if timeout is None else time.monotonic() + timeout
            _progress.wait(self._session, self.name, self._start_asked, deadline)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._take_start(self._start_asked.result(left))
        self._ready(timeout).now()

    async def await_ready(self, timeout: float | None = None) -> None:
        """Waits as wait_ready does, in an event loop."""
        if self._start_asked is not None:
            self._take_start(
                await Asked(
                    self._core,
                    _seam.started(cluster=self._id, timeout=_check.seconds("timeout", timeout) or None),
                    codec=self._codec,
                )
            )
        await self._ready(timeout)

    def _ready(self, timeout: float | None) -> Asked:
        timeout = _check.seconds("timeout", timeout) or None
        return Asked(self._core, _seam.wait_ready(cluster=self._open()._id, timeout=timeout))

    def resize(self, replicas: int, *, timeout: float | None = None) -> None:
        """Grows or shrinks the role to so many replicas of tp × pp × cp ranks, while it works: no call fails because of
        it. New ranks are called with the last arguments of methods declared replay=True before they take calls; ranks
        that leave finish their calls first. After timeout seconds a growth is given up with TimedOutError, and the
        calls of leaving ranks get the stop_grace of the role."""
        _core.warn_in_serving_loop("`await cluster.aresize(…)`")
        self._await_start()
        self._asked_size(replicas, timeout).now()
        self._learn_size()

    async def aresize(self, replicas: int, *, timeout: float | None = None) -> None:
        """Resizes as resize does, in an event loop."""
        await self
        await self._asked_size(replicas, timeout)
        self._learn_size()

    def members(self) -> _members.Membership:
        """Returns the epoch of the role, its replicas in order, and the node, process, state and generation of each
        rank."""
        self._await_start()
        return _members.read(self._core.ask(_seam.members(cluster=self._open()._id)).get(_INSPECT_TIMEOUT))

    def changed(self, epoch: int, *, timeout: float | None = None) -> Asked:
        """Returns a future of the first membership with a later epoch, for `await cluster.changed(epoch)` or
        `.result(timeout)`."""
        self._await_start()
        epoch, timeout = _check.integer("epoch", epoch, 0), _check.seconds("timeout", timeout) or None
        request = _seam.changed(cluster=self._open()._id, epoch=epoch, timeout=timeout)
        return Asked(self._core, request, read=_members.read)

    def on_change(self, callback: Callable[[_members.MembershipChange], object]) -> Callable[[], None]:
        """Calls callback(change) with each new membership, on a dedicated thread. Several changes may become one while
        the callback runs. Returns a function that removes the callback."""
        return _members.watch(self, self.members(), callback)

    def replace(self, rank: int, reason: str = "", *, timeout: float | None = None) -> None:
        """Gives a rank another process: it finishes its calls within the stop_grace of the role and is killed; calls
        wait until the next process has the methods declared replay=True. A call that it still runs then raises
        MembershipChanged. Needs the policy restart_rank or restart_role; the budget of restarts does not count it."""
        _core.warn_in_serving_loop("`await cluster.areplace(…)`")
        self._await_start()
        self._asked_process(rank, reason, timeout).now()

    async def areplace(self, rank: int, reason: str = "", *, timeout: float | None = None) -> None:
        """Replaces a rank as replace does, in an event loop."""
        await self
        await self._asked_process(rank, reason, timeout)

    def _asked_process(self, rank: int, reason: str, timeout: float | None) -> Asked:
        rank, timeout = _check.integer("rank", rank), _check.seconds("timeout", timeout) or None
        reason = _check.text("reason", reason)
        request = _seam.replace(cluster=self._open()._id, rank=rank, reason=reason, timeout=timeout)
        return Asked(self._core, request)

    def _asked_size(self, replicas: int, timeout: float | None) -> Asked:
        replicas = _check.integer("replicas", replicas, 1)
        timeout = _check.seconds("timeout", timeout) or None
        return Asked(self._core, _seam.resize(cluster=self._open()._id, replicas=replicas, timeout=timeout))

    def _activity(self, ranks: Sequence[int]) -> dict[int, str]:
        """Describes, by rank, what the workers are doing. A worker's core answers while Python is busy; a rank that
        does not answer within a second is described as such."""
        settings: Settings = {"collect_all": True, "timeout": _ACTIVITY_TIMEOUT}
        plan = self._plan_ranks(ranks)
        try:
            told: Any = self._send_bodies(
                "@info", [msgpack.packb([[], None])] * len(plan.parts), plan, blocking=False, settings=settings
            )._ended_values()
        except _errors.Error:
            told = [None] * len(ranks)
        return {rank: _activity_text(info) for rank, info in zip(plan.collect, told, strict=True)}

    # Calls.

    def __getattr__(self, name: str) -> ClusterMethod:
        modes = self.__dict__.get("_modes", {})
        if name not in modes and not name.startswith("_") and self.__dict__.get("_start_asked") is not None:
            self._await_start()
            found: ClusterMethod[..., Any] = getattr(self, name)
            return found
        if name in modes and not name.startswith("_"):
            method: ClusterMethod[..., Any] = ClusterMethod(self._dispatch, name)
            self.__dict__[name] = method
            return method
        known = ", ".join(sorted(m for m in modes if m.isidentifier())) or "none"
        raise AttributeError(
            f"cluster {self.__dict__.get('name', '?')} has no method {name!r}; its workers have {known}"
        )

    def _check_method(self, what: str, name: str | None) -> None:
        """Raises InvalidError if the workers have no method of a name. The methods of a class that is given by its path
        are unknown until the role has started."""
        if name is None or name in self._modes or self._any_method or not self._modes:
            return
        known = sorted(m for m in self._modes if m.isidentifier())
        raise _errors.InvalidError(
            f"{what}: role {self.name} has no method {name!r}{_check.suggestion(name, known)}; "
            f"its workers have {', '.join(known)}"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._method_names()})

    def _method_names(self) -> list[str]:
        """Returns the methods of the workers that are attributes, without those of the package itself."""
        return [n for n in self._modes if n.isidentifier() and not n.startswith("_") and n != "mesh"]

    @overload
    def __getitem__(self, method: Callable[Concatenate[W, Q], object]) -> Method[Q, Any]: ...
    @overload
    def __getitem__(self, method: str) -> Method: ...
    def __getitem__(self, method: str | Callable[..., object]) -> Method:
        """Returns a method by its name or as a function of the class, in its registered mode. All arguments go to the
        method, including those named `timeout` or `blocking`. A method whose name is an attribute of every cluster,
        such as `health`, is called this way."""
        return Method(self._dispatch, method if isinstance(method, str) else method.__name__)

    def call(self, method_name: str, /, *args: object, **kwargs: object) -> Any:
        """Calls a method by its name, in its registered mode, and waits for the result. All other arguments go to the
        method."""
        return self[method_name](*args, **kwargs)

    def configure(self, config: object) -> None:
        """Calls `configure(config)` in every worker, in order with other calls."""
        self._verb("@configure", config)

    def set_env(self, env: dict[str, str]) -> None:
        """Sets environment variables in every worker process, in order with other calls. If the class has a method
        `set_env(env)`, it is called."""
        for key, value in dict(env).items():
            _check.text("the name of a variable", key)
            _check.text(f"env: the value of {key}", value)
        self._verb("@set_env", dict(env))

    def _verb(self, verb: str, value: object) -> None:
        self._send_to_all(verb, self._session.codec(False).encode([[value], None]))

    def _send_to_all(self, verb: str, body: object) -> None:
        """Sends an encoded request of the core to every rank."""
        try:
            self._send_bodies(verb, [body], self._plan("ONE_TO_ALL", True))
        except _core.Resized:
            self._learn_size()
            self._send_to_all(verb, body)

    def options(
        self,
        *,
        timeout: float | None = None,
        collect: bool = True,
        pad: bool = False,
        need: int = 0,
        collect_all: bool = False,
        mode: Dispatch | str | None = None,
        ranks: Sequence[int] | None = None,
        engine: str = "",
        wait: bool = True,
        copy: bool = False,
        share: bool = False,
        device: bool = True,
    ) -> _Options:
        """Returns the cluster with other settings for calls: cluster.options(collect=False).train_step(batch).

        - timeout: seconds until the call fails with TimedOutError.
        - collect=False: the ranks return no values, only acknowledgements.
        - pad: rows are repeated until they divide evenly, and the result is trimmed again.
        - need=k: k successful answers are enough.
        - collect_all: the call waits for all ranks, and the result has exceptions in place of missing values.
        - mode, ranks: replace the method's registered mode, or choose the ranks.
        - engine: the name of an object in the workers, made by create_engine.
        - wait=False: a call to a rank that is being restarted fails immediately instead of waiting for it.
        - copy=True: large arrays of the result are copied out of shared memory on receipt, which is faster than writing
          to all of their pages later.
        - share=True: device tensors of the arguments and the result are used in place instead of copied. Do not change
          such an argument while a worker uses it.
        - device=False: device tensors travel through host memory.
        """
        settings = {
            "timeout": timeout,
            "collect": collect,
            "pad": pad,
            "need": need,
            "collect_all": collect_all,
            "mode": mode,
            "ranks": ranks,
        }
        return _Options(
            self,
            _settings_of({**settings, "engine": engine, "wait": wait, "copy": copy, "share": share, "device": device}),
        )

    def _dispatch(
        self,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        blocking: bool,
        settings: Settings | None = None,
    ) -> Any:
        settings = settings or {}
        ranks = settings.get("ranks")
        if ranks is not None:
            return self._send(method, args, kwargs, self._plan_ranks(ranks), blocking=blocking, settings=settings)
        mode = settings.get("mode") or self._modes.get(method) or "ONE_TO_ALL"
        if isinstance(mode, Dispatch):
            mode = mode.value
        try:
            return self._in_mode(mode, method, args, kwargs, blocking, settings)
        except _core.Resized:
            self._learn_size()
            return self._dispatch(method, args, kwargs, blocking, settings)

    def _in_mode(
        self,
        mode: str,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        blocking: bool,
        settings: Settings,
    ) -> object:
        if mode == "ALL_TO_ALL" or mode in _split._DP:  # arguments to be split must be in this process
            args = tuple(resolve(a) for a in args)
            kwargs = {n: resolve(v) for n, v in kwargs.items()}
        if not _split.is_cut(mode, args, kwargs):
            args = tuple(_split.plain(a) for a in args)
            kwargs = {n: _split.plain(v) for n, v in kwargs.items()}
            return self._send(method, args, kwargs, self._plan(mode, True), blocking=blocking, settings=settings)
        plan = self._plan(mode, False)
        args, kwargs, refs = _by_reference(args, kwargs, settings.get("share", False))
        bodies, info = _split.encode_parts(
            self._argument_codec(method, settings), plan, mode, args, kwargs, settings.get("pad", False)
        )
        return self._send_bodies(method, bodies, plan, info=info, blocking=blocking, settings=settings, refs=refs)

    def _plan(self, mode: str, unsplit: bool) -> _split.Plan:
        plan = self._plans.get((mode, unsplit))
        if plan is None:
            plan = self._make_plan({"mode": mode, "unsplit": unsplit, "mesh": self._mesh, "world": self._world})
            self._plans[mode, unsplit] = plan
        return plan

    def _plan_ranks(self, ranks: Sequence[int]) -> _split.Plan:
        key = tuple(ranks)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan({"ranks": list(ranks)})
            self._plans[key] = plan
        return plan

    def _make_plan(self, request: Mapping[str, object]) -> _split.Plan:
        if self._closed or self._session.closed:
            raise _errors.ClosedError(f"cluster {self.name} is closed")
        return _split.Plan(json.loads(self._core.plan(self._open()._id, json.dumps(request).encode())))

    def _send(
        self,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        plan: _split.Plan,
        *,
        one: bool = False,
        blocking: bool = True,
        settings: Settings | None = None,
    ) -> object:
        if plan.single and not settings:
            return self._short(method, args, kwargs, plan, one, blocking)
        args, kwargs, refs = _by_reference(args, kwargs, bool(settings and settings.get("share")))
        body = self._argument_codec(method, settings).encode([list(args), kwargs or None])
        return self._send_bodies(
            method, [body] * len(plan.parts), plan, one=one, blocking=blocking, settings=settings, refs=refs
        )

    def _send_bodies(
        self,
        method: str,
        bodies: list[Any],
        plan: _split.Plan,
        *,
        one: bool = False,
        info: object = None,
        blocking: bool = True,
        settings: Settings | None = None,
        refs: list[_reference.Reference] | None = None,
    ) -> Any:
        settings = settings or {}
        collect, keep_all, need = (
            settings.get("collect", True),
            settings.get("collect_all", False),
            settings.get("need", 0),
        )
        timeout = settings.get("timeout")
        flags = (
            (0 if blocking or (plan.single and len(plan.parts[0][1]) == 1) else _seam.CALL_STREAMS)
            | (0 if collect else _seam.CALL_NO_COLLECT)
            | (_seam.CALL_COLLECT_ALL if keep_all else 0)
            | (_seam.CALL_CONTROL if method in self._control or method == "@info" else 0)
            | (0 if blocking else _seam.CALL_MORE | _seam.CALL_KEEP)
            | (0 if settings.get("wait", True) else _seam.CALL_NO_WAIT)
            | (_seam.CALL_ON_DEVICE if self._session.device and settings.get("device", True) else 0)
        )
        future = Future(self._core, (self, method), plan, self._codec, one)
        if self._own_rank >= 0:
            self._mind_own(future, method, plan, blocking)
        future._collects, future._keep_all, future._info = collect, keep_all, info
        future._engine = settings.get("engine", "")
        future._copy, future._share = settings.get("copy", False), settings.get("share", False)
        name, engine = _name("method", method), _name("engine", settings.get("engine", ""))
        future._pins = _codec.take_references()
        names = _reference.names_of(refs) if refs else b""
        inside = _reference.list_of(future._pins) if future._pins and method in self._replayed else b""
        head = _HEAD.pack(
            flags,
            len(bodies),
            0 if timeout is None else int(timeout * 1e6) + 1,
            plan.id,
            need,
            len(name),
            len(engine),
            len(names),
            len(inside),
        )
        self._start(future, self._blob([head, name, engine, names, inside], bodies))
        return self._finish(future, blocking)

    def _start(self, future: Future, blob: bytes) -> None:
        core = self._core
        if core._pid != os.getpid():
            core.check()
        token = next(core._tokens)
        if core._beside and get_ident() in core._beside:
            token |= _seam.SIDE_TOKEN
        future._token = token
        core._pending[token] = future
        blob += _trace.where()
        status = core.lib.troupe_call(token, self._id, blob, len(blob))
        if status < 0:
            del core._pending[token]
            raise core.fail(status)

    def _finish(self, future: Future, blocking: bool) -> object:
        if not blocking:
            return future
        try:
            if not future._done:
                if self._interrupted or self._core._beside:
                    future._wait(None)
                else:
                    self._core.idle(future, get_ident())
            value = future._get()
            if future._where[1] == "initialize" and self._learns_mesh():
                self.update_mesh()
            return value
        except BaseException as err:
            if not future._done and self._core._pid == os.getpid():
                future.cancel()
                future._explain_interrupt(err, "the call was cancelled, and its method may go on")
            raise

    def _short(
        self,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        plan: _split.Plan,
        one: bool,
        blocking: bool,
    ) -> object:
        """Makes a call with default settings; its encoded prefix is cached per plan."""
        eventual = bool(kwargs) or method in self._replayed
        for value in args:
            if isinstance(value, Waitable):
                eventual = True
                break
        if eventual:
            args, kwargs, refs = _by_reference(args, kwargs)
            if refs or method in self._replayed:
                body = self._argument_codec(method).encode([list(args), kwargs or None])
                return self._send_bodies(method, [body], plan, one=one, blocking=blocking, refs=refs)
        body = self._argument_codec(method).encode([list(args), kwargs or None])
        future = Future(self._core, (self, method), plan, self._codec, one)
        self._send_short(future, method, body, plan, blocking)
        return self._finish(future, blocking)

    def _send_short(self, future: Any, method: str, body: Any, plan: _split.Plan, blocking: bool) -> None:
        """Sends an encoded call. Its answers go to the future, or to another receiver of the core."""
        prefix = plan.prefixes.get((method, blocking))
        if prefix is None:
            prefix = plan.prefixes[method, blocking] = self._prefix(method, plan, blocking)
        if self._own_rank >= 0:
            self._mind_own(future, method, plan, blocking)
        if _codec._encoded:
            future._pins = _codec.take_references()
        n = len(body)
        if type(body) is bytes and n <= _seam.LARGE:
            self._start(future, prefix + _PART.pack(n, 0) + body)
        else:
            self._start(future, self._blob([prefix], [body]))

    def _mind_own(self, future: Future, method: str, plan: _split.Plan, blocking: bool) -> None:
        """Marks or refuses a call of a worker to itself that would wait for the call being served, and so never end."""
        serving = _call.current.get()
        if serving is not None and self._own_rank in plan.called() and _core.running_loop() in _core.serving_loops:
            future._behind_loop = _core.running_loop()
            if blocking:
                future._refuse_own_loop()
            return
        if (
            serving is None
            or method in self._beside
            or self._own_rank not in plan.called()
            or _call.IncomingCall(*serving).method in self._beside
        ):
            return
        future._behind = serving[1]
        if blocking:
            future._refuse_own()

    def _prefix(self, method: str, plan: _split.Plan, blocking: bool) -> bytes:
        flags = (
            (0 if blocking or len(plan.parts[0][1]) == 1 else _seam.CALL_STREAMS)
            | (_seam.CALL_CONTROL if method in self._control else 0)
            | (0 if blocking else _seam.CALL_MORE | _seam.CALL_KEEP)
        )
        flags |= _seam.CALL_ON_DEVICE if self._session.device else 0
        name = _name("method", method)
        return _HEAD.pack(flags, 1, 0, plan.id, 0, len(name), 0, 0, 0) + name

    def _blob(self, pieces: list[bytes], bodies: Sequence[bytes | _codec.Walk]) -> bytes:
        inline: list[bytes] = []
        placed: list[int] = []
        try:
            for body in bodies:
                n = len(body)
                if n <= _seam.LARGE:
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

    # The call interface of existing drivers.

    def execute_rank_zero_sync(self, method_name: str, *args: object, **kwargs: object) -> Any:
        """Calls rank 0 and waits for its result."""
        return self._everywhere("RANK_ZERO", method_name, args, kwargs, True, {})

    def execute_rank_zero_async(self, method_name: str, *args: object, **kwargs: object) -> Future:
        """Calls rank 0 and returns a future immediately."""
        future: Future = self._everywhere("RANK_ZERO", method_name, args, kwargs, False, {})
        return future

    execute_rank_zero = execute_rank_zero_async

    def execute_all_sync(self, method_name: str, *args: object, **kwargs: object) -> list[Any]:
        """Calls every rank with the same arguments and waits for the results. Scatter([...]) gives each rank its own
        element."""
        result: list[Any] = self._all({}, method_name, args, kwargs, True)
        return result

    def execute_all_async(self, method_name: str, *args: object, **kwargs: object) -> Future:
        """Calls every rank and returns a future immediately."""
        future: Future = self._all({}, method_name, args, kwargs, False)
        return future

    execute_all = execute_all_async

    def _execute(self, name: str, settings: Settings, method: str, /, *args: object, **kwargs: object) -> Any:
        """Makes the call of an execute_… method with other settings."""
        blocking = name.endswith("_sync")
        if name.startswith("execute_all"):
            return self._all(settings, method, args, kwargs, blocking)
        return self._everywhere("RANK_ZERO", method, args, kwargs, blocking, settings)

    def _all(
        self,
        settings: Settings,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        blocking: bool,
    ) -> Any:
        values = [*args, *kwargs.values()] if kwargs else args
        lists = 0  # number of lists with one element per rank
        for v in values:
            if isinstance(v, (Scatter, Split, Broadcast)):
                return self._all_marked(settings, method, args, kwargs, blocking)
            if isinstance(v, list) and len(v) == self._world:
                lists += 1
        if lists and lists == len(values) and self._world > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"execute_all on {self.name} gives every rank the whole of each list, though all are as long as the "
                "world "
                f"({self.world_size}); troupe.Scatter([...]) gives each rank its element",
                stacklevel=_traceback.user_stacklevel(),
            )
        return self._everywhere("ONE_TO_ALL", method, args, kwargs, blocking, settings)

    def _everywhere(
        self,
        mode: str,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        blocking: bool,
        settings: Settings,
    ) -> Any:
        """Calls ranks with the same arguments."""
        try:
            return self._send(method, args, kwargs, self._plan(mode, True), blocking=blocking, settings=settings)
        except _core.Resized:
            self._learn_size()
            return self._everywhere(mode, method, args, kwargs, blocking, settings)

    def _all_marked(
        self,
        settings: Settings,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        blocking: bool,
    ) -> Any:
        """Calls all ranks when an argument is marked with Scatter, Split or Broadcast."""
        if not any(isinstance(v, Scatter) for v in [*args, *kwargs.values()]):
            return self._dispatch(method, args, kwargs, blocking, {**settings, "mode": "ONE_TO_ALL"})
        args = tuple(v if isinstance(v, (Scatter, Broadcast)) else Broadcast(v) for v in args)
        kwargs = {n: v if isinstance(v, (Scatter, Broadcast)) else Broadcast(v) for n, v in kwargs.items()}
        return self._dispatch(method, args, kwargs, blocking, {**settings, "mode": "ALL_TO_ALL"})

    def create_engine(self, name: str, cls: type | str, *args: object, **kwargs: object) -> None:
        """Creates another object in every worker, from a class or its import path and constructor arguments. Call it
        with options(engine=name)."""
        request = {
            "name": name,
            "class": _launch.class_path(cls),
            "config": _launch.engine_config(self._codec, cls, args, kwargs),
        }
        self._send_to_all("@create", msgpack.packb([[request], None]))

    def update_mesh(self) -> None:
        """Asks the workers for their mesh. An engine may learn its mesh late and set rank_info in initialize; taking
        the result of initialize therefore calls this automatically."""
        _core.warn_in_serving_loop("`await cluster.aupdate_mesh()`")
        self._take_mesh(self._ask_mesh(True))

    async def aupdate_mesh(self) -> None:
        """Updates the mesh as update_mesh does, in an event loop."""
        self._take_mesh(await self._ask_mesh(False))

    def _learns_mesh(self) -> bool:
        return "mesh" in self._modes

    def _ask_mesh(self, blocking: bool) -> Any:
        return self._everywhere("ONE_TO_ALL", "mesh", (), {}, blocking, {})

    def _take_mesh(self, told: list[dict[str, int]]) -> None:
        meshes = [self._resized(mesh) for mesh in told]
        if any(mesh != meshes[0] for mesh in meshes):
            raise _errors.InvalidError(f"the workers of {self.name} do not agree on their mesh: {told}")
        if meshes[0] != self._mesh:
            self._reported = self._mesh = meshes[0]
            self._plans.clear()
            self._workers = None
            self._dp = {r: RankInfo.of(r, self._mesh).dp_rank for r in range(self._world)}

    # Shutdown.

    def shutdown(self) -> None:
        """Destroys the role, even if another driver created it. Repeated calls have no effect."""
        self._end(_seam.destroy)

    def _end(self, how: Callable[..., _seam.Request]) -> None:
        if self._closed or self._session.closed:
            return
        self._core.ask(how(cluster=self._open()._id)).get()
        self._closed = True
        if self._on_shutdown is not None:
            self._on_shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._detached:
            self.shutdown()

    # Deaths.

    def on_death(self, callback: Callable[[_deaths.Death], None]) -> Callable[[], None]:
        """Calls callback(death) whenever a worker dies, and when the role ends. Callbacks run in order on a dedicated
        thread. Returns a function that removes the callback."""
        if self._watch is None:
            self._watch = _deaths.Watch(self)
        return self._watch.add(callback)

    def died(self) -> Asked:
        """Returns a future of the next death, for `await cluster.died()` or `.result(timeout)`. If the role has ended,
        the future gives the Death of the whole role."""
        return _deaths.next_death(self)

    def __reduce__(self) -> tuple[object, ...]:
        self._await_start()
        self._layout()
        return _unpickled, (bytes(self._handle), -1)

    def wire(self) -> tuple[int, object]:
        self._await_start()
        self._layout()
        return _codec.HANDLE, bytes(self._handle)

    def __repr__(self) -> str:
        mesh = ", ".join(f"{a} {n}" for a, n in self._layout().items())
        return f"<Cluster {self.name}, {self._world} workers ({mesh})>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster) and other._incarnation == self._incarnation and other.name == self.name

    def __hash__(self) -> int:
        return hash((self.name, self._incarnation))


def from_handle(data: bytes, fields: dict[str, Any]) -> Any:
    """Returns the cluster or the worker of a received handle."""
    session = _session.current()
    cluster: Cluster | None = session.clusters.get((fields["role"], fields["incarnation"]))
    if cluster is None:
        cluster = Cluster.__new__(Cluster)
        cluster._setup(session, None, handle=_whole(data, fields), known=fields)
        session.clusters[fields["role"], fields["incarnation"]] = cluster
    elif (
        not cluster._id and fields["world"] != cluster._world
    ):  # the core, which knows the size, has not been asked yet
        cluster._handle = _whole(data, fields)
        cluster._known(fields)
    return cluster if fields["rank"] < 0 else WorkerHandle(cluster, fields["rank"])


def _unpickled(data: bytes, rank: int) -> Any:
    """Returns the cluster or the worker of a pickled handle."""
    return from_handle(data, {**msgpack.unpackb(data, strict_map_key=False), "rank": rank})


def _whole(data: bytes, fields: dict[str, Any]) -> bytes:
    return data if fields["rank"] < 0 else bytes(msgpack.packb({**fields, "rank": -1}))


_codec.set_handle_decoder(from_handle)


def _not_started(err: _errors.Error) -> _errors.Error:
    """Turns the error of a class that raised while it was imported or constructed into an ApplicationError: the worker
    was not lost."""
    if err.code != "worker_lost" or "type" not in err.details or "exit_code" in err.details or "signal" in err.details:
        return err
    return _errors._rebuild(_errors.ApplicationError, err.message, err.__dict__)


def _activity_text(info: object) -> str:
    """Describes a worker's state, from its own report."""
    if not isinstance(info, dict):
        return "does not answer"
    running = [c for c in info["calls"] or [] if c["running"] and not c["method"].startswith("@")]
    if not running:
        return str(info["state"]) if info["state"] != "ready" else "idle"
    shown = [
        f"runs {c['method']!r} for {c['for'] / 1e9:.1f} s{' (cancelled)' if c['cancelled'] else ''}"
        for c in running[:3]
    ]
    more = f" and {len(running) - 3} more" if len(running) > 3 else ""
    waiting = sum(lane["queued"] for lane in info["lanes"] or [])
    return ", ".join(shown) + more + (f"; {waiting} calls wait" if waiting else "")


def _with_wait(settings: Settings, wait: bool | None) -> Settings:
    """Returns the settings with another value of wait; None leaves them unchanged."""
    if wait is None:
        return settings
    return {**settings, "wait": _check.flag("wait", wait)}


def _settings_of(given: Mapping[str, Any]) -> Settings:
    """Checks settings of calls and returns them normalized."""
    for name in given:
        if name not in _SETTINGS:
            raise _errors.InvalidError(
                f"there is no option {name!r}{_check.suggestion(name, _SETTINGS)}; there are {', '.join(_SETTINGS)}, "
                "num_returns"
            )
    made: Any = dict(given)
    if "timeout" in made:
        made["timeout"] = _check.seconds("timeout", made["timeout"])
    for name in ("collect", "pad", "collect_all", "wait", "copy", "share", "device"):
        if name in made:
            _check.flag(name, made[name])
    if "need" in made:
        made["need"] = _check.integer("need", made["need"])
    if made.get("mode") is not None:
        try:
            made["mode"] = Dispatch(made["mode"]).value
        except ValueError:
            raise _errors.InvalidError(
                f"there is no dispatch mode {made['mode']!r}; there are {', '.join(m.value for m in Dispatch)}"
            ) from None
    if made.get("ranks") is not None:
        made["ranks"] = [_check.integer("ranks", r) for r in made["ranks"]]
    if "engine" in made:
        _check.text("engine", made["engine"])
    settings: Settings = made
    return settings


def _own_parameters(cls: type) -> dict[str, set[str]]:
    """Returns, by method of a class, the parameters whose names are also keywords of a cluster's methods."""
    found = {}
    for name in dir(cls):
        code = getattr(inspect_unwrap(getattr(cls, name, None)), "__code__", None) if not name.startswith("_") else None
        if code is not None:
            shared = {"blocking", "timeout", "wait"} & set(
                code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            )
            if shared:
                found[name] = shared
    return found


def inspect_unwrap(function: object) -> object:
    """Returns the function inside up to ten decorators that keep it as __wrapped__."""
    for _ in range(10):
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return function


def _warn_of_hidden_methods(cls: type, holder: type) -> None:
    """Warns about methods of a class that attributes of every cluster or handle hide, and says how to call them."""
    base = {name for c in cls.__mro__ if c.__module__.startswith("troupe.") for name in c.__dict__}
    hidden = [
        n
        for n in dir(cls)
        if not n.startswith("_") and n not in base and callable(getattr(cls, n, None)) and hasattr(holder, n)
    ]
    if hidden:
        what = "cluster" if holder is Cluster else "handle"
        warnings.warn(
            f"{cls.__qualname__} has methods named as attributes of every {what}: {', '.join(hidden)}; "
            f"{what}[{hidden[0]!r}](…) calls the worker's, {what}.{hidden[0]} is the {what}'s own",
            stacklevel=_traceback.user_stacklevel(),
        )


def _name(what: str, name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise _errors.InvalidError(f"{what} {_errors.plain(name)!r} is no name: it has a lone surrogate") from None


def marks(cls: object) -> dict[str, dict[str, object]]:
    return marks_of(cls) if isinstance(cls, type) else {}
