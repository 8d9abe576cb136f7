"""Actor classes and actor handles."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import cloudpickle

from .. import _core, _errors, _seam
from .._cluster import WorkerHandle
from .._future import Future, Waitable
from . import (
    _context,
    _forming,
    _generators,
    _host,
    _infeasible,
    _objects,
    _options,
    _peers,
    _serialize,
    _state,
    exceptions,
)
from ._ids import ActorID
from ._objects import ERROR, LENT, PENDING, PLAIN, SHARED, VALUE, Entry, ObjectRef
from ._serialize import NONE, Frame
from .util.placement_group import check_fits

_STATES = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING", "DEAD")  # in Ray's order
_BUILTIN = ("__init__", "__ray_ready__", "__ray_call__", "__ray_terminate__")
_ASYNC_LIMIT = 1000  # concurrent calls of an async actor without max_concurrency
_UNLIMITED = 1 << 30  # number of arguments that a method with *args accepts


class ActorClassInheritanceException(TypeError):
    """Raised when code subclasses a decorated class."""


def method(*args: object, **kwargs: Any) -> Any:
    """Returns a decorator that sets options of a method: @ray.method(num_returns=2, concurrency_group="io")."""
    if args or not kwargs:
        raise ValueError(
            "The @ray.method decorator must be applied using at least one of the arguments 'num_returns', "
            "'concurrency_group', …"
        )
    _options.check_method(kwargs)

    def mark(function: Any) -> Any:
        if "num_returns" in kwargs:
            function.__ray_num_returns__ = kwargs["num_returns"]
        if kwargs.get("_generator_backpressure_num_objects") is not None:
            function.__ray_generator_backpressure_num_objects__ = kwargs["_generator_backpressure_num_objects"]
        if "concurrency_group" in kwargs:
            function.__ray_concurrency_group__ = kwargs["concurrency_group"]
        if kwargs.get("max_task_retries") is not None:
            function.__ray_max_task_retries__ = kwargs["max_task_retries"]
        if "retry_exceptions" in kwargs:
            function.__ray_retry_exceptions__ = kwargs["retry_exceptions"]
        return function

    return mark


class Metadata:
    """The __ray_metadata__ of a decorated class. Method information is computed on first use, because unpickling a
    class that refers to itself decorates it before the class is complete."""

    def __init__(self, cls: type) -> None:
        self.modified_class = cls
        self.class_name = cls.__name__
        self.class_id = os.urandom(28)
        self.pickled: bytes | None = None

    @functools.cached_property
    def methods(self) -> dict[str, tuple[Any, ...]]:
        """Returns, by method name: number of results, concurrency group, retries (None: the actor's default),
        exceptions to retry, limit of a generator."""
        return {
            name: (
                _options.returns_of(getattr(function, "__ray_num_returns__", None), function),
                getattr(function, "__ray_concurrency_group__", None) or "",
                getattr(function, "__ray_max_task_retries__", None),
                _options.exceptions_to_wire(getattr(function, "__ray_retry_exceptions__", None)),
                getattr(function, "__ray_generator_backpressure_num_objects__", None),
            )
            for name, function in _methods(self.modified_class).items()
        }

    @functools.cached_property
    def signatures(self) -> dict[str, inspect.Signature]:
        found = {}
        for name, function in _methods(self.modified_class).items():
            try:
                signature = inspect.signature(function)
            except (TypeError, ValueError):
                continue
            parameters = list(signature.parameters.values())
            if parameters and not isinstance(
                inspect.getattr_static(self.modified_class, name), (staticmethod, classmethod)
            ):
                parameters = (
                    parameters[1:] if parameters[0].kind not in (inspect.Parameter.VAR_POSITIONAL,) else parameters
                )
            found[name] = signature.replace(parameters=parameters)
        return found

    @functools.cached_property
    def parameters(self) -> dict[str, list[list[object]]]:
        return {name: _parameters_of(signature) for name, signature in self.signatures.items()}

    @functools.cached_property
    def is_async(self) -> bool:
        return any(_is_async(f) for f in _methods(self.modified_class).values())


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _methods(cls: type) -> dict[str, Any]:
    return dict(inspect.getmembers(cls, lambda f: inspect.isfunction(f) or inspect.ismethod(f)))


class ActorClass:
    """A decorated class; .remote(…) creates an actor. Attribute lookups fall through to the original class."""

    __ray_metadata__: Metadata
    _default_options: dict[str, Any]

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ActorClassInheritanceException(_INHERITANCE)

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        raise ActorClassInheritanceException(_INHERITANCE)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        name = self.__ray_metadata__.class_name
        raise TypeError(
            f"Actors cannot be instantiated directly. Instead of '{name}()', use '{name}.remote()'. The class cannot "
            "be instantiated directly."
        )

    def __getattr__(self, name: str) -> Any:
        metadata = self.__dict__.get("__ray_metadata__")
        if metadata is None:
            raise AttributeError(name)
        if name == "__ray_actor_class__":
            return metadata.modified_class
        return getattr(metadata.modified_class, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self.__ray_metadata__.modified_class), "remote", "options", "bind"})

    def __reduce__(self) -> tuple[object, ...]:
        return _actor_class_again, (self.__ray_metadata__.modified_class, self._default_options)

    def remote(self, *args: object, **kwargs: object) -> ActorHandle:
        """Creates an actor and returns its handle without waiting for the actor to start."""
        return _create(self.__ray_metadata__, args, kwargs, self._default_options)

    def _remote(
        self, args: Sequence[object] | None = None, kwargs: Mapping[str, object] | None = None, **options: object
    ) -> ActorHandle:
        _options.check_actor(options)
        return _create(self.__ray_metadata__, tuple(args or ()), kwargs or {}, _with(self._default_options, options))

    def options(self, **options: object) -> ActorOptions:
        """Returns this class with some options overridden."""
        _options.check_actor(options)
        return ActorOptions(self.__ray_metadata__, _with(self._default_options, options))

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the node of an actor that the execution of a graph creates."""
        from .dag._nodes import ClassNode

        return ClassNode(self.remote, self.__ray_metadata__.modified_class, args, kwargs)


_INHERITANCE = (
    "Attempted to define subclass of an actor class. Inheriting from actor classes is not currently supported. You "
    "can inherit from a non-actor base class "
    "and make the derived class an actor class (with @ray.remote)."
)


def _with(default: Mapping[str, object], options: Mapping[str, object]) -> dict[str, object]:
    merged = {**default, **options}
    if "runtime_env" in options and default.get("runtime_env"):
        merged["runtime_env"] = options["runtime_env"]
    return merged


class ActorOptions:
    """The result of ActorClass.options."""

    def __init__(self, metadata: Metadata, options: dict[str, Any]) -> None:
        self._metadata, self._options = metadata, options

    def remote(self, *args: object, **kwargs: object) -> ActorHandle:
        return _create(self._metadata, args, kwargs, self._options)

    def options(self, **options: object) -> ActorOptions:
        _options.check_actor(options)
        return ActorOptions(self._metadata, _with(self._options, options))

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the node of an actor that the execution of a graph creates."""
        from .dag._nodes import ClassNode

        return ClassNode(self.remote, self._metadata.modified_class, args, kwargs)


def make_actor(cls: type, options: Mapping[str, object]) -> ActorClass:
    """Turns a class into an actor class."""
    _options.check_actor(options)
    if isinstance(cls, ActorClass):
        raise TypeError("The class is decorated already.")
    made_type = type(f"ActorClass({cls.__name__})", (ActorClass,), {"__module__": cls.__module__})
    made: ActorClass = object.__new__(made_type)
    made.__dict__["__ray_metadata__"] = Metadata(cls)
    made.__dict__["_default_options"] = dict(options)
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        made.__dict__[name] = getattr(cls, name, None)
    return made


def _actor_class_again(cls: type, options: Mapping[str, object]) -> ActorClass:
    return make_actor(cls, options)


# Creation.


def module_of(value: object) -> str:
    """Returns the module of a class or function, as its worker sees it: for that of the main program, the name of its
    file."""
    name: str = getattr(value, "__module__", None) or ""
    if name != "__main__":
        return name
    file = getattr(sys.modules["__main__"], "__file__", None)
    return (inspect.getmodulename(file) if file else None) or name


def are_plain(args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Returns whether the arguments are positional and of plain types."""
    return not kwargs and _serialize.PLAIN_TYPES.issuperset(map(type, args))


def split_arguments(
    title: str, args: tuple[object, ...], kwargs: Mapping[str, object], copy: bool = True
) -> tuple[Frame, object, list[ObjectRef]]:
    """Returns the arguments of a call of title as a frame with a slot for each reference, the frame's contents, and the
    references. Without copy, the frame refers to the caller's arrays and is valid only until the caller may change
    them, that is, until the remote call returns."""
    if are_plain(args, kwargs):
        return pickle.dumps((args, kwargs), 5), _serialize.EMPTY, NONE
    refs: list[ObjectRef] = NONE
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, ObjectRef):
            refs = []
            args, kwargs = _with_slots(args, kwargs, refs)
            break
    try:
        frame, contents = _serialize.dumps((args, kwargs))
    except TypeError as err:
        from .util.check_serialize import argument_error

        raise argument_error(title, args, kwargs, err) from None
    if copy:
        _serialize.copy_buffers(frame)
    return frame, contents, refs


def _with_slots(
    args: tuple[object, ...], kwargs: Mapping[str, object], refs: list[ObjectRef]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Replaces each reference by a slot and appends it to refs."""

    def slot(value: object) -> object:
        if not isinstance(value, ObjectRef):
            return value
        refs.append(value)
        return _host.Slot(len(refs) - 1)

    return tuple(slot(a) for a in args), {k: slot(v) for k, v in kwargs.items()}


def dependencies(refs: list[ObjectRef], counted: bool = False) -> list[object]:
    """Returns the references as a call carries them, each with its value if this process has it. The caller keeps them
    until the call is over; counted: the receiver may use them for longer."""
    return [_dependency(r, counted) for r in refs]


def _dependency(ref: ObjectRef, counted: bool) -> list[object]:
    entry = ref._entry
    if not entry._done:
        return [PENDING, ref._wire()]
    found, kept = entry.lend()
    if found is None:
        entry.handled()
        return [entry.kind, entry.body]
    return [SHARED if kept else LENT, [*ref._wire(), found if counted else found.uncounted()]]


def check_arguments(
    signature: inspect.Signature | None, title: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    if signature is not None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as err:
            raise TypeError(f"{title}: {err}") from None


def check_bound(
    signature: inspect.Signature | None, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Checks the arguments of bind."""
    if signature is not None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as err:
            raise TypeError(
                f"{err}. The function `{method}` has a signature `{signature}`, but the given arguments to `bind` "
                f"doesn't match. args: {args}. kwargs: {kwargs}."
            ) from None


def _kind(metadata: Metadata, options: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """Returns the actor's execution kind ("sync", "threaded", "async") and the limits of its concurrency groups; "" is
    the default group."""
    limit = options.get("max_concurrency")
    given = options.get("concurrency_groups") or {}
    if isinstance(given, list):
        given = {g["name"]: g["max_concurrency"] for g in given}
    for name, count in given.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise ValueError(f"concurrency_groups[{name!r}] must be an int")
    for name, (_, group, *_) in metadata.methods.items():
        if group and group not in given and group != "_ray_system":
            raise ValueError(
                f"Method {name} is in the concurrency group {group!r}, which is not defined; there are {sorted(given)}"
            )
    system = {"_ray_system": 4}
    if metadata.is_async:
        return "async", {"": limit or _ASYNC_LIMIT, **given, **system}
    if given or (limit or 1) > 1:
        return "threaded", {"": limit or 1, **given, **system}
    return "sync", system


def _create(
    metadata: Metadata, args: tuple[object, ...], kwargs: Mapping[str, object], options: dict[str, Any]
) -> ActorHandle:
    state = _state.require()
    check_arguments(metadata.signatures.get("__init__"), f"{metadata.class_name}.__init__", args, kwargs)
    kind, groups = _kind(metadata, options)
    namespace = options.get("namespace") or state.namespace
    name = options.get("name")
    detached = options.get("lifetime") == "detached"
    if options.get("get_if_exists"):
        found = _state.control_call("named_actor", namespace, name)
        if found is not None:
            return _weak_handle(found)
    if metadata.pickled is None:
        metadata.pickled = _pickle_class(metadata)
    frame, contents, refs = split_arguments(
        f"{module_of(metadata.modified_class)}.{metadata.class_name}.__init__", args, kwargs
    )
    task = _context.current.get()
    parent = task.placement if task is not None and task.placement else state.placement_group
    strategy = _options.strategy(options, parent)
    check_fits(
        strategy, _options.demand(options, 1.0), metadata.modified_class.__qualname__
    )  # scheduling an actor needs one CPU by default
    actor_id = os.urandom(12).hex() + state.job_id
    retries = options.get("max_task_retries") or 0
    info = HandleInfo(
        actor_id,
        metadata.class_name,
        dict(metadata.methods),
        sorted(groups),
        module_of(metadata.modified_class),
        retries,
        metadata.parameters,
    )
    env = _options.merged(state.runtime_env, _options.environment(options.get("runtime_env")))
    spec = {
        "job": state.job_id,
        "name": name,
        "namespace": namespace,
        "detached": detached,
        "get_if_exists": bool(options.get("get_if_exists")),
        "demand": _options.demand(options, 0.0),
        "strategy": strategy,
        "captures": _options.membership(strategy),
        "env": env,
        "class_name": metadata.class_name,
        "kind": kind,
        "groups": groups,
        "owner": state.process,
        "construct": [metadata.pickled, info.module, frame, dependencies(refs, counted=True)],
        "handle": info.to_wire(),
        "restarts": options.get("max_restarts") or 0,
        "group": _forming.membership(options),
    }
    client = client_of(actor_id)
    client.signatures = metadata.signatures
    client.creating = (contents, refs)
    if any(limit < 1 for limit in groups.values()):
        return _stillborn(
            client, info, "max_concurrency must be greater than 0 for each of the actor's concurrency_groups"
        )
    if name:
        done = _state.control_call("create_actor", actor_id, spec, state.process)
        if done.get("existing"):
            return _weak_handle(done["existing"])
        if done.get("taken"):
            _forming.give_up()
            raise exceptions.ActorAlreadyExistsError(
                f"The name {name} (namespace={namespace}) is already taken. Please use a different name or get the "
                "existing actor using "
                f"ray.get_actor('{name}', namespace='{namespace}')"
            )
    else:
        state.control.ask("create_actor", (actor_id, spec, state.process), client.created)
    _infeasible.note(state)
    hold = Hold(actor_id, state, counted=True)
    client.resolve()
    return ActorHandle(info, hold)


def _pickle_class(metadata: Metadata) -> bytes:
    cls = metadata.modified_class
    try:
        return bytes(cloudpickle.dumps(cls, protocol=5))
    except TypeError:
        from .util.check_serialize import could_not_serialize

        raise could_not_serialize(f"the actor class {module_of(cls)}.{metadata.class_name}", cls) from None


def _stillborn(client: Client, info: HandleInfo, why: str) -> ActorHandle:
    """Returns the handle of an actor that cannot be created. The reason is written to standard error, and every call
    fails with it."""
    _forming.give_up()
    sys.stderr.write(f"ray: the actor {info.class_name} died: {why}\n")
    client._asked = True
    client._died(
        _objects._dump_error(
            exceptions.ActorDiedError(f"The actor died because its options are invalid: {why}", None, info.actor_id)
        ),
        None,
    )
    return ActorHandle(info, None)


class HandleInfo:
    """The description of an actor that its handles carry."""

    __slots__ = ("actor_id", "class_name", "groups", "methods", "module", "parameters", "retries")

    def __init__(
        self,
        actor_id: str,
        class_name: str,
        methods: dict[str, Any],
        groups: list[str],
        module: str,
        retries: int,
        parameters: dict[str, Any],
    ) -> None:
        self.actor_id, self.class_name, self.methods, self.groups, self.module = (
            actor_id,
            class_name,
            methods,
            groups,
            module,
        )
        self.retries = retries  # retries of a call whose method sets none; -1: unlimited
        self.parameters = parameters  # of each method whose signature is known: name, kind, whether it has a default

    def to_wire(self) -> list[object]:
        return [
            self.actor_id,
            self.class_name,
            {k: list(v) for k, v in self.methods.items()},
            self.groups,
            self.module,
            self.retries,
            self.parameters,
        ]

    @classmethod
    def of_wire(cls, wire: Sequence[Any]) -> HandleInfo:
        parameters = wire[6] if len(wire) > 6 else {}  # actors of an earlier version have none
        return cls(wire[0], wire[1], {k: tuple(v) for k, v in wire[2].items()}, wire[3], wire[4], wire[5], parameters)

    def signatures(self) -> dict[str, inspect.Signature]:
        return {name: _signature_of(parameters) for name, parameters in self.parameters.items()}


def _parameters_of(signature: inspect.Signature) -> list[list[object]]:
    return [[p.name, int(p.kind), p.default is not p.empty] for p in signature.parameters.values()]


def _signature_of(parameters: Sequence[Sequence[Any]]) -> inspect.Signature:
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=None if default else empty) for name, kind, default in parameters]
    )


class Hold:
    """A reference of this process to an actor, shared by all its strong handles and pending calls in this process. The
    control service counts it."""

    def __init__(self, actor_id: str, state: _state.State, counted: bool) -> None:
        self.actor_id = actor_id
        _holds[actor_id] = self
        if not counted:
            state.control.notify("handle_taken", actor_id, state.process)
        weakref.finalize(self, _let_go, actor_id, state).atexit = False


def _let_go(actor_id: str, state: _state.State) -> None:
    _objects.later(lambda: state.control.notify("handle_dropped", actor_id, state.process), state.store)


_holds: weakref.WeakValueDictionary[str, Hold] = weakref.WeakValueDictionary()
_clients: dict[str, Client] = {}
_lock = threading.RLock()


def hold_of(actor_id: str) -> Hold:
    with _lock:
        found = _holds.get(actor_id)
        return found if found is not None else Hold(actor_id, _state.require(), counted=False)


def forget_all() -> None:
    """Drops all state of an ended session."""
    with _lock:
        _clients.clear()
        _holds.clear()


def _weak_handle(found: Mapping[str, Any]) -> ActorHandle:
    return ActorHandle(HandleInfo.of_wire(found["handle"]), None)


def handle_of_wire(wire: list[Any]) -> ActorHandle:
    info = HandleInfo.of_wire(wire[0])
    return ActorHandle(info, hold_of(info.actor_id) if wire[1] else None)


_serialize.read_handle = handle_of_wire


class ActorMethod:
    """A method of an actor; .remote(…) calls it. It keeps the actor alive as its handle does, and has no reference to
    the handle, which caches it."""

    __slots__ = ("_call_options", "_hold", "_info", "_name", "_options")

    def __init__(self, info: HandleInfo, hold: Hold | None, name: str, options: dict[str, Any] | None = None) -> None:
        self._info, self._hold, self._name, self._options = info, hold, name, options or {}
        self._call_options: CallOptions | None = None  # of the method with _options; set by the first call

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            f"Actor methods cannot be called directly. Instead of running 'object.{self._name}()', try "
            f"'object.{self._name}.remote()'."
        )

    def remote(self, *args: object, **kwargs: object) -> Any:
        options = self._call_options
        if options is None:
            options = self._call_options = CallOptions(self._info, self._name, self._options)
        return call_actor(self._info, self._hold, self._name, options, args, kwargs)

    def _remote(
        self, args: Sequence[object] | None = None, kwargs: Mapping[str, object] | None = None, **options: object
    ) -> Any:
        method = ActorMethod(self._info, self._hold, self._name, {**self._options, **options}) if options else self
        return method.remote(*(args or ()), **(kwargs or {}))

    def options(self, **options: object) -> ActorMethod:
        _options.check_method(options)
        return ActorMethod(self._info, self._hold, self._name, {**self._options, **options})

    def bind(self, *args: object, **kwargs: object) -> Any:
        """Returns the node of a call in a graph; of a method with several results, a node for each."""
        from .dag._nodes import bind_method

        known = _clients[self._info.actor_id].signatures if self._info.actor_id in _clients else {}
        check_bound((known or self._info.signatures()).get(self._name), self._name, args, kwargs)
        return bind_method(self, CallOptions(self._info, self._name, self._options).returns, args, kwargs)

    @property
    def _handle(self) -> ActorHandle:
        return ActorHandle(self._info, self._hold)

    @property
    def __name__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"ActorMethod({self._handle!r}.{self._name})"

    def __reduce__(self) -> tuple[object, ...]:
        return _method_again, (self._handle, self._name, self._options)


def _method_again(handle: ActorHandle, name: str, options: dict[str, Any]) -> ActorMethod:
    return ActorMethod(handle._info, handle._hold, name, options)


class ActorHandle:
    """A handle of an actor; handle.method.remote(…) calls a method. A weak handle does not keep the actor alive."""

    def __init__(self, info: HandleInfo, hold: Hold | None) -> None:
        self.__dict__["_info"] = info
        self.__dict__["_hold"] = hold
        self.__dict__["_ray_is_cross_language"] = False

    @property
    def _actor_id(self) -> ActorID:
        return ActorID(bytes.fromhex(self._info.actor_id))

    _ray_actor_id = _actor_id

    @property
    def _id(self) -> ActorID:
        return self._actor_id

    def __getattr__(self, name: str) -> Any:
        info = self.__dict__.get("_info")
        if info is None:
            raise AttributeError(name)
        if name in info.methods or name in _BUILTIN:
            method = self.__dict__[name] = ActorMethod(info, self._hold, name)
            return method
        raise AttributeError(f"'{info.class_name}' object has no attribute '{name}'")

    def _get_local_state(self) -> int:
        """Returns the number of the actor's state in _STATES."""
        return _STATES.index(_state.control_call("actor_state", self._info.actor_id))

    def __dir__(self) -> list[str]:
        return sorted({*self._info.methods, *_BUILTIN})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other._info.actor_id == self._info.actor_id

    def __hash__(self) -> int:
        return hash(self._info.actor_id)

    def __repr__(self) -> str:
        return f"Actor({self._info.class_name}, {self._info.actor_id})"

    def _wire(self) -> list[object]:
        return [self._info.to_wire(), self._hold is not None]

    def __reduce__(self) -> tuple[object, ...]:
        _serialize.note_handle(self)
        return handle_of_wire, (self._wire(),)

    def __class_getitem__(cls, item: object) -> type[ActorHandle]:
        return cls


# Calls.


class Answer(Future):
    """The future of an actor call whose answer is not a short value."""

    def __init__(self, call: Pending) -> None:
        worker = call.worker
        cluster = worker._cluster
        super().__init__(cluster._core, (cluster, call.options.method), worker._plan, cluster._codec, True)
        self._token, self._pins = call._token, call._pins
        self.call: Pending | None = call  # None once it has the answer

    def _finish(self) -> None:
        super()._finish()
        call = self.call
        if call is None:
            return
        _objects.when_answered(self, call.answered)
        self.call = None


class CallOptions:
    """The options of calls of a method: those given to the call, then those of the method, then those of the actor."""

    __slots__ = ("are_default", "group", "least", "limit", "method", "most", "name", "retried", "retries", "returns")

    def __init__(self, info: HandleInfo, method: str, given: Mapping[str, Any]) -> None:
        returns, group, retries, retried, limit = info.methods.get(method, (1, "", None, None, None))
        if given.get("num_returns") is not None:
            returns = _options.returns_of(given["num_returns"])
        if given.get("_generator_backpressure_num_objects") is not None:
            limit = given["_generator_backpressure_num_objects"]
        if given.get("concurrency_group") is not None:
            group = given["concurrency_group"]
        if given.get("max_task_retries") is not None:
            retries = given["max_task_retries"]
        if "retry_exceptions" in given:
            retried = _options.exceptions_to_wire(given["retry_exceptions"])
        if group and group not in info.groups:
            raise ValueError(
                f"The concurrency group {group!r} is not defined for the actor {info.class_name}; there are "
                f"{[g for g in info.groups if g]}"
            )
        self.method = method
        self.name: str = given.get("name") or ""
        self.returns: int = returns
        self.limit: int = max(limit or 0, 0)  # objects that a generator is ahead of its consumer; 0: any number
        self.group: str = group
        # a call with retries also waits for a restart instead of failing
        self.retries: int = info.retries if retries is None else retries
        self.retried = retried  # the exceptions that are retried
        self.are_default = not self.name and not group and returns == 1  # whether calls carry none of these options
        self.least, self.most = _arity(
            info.parameters.get(method)
        )  # numbers of positional arguments that need no further check


class Pending:
    """An actor call that has not been sent, or has not been answered."""

    # Common defaults are class attributes because every call pays for creating an instance.
    owns_arguments = False
    number = 0  # sequence number among the calls of this process to the actor
    role = ""  # role of the process that the call was sent to
    worker: Any = None  # the Troupe handle of that process
    retries = 0  # retries left
    contents = _serialize.EMPTY  # the references and handles inside the arguments
    refs: list[ObjectRef] = NONE  # the arguments that are references
    future: Answer | None = None  # receives the answer, unless it is a short value
    _token = 0  # number of the call in the core
    _pins: Any = None  # references inside the arguments, kept alive until the call is over

    def __init__(
        self,
        client: Client,
        id: str,
        options: CallOptions,
        arguments: tuple[Any, Any, list[ObjectRef]],
        entries: list[Entry],
        hold: Hold | None,
    ) -> None:
        """arguments: as of split_arguments, but with the arguments themselves instead of the frame if they are
        plain."""
        # One by one: an assignment of several values would make a tuple.
        self.client = client
        self.id = id
        self.options = options
        self.frame, contents, refs = arguments
        self.entries = entries
        self.hold = hold
        if contents is not _serialize.EMPTY:
            self.contents = contents
        if refs:
            self.refs = refs
        if options.retries:
            self.retries = options.retries

    # Called by the reader of completions.

    def take_references(self, flags: int, rank: int, names: bytes) -> None:
        self._to_future().take_references(flags, rank, names)

    def deliver(self, kind: int, flags: int, rank: int, body: object) -> None:
        """Takes the answer. After an interrupt, it may be delivered again."""
        if kind == _seam.ANSWER and flags == _seam.LAST and self.future is None:
            try:
                kind_of_result, result = self.worker._cluster._codec.decode(body)
            except Exception:
                pass  # decoded again by the future, where errors are handled
            else:
                self.client._take(self, kind_of_result, result, None)
                return
        self._to_future().deliver(kind, flags, rank, body)

    def _to_future(self) -> Answer:
        """Returns the future that receives the answer from now on."""
        if self.future is None:
            self.future = self.worker._cluster._core._pending[self._token] = Answer(self)
        return self.future

    def own_arguments(self) -> None:
        """Copies the arrays in the arguments, which the caller may change from now on. Repeated calls have no
        effect."""
        if not self.owns_arguments:
            _serialize.copy_buffers(self.frame)
        self.owns_arguments = True

    def pickle_arguments(self) -> None:
        """Makes the frame of plain arguments a pickle. Repeated calls have no effect."""
        if type(self.frame) is tuple:
            self.frame = pickle.dumps((self.frame, {}), 5)

    def answered(self, read: Callable[[], tuple[int, Any, Any]]) -> None:
        """Handles the answer, as of when_answered. Called by the thread that reads completions or by the one that sent
        the call."""
        self.client._answered(self, read)

    def await_answer(self, future: Waitable) -> None:
        """Attaches the future of a call that was sent as part of a group call."""
        _objects.when_answered(future, self.answered)

    def cancel(self, force: bool, recursive: bool) -> None:
        self.client.cancel(self, force, recursive)

    def waits_for(self, process: str) -> Entry | None:
        """Returns a dependency owned by this process that is not done yet."""
        for ref in self.refs:
            entry: Entry = ref._entry
            if not entry._done and entry.owner == process:
                return entry
        return None

    def fail(self, frame: Frame) -> None:
        _objects.fail(self.entries, frame)

    def fail_with(self, error: BaseException) -> None:
        self.fail(_objects._dump_error(error))


class Client:
    """The calls of this process to one actor. They are sent in order, each once its dependencies are done."""

    def __init__(self, actor_id: str) -> None:
        self.actor_id = actor_id
        self.signatures: dict[str, Any] | None = None  # of the methods; None before the first call
        self.creating: Any = None  # keeps the constructor's arguments alive until the actor has started
        self._lock = threading.RLock()
        self._queues: dict[str, deque[Pending]] = {}  # calls to send, by concurrency group
        self._handle: Any = None  # the Troupe handle of the actor's worker
        self._is_sync = False  # whether that worker runs all calls in order, on its main thread
        self._dead: Frame | None = None
        self._asked = False
        self._numbers: dict[str, int] = {}  # calls sent so far, by concurrency group
        self._submitted = 0
        self._role = ""  # role of the actor's current process
        self._restarting = False
        self._pumping = False
        self._again = False

    def resolve(self) -> None:
        """Asks the control service for the actor's process, unless it has already been asked."""
        with self._lock:
            if self._asked:
                return
            self._asked = True
        _state.require().control.ask("actor_info", (self.actor_id,), self._resolved)

    def created(self, _: object, error: BaseException | None) -> None:
        """Handles the answer to the request to create the actor."""
        if error is not None:
            self._died(
                _objects._dump_error(
                    exceptions.ActorDiedError(f"The actor could not be created: {error}", None, self.actor_id)
                ),
                None,
            )

    def _resolved(self, info: Any, error: BaseException | None) -> None:
        kept = self.creating
        if error is not None or not info.get("restarts"):
            self.creating = None
        state = _state.current()
        if state is not None and kept is not None:
            state.store.linger(kept)
        if error is not None or "dead" in info:
            with self._lock:
                dead = _objects.cause_frame(info["dead"], self.actor_id) if error is None else None
                unknown = (
                    f"The actor {self.actor_id} is not known: "
                    f"{error or 'The actor is dead because its owner has died before it was registered.'}"
                )
                self._dead = (
                    self._dead or dead or _objects._dump_error(exceptions.ActorDiedError(unknown, None, self.actor_id))
                )
            self.pump()
            return
        role = self._role = info["role"]
        if info["restarts"] and state is not None:
            state.control.ask(
                "actor_lost", (self.actor_id, role, None), lambda found, error: self._process_ended(role, found, error)
            )
        _peers.peer(role).with_handle(lambda handle, error: self._attached(role, handle, error))

    def _attached(self, role: str, handle: Any, error: BaseException | None) -> None:
        if role != self._role:
            return
        if error is not None:
            _state.require().control.ask(
                "actor_lost", (self.actor_id, role), lambda found, error: self._process_ended(role, found, error)
            )
            return
        self._handle, self._restarting, self._is_sync = handle, False, "call" in handle.cluster._modes
        self.pump()

    def _process_ended(self, role: str, found: Any, error: BaseException | None) -> None:
        """Handles the end of the actor's process: marks the actor dead, or resolves it again after its restart."""
        if error is None and found.get("restarts"):
            with self._lock:
                if self._role != role:
                    return
                self._role, self._handle, self._asked, self._restarting = "", None, False, True
                self._numbers.clear()
            self.resolve()
            self.pump()
        elif error is not None or "dead" in found:
            self._died(found and found["dead"], error)

    def killed(self, cause: Frame) -> None:
        """Records that this process killed the actor. Later calls fail at once; pending calls fail when the actor's
        process ends."""
        with self._lock:
            self._asked, self._dead = True, cause
        self.pump()

    def _died(self, cause: object, error: BaseException | None) -> None:
        with self._lock:
            self._dead = (
                _objects.cause_frame(cause, self.actor_id)
                if error is None and cause
                else _objects._dump_error(exceptions.ActorDiedError(None, None, self.actor_id))
            )
        self.pump()

    def check(self, info: HandleInfo, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Raises TypeError for arguments that do not match the method's signature, if the signature is known."""
        if self.signatures is None:
            self.signatures = info.signatures()
        check_arguments(self.signatures.get(name), f"{info.class_name}.{name}", args, kwargs)

    def submit(self, call: Pending) -> None:
        """Sends a call before returning, if no other call is ahead of it and the actor is reachable. Otherwise copies
        its arguments and queues it."""
        if call.retries:
            call.own_arguments()
        with self._lock:
            self._submitted = call.number = self._submitted + 1
            direct = not call.refs and self._may_send()
            if direct:
                call.role = self._role
                error = self._send_to(self._handle, call)
        if direct:
            if error is not None:
                self._lost(call, error)
            return
        call.own_arguments()
        with self._lock:
            self._put_back(call)
        if not self._asked:
            self.resolve()
        self.pump()

    def take_turn(self) -> bool:
        """Returns whether a call may be sent now; if so, no other call is sent until end_turn. Returns False if other
        calls are queued or the actor is not reachable yet."""
        with self._lock:
            may = self._may_send()
            self._pumping = self._pumping or may
            return may

    def _may_send(self) -> bool:
        """Returns what take_turn does, without taking the turn; the caller holds the lock."""
        return self._handle is not None and self._dead is None and not self._pumping and not self._queues

    def end_turn(self) -> None:
        with self._lock:
            self._pumping = False
            again, self._again = self._again, False
        if again:
            self.pump()

    def worker_for(self, call: Pending) -> Any:
        """Returns the worker to send a call to, or None if the actor's process has just ended."""
        with self._lock:
            call.role = self._role
            return self._handle

    def next_number(self, group: str) -> int:
        """Returns the sequence number of the next call in a concurrency group."""
        number = self._numbers.get(group, 0)
        self._numbers[group] = number + 1
        return number

    def reuse_number(self, group: str) -> None:
        """Gives the last number, whose call could not be sent, to the next call: the actor would wait for it for
        ever."""
        with self._lock:
            if self._numbers.get(group):  # otherwise the actor's process has ended, and the numbers begin again
                self._numbers[group] -= 1

    def pump(self) -> None:
        """Sends the queued calls that can be sent, in order. Only one thread does so at a time."""
        with self._lock:
            if self._pumping:
                self._again = True
                return
            self._pumping = True
        while True:
            self._again = False
            try:
                self._send_ready()
            finally:
                with self._lock:
                    if not self._again:
                        self._pumping = False
                    self._drop_empty_queues()
            if not self._pumping:
                return

    def _drop_empty_queues(self) -> None:
        """Makes later calls see at once that nothing is ahead of them; the caller holds the lock."""
        if not any(self._queues.values()):
            self._queues.clear()

    def _send_ready(self) -> None:
        for queue in list(self._queues.values()):
            while queue and self._send_first(queue):
                pass

    def _send_first(self, queue: deque[Pending]) -> bool:
        """Sends or fails the first call in the queue of a concurrency group. Returns False if that call, and those
        behind it, must wait."""
        call = queue[0]
        if self._dead is not None:
            queue.popleft()
            call.fail(self._dead)
            return True
        state = _state.current()
        if self._restarting and not call.options.retries:
            queue.popleft()
            call.fail_with(
                exceptions.ActorUnavailableError(
                    self.actor_id, f"The actor {self.actor_id} is unavailable: it is being restarted."
                )
            )
            return True
        if self._handle is None or state is None:
            return False
        missing = call.waits_for(state.process)
        if missing is not None:
            missing.on_done(self.pump)
            return False
        with self._lock:
            if not queue or queue[0] is not call:
                return True
            queue.popleft()
        self._send(call)
        return True

    def _send(self, call: Pending) -> None:
        for ref in call.refs:
            if ref._entry._done and ref._entry.kind == ERROR:
                call.fail(ref._entry.error_frame())
                return
        with self._lock:
            handle = self.worker_for(call)
            if handle is None:
                call.own_arguments()
                self._put_back(call)
                return
        error = self._send_to(handle, call)
        if error is not None:
            self._lost(call, error)

    def _send_to(self, worker: WorkerHandle, call: Pending) -> _errors.Error | None:
        """Sends a call, and returns the error if that failed."""
        call.worker = worker
        options = call.options
        method = "call"
        fields: list[Any]
        if options.are_default and self._is_sync:
            if type(call.frame) is tuple:
                fields = [call.id, options.method, None, *call.frame]
            elif call.refs:
                fields = [call.id, options.method, call.frame, dependencies(call.refs), 1, _host.NO_EXTRA]
            else:
                fields = [call.id, options.method, call.frame]
        else:
            method, fields = self._with_options(call)
        try:
            worker._begin(method, fields, call)
        except _errors.Error as err:
            if type(err) is not _errors.EncodeError or type(call.frame) is not tuple:
                if method != "call":
                    self.reuse_number(options.group)
                return err
            call.pickle_arguments()  # one is a number or a text that msgpack cannot encode
            return self._send_to(worker, call)
        if not options.retries:
            call.frame = NONE
        _objects.sent()
        return None

    def _with_options(self, call: Pending) -> tuple[str, list[object]]:
        """Returns the worker's method that takes the call, and the fields of the call with its options."""
        options = call.options
        extra: dict[str, Any] = {"name": options.name} if options.name else {}
        method = "call"
        if options.group or not self._is_sync:
            method = _host.method_of_group(options.group)
            extra["from"], extra["number"] = _state.require().process, self.next_number(options.group)
        if options.returns < 0:
            extra["stream"] = [_state.require().process, options.limit]
        call.pickle_arguments()
        return method, [call.id, options.method, call.frame, dependencies(call.refs), options.returns, extra]

    def _answered(self, call: Pending, read: Callable[[], tuple[int, Any, Any]]) -> None:
        try:
            kind, answer, ref = read()
        except _errors.Error as err:
            self._lost(call, err)
            return
        except BaseException as err:
            call.fail_with(exceptions.RaySystemError(str(err)))
            return
        self._take(call, kind, answer, ref)

    def _take(self, call: Pending, kind: int, answer: Any, ref: object) -> None:
        """Completes the objects of a call with its answer, as of when_answered, or retries the call."""
        if kind == PLAIN:
            call.entries[0].set(VALUE, (answer,), ())
        elif kind == VALUE:
            call.entries[0].set(VALUE, answer)
        elif kind == ERROR:
            if call.retries and _options.is_retried(answer, call.options.retried):
                self._retry(call)
                return
            call.fail(answer)
        else:
            _objects.set_results(call.entries, kind, answer, ref)
        if call.contents is not _serialize.EMPTY:
            state = _state.current()
            if state is not None:
                state.store.linger(call.contents)

    def _retry(self, call: Pending) -> None:
        """Requeues a call at the position of its sequence number. The old answer finds no receiver if an interrupt
        makes the core deliver it again, so that the call is not retried twice."""
        call.retries -= 1 if call.retries > 0 else 0
        call.future = None
        with self._lock:
            self._put_back(call)
        call.worker._cluster._core._pending.pop(call._token, None)
        self.pump()

    def _put_back(self, call: Pending) -> None:
        queue = self._queues.setdefault(call.options.group, deque())
        queue.insert(next((i for i, other in enumerate(queue) if other.number > call.number), len(queue)), call)

    def _lost(self, call: Pending, err: _errors.Error) -> None:
        """Handles a call that failed without an answer. The control service says whether the actor is dead or
        restarting; the call fails or is retried accordingly."""
        state = _state.current()
        if state is None:
            call.fail_with(exceptions.ActorDiedError(f"The session has ended: {err}", None, self.actor_id))
            return

        def told(found: Any, error: BaseException | None) -> None:
            if error is None and found.get("dead") is not None:
                frame = _objects.cause_frame(found["dead"], self.actor_id)
                self._died(frame, None)
                call.fail(frame)
            elif error is not None or "dead" in found:
                call.fail_with(exceptions.ActorDiedError(f"The actor {self.actor_id} died: {err}", None, self.actor_id))
            else:
                self._process_ended(call.role, found, None)
                if call.retries and found.get("restarts"):
                    self._retry(call)
                else:
                    call.fail_with(
                        exceptions.ActorUnavailableError(
                            self.actor_id, f"The actor {self.actor_id} is unavailable: {err}"
                        )
                    )

        state.control.ask("actor_lost", (self.actor_id, call.role), told)

    def cancel(self, call: Pending, force: bool, recursive: bool) -> None:
        if force:
            raise ValueError("force=True is not supported for actor tasks.")
        with self._lock:
            queue = self._queues.get(call.options.group, deque())
            waiting = call in queue
            if waiting:
                queue.remove(call)
                self._drop_empty_queues()
        if waiting:
            call.fail_with(exceptions.TaskCancelledError(call.id))
            return

        def told(how: Any) -> None:
            try:
                if how._get() == "queued":
                    call.fail_with(exceptions.TaskCancelledError(call.id))
            except _errors.Error:
                pass

        try:
            with _core.get().beside():
                self._handle["cancel_call"].remote(call.id, force, recursive).add_done_callback(told)
        except _errors.Error:
            pass


def client_of(actor_id: str) -> Client:
    with _lock:
        found = _clients.get(actor_id)
        if found is None:
            found = _clients[actor_id] = Client(actor_id)
        return found


def waiting_calls() -> list[tuple[str, str, str, str]]:
    """Returns the calls of this process that are not sent to their actors, as util.state shows them."""
    return [
        (call.id, call.options.method, "PENDING_ACTOR_TASK_ARGS_FETCH", client.actor_id)
        for client in list(_clients.values())
        for queue in list(client._queues.values())
        for call in list(queue)
    ]


def call_actor(
    info: HandleInfo,
    hold: Hold | None,
    method: str,
    options: CallOptions,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> Any:
    state = _state.require()
    client = _clients.get(info.actor_id) or client_of(info.actor_id)
    if kwargs or not options.least <= len(args) <= options.most:
        client.check(info, method, args, kwargs)
    arguments = (
        (args, _serialize.EMPTY, NONE)
        if are_plain(args, kwargs)
        else split_arguments(f"{info.module}.{info.class_name}.{method}", args, kwargs, copy=False)
    )
    store = state.store
    task_id = store.task_id()
    entry = (
        Entry(task_id + _objects.FIRST, store.process)
        if options.returns >= 0
        else _generators.Stream(store, task_id, options.limit)
    )
    entries = [entry]
    call = entry.call = Pending(client, task_id, options, arguments, entries, hold)
    if options.returns > 1:
        entries += [store.new(task_id, i) for i in range(2, options.returns + 1)]
        for other in entries:
            other.call = call
    parent = _context.current.get()
    if parent is not None:
        parent.children.add(entry)
    client.submit(call)
    if options.returns == 1:
        return ObjectRef(entry)
    if isinstance(entry, _generators.Stream):
        return _generators.result_of(entry, options.returns)
    return [ObjectRef(e) for e in entries] if options.returns else None


def _arity(parameters: Sequence[Sequence[object]] | None) -> tuple[int, int]:
    """Returns how many positional arguments a method requires and accepts when no keywords are given; (1, 0) if every
    call must be checked against the signature. The parameters are those of HandleInfo, None if they are not known."""
    if parameters is None:
        return 0, _UNLIMITED
    least = most = 0
    for _, kind, has_default in parameters:
        if kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            most += 1
            least += not has_default
        elif kind == inspect.Parameter.VAR_POSITIONAL:
            most = _UNLIMITED
        elif kind == inspect.Parameter.KEYWORD_ONLY and not has_default:
            return 1, 0
    return least, most


# Public functions.


def get_actor(name: str, namespace: str | None = None) -> ActorHandle:
    """Returns a weak handle of a named actor."""
    state = _state.require()
    if not name:
        raise ValueError("Please supply a non-empty value to get_actor")
    if namespace is not None:
        _options.check_namespace(namespace)
    found = _state.control_call("named_actor", namespace or state.namespace, name)
    if found is None:
        raise ValueError(
            f"Failed to look up actor with name '{name}'. This could because 1. You are trying to look up a named "
            "actor you didn't create. "
            "2. The named actor died. 3. You did not use a namespace matching the namespace of the actor."
        )
    return _weak_handle(found)


def kill(actor: ActorHandle, *, no_restart: bool = True) -> None:
    """Kills an actor immediately; has no effect on a dead one."""
    _state.require()
    if not isinstance(actor, ActorHandle):
        raise ValueError(f"ray.kill() only supported for actors. For tasks, try ray.cancel(). Got: {type(actor)}.")
    dead = _state.control_call("kill_actor", actor._info.actor_id, no_restart)
    if dead is not None:
        client_of(actor._info.actor_id).killed(_objects.cause_frame(dead, actor._info.actor_id))


def exit_actor() -> None:
    """Ends the calling actor."""
    state = _state.current()
    if state is None or not state.actor_id:
        raise TypeError(
            "exit_actor API is called on a non-actor worker. Call this API inside an actor methods if you'd like to "
            "exit the actor gracefully."
        )
    _host.exit_actor()
