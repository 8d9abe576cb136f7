"""What the constructor of a worker's class is given, and whether it takes that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _errors

if TYPE_CHECKING:
    import inspect  # imported late: most constructors have no parameters, and the import takes a worker 5 ms

_NAMES = ("worker_config", "config", "cfg")  # parameters of a Worker that are given the configuration
_PLAIN = (
    str,
    int,
    float,
    bool,
    bytes,
    "str",
    "int",
    "float",
    "bool",
    "bytes",
)  # annotations of parameters that are not


def arguments(
    cls: object, args: Sequence[object], kwargs: Mapping[str, object], config: object
) -> tuple[list[object], dict[str, object]]:
    """Returns the arguments of the constructor: those of the program, or else the configuration of the workers, if a
    parameter is for it. In a Worker that parameter is called worker_config, config or cfg, or is annotated with a type
    called …Config; in other classes it is called worker_config. Raises InvalidError, with the remedy, if the
    constructor does not take the arguments."""
    parameters = _parameters(cls)
    name = None if args or kwargs else next((n for n, p in parameters.items() if _is_config(cls, n, p)), None)
    if name is not None and parameters[name].kind is parameters[name].POSITIONAL_ONLY:
        args = [config]
    elif name is not None:
        kwargs = {name: config}
    if parameters:
        _check(cls, parameters, args, kwargs, own=name is None and bool(args or kwargs))
    return list(args), dict(kwargs)


def _parameters(cls: object) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a constructor written in Python; none of others, and of classes that are created in
    another way."""
    code = getattr(getattr(cls, "__init__", None), "__code__", None)
    made: Any = getattr(cls, "__new__", None)
    if (
        code is None
        or not isinstance(cls, type)
        or made is not object.__new__
        or type(cls).__call__ is not type.__call__
    ):
        return {}
    if code.co_argcount + code.co_kwonlyargcount == 1:
        return {}
    import inspect

    return dict(list(inspect.signature(cls.__init__).parameters.items())[1:])  # type: ignore[misc]


def _is_config(cls: Any, name: str, parameter: inspect.Parameter) -> bool:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    if name == "worker_config" or not _is_worker(cls):
        return name == "worker_config"
    kind = parameter.annotation
    if kind in _PLAIN:
        return False
    return name in _NAMES or str(getattr(kind, "__name__", kind)).endswith("Config")


def _is_worker(cls: type) -> bool:
    """Returns whether a class is derived from troupe.Worker, whose module imports this one."""
    return any((c.__module__, c.__qualname__) == ("troupe._worker", "Worker") for c in cls.__mro__)


def _check(
    cls: Any,
    parameters: Mapping[str, inspect.Parameter],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    own: bool,
) -> None:
    """Raises InvalidError if the constructor does not take the arguments; own: they are the program's."""
    import inspect

    signature = inspect.Signature(list(parameters.values()))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as err:
        shown = f"{cls.__qualname__}{signature}: {err}"
        if own:
            raise _errors.InvalidError(
                f"the constructor does not take the arguments that it is given: {shown}"
            ) from None
        needed = ", ".join(
            f"{n!r}: …" for n, p in parameters.items() if p.default is p.empty and "VAR_" not in p.kind.name
        )
        raise _errors.InvalidError(
            f"the constructor needs arguments: {shown}. It would be given the configuration of the workers, as a "
            "parameter "
            f"called worker_config, and nothing else; give its arguments with Cluster(…, worker_kwargs={{{needed}}}) "
            "or "
            f"troupe.actor({cls.__qualname__}, …)"
        ) from None
