"""Options of actors, tasks and methods: their names and accepted values.

Scheduling strategies are instances of ray.util.scheduling_strategies classes, whose to_wire() returns the form that the
control service takes.
"""

from __future__ import annotations

import inspect
import os
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import cloudpickle

from .. import _launch
from . import _labels, _serialize, exceptions
from ._private.utils import get_ray_doc_version
from ._refused import refuse
from ._serialize import Frame
from .util.scheduling_strategies import PlacementGroupSchedulingStrategy

STREAMING, DYNAMIC = -1, -2  # numbers of results: a stream of references; one reference to a DynamicObjectRefGenerator

_NEAREST = {
    "_labels": "labels of nodes: troupe.Cluster with node=",
    "tensor_transport": "troupe.put of a tensor",
    "accelerator_type": "troupe.actor(…, node=…)",
}

COMMON = {
    "num_cpus",
    "num_gpus",
    "memory",
    "resources",
    "name",
    "scheduling_strategy",
    "runtime_env",
    "placement_group",
    "placement_group_bundle_index",
    "placement_group_capture_child_tasks",
    "enable_task_events",
    "_metadata",
    "_labels",
    "label_selector",
    "fallback_strategy",
    "accelerator_type",
    "object_store_memory",
}
ACTOR = COMMON | {
    "namespace",
    "lifetime",
    "get_if_exists",
    "max_concurrency",
    "max_restarts",
    "max_task_retries",
    "max_pending_calls",
    "concurrency_groups",
    "allow_out_of_order_execution",
    "enable_tensor_transport",
}
TASK = COMMON | {"num_returns", "max_retries", "max_calls", "retry_exceptions", "_generator_backpressure_num_objects"}
METHOD = {
    "name",
    "num_returns",
    "concurrency_group",
    "max_task_retries",
    "retry_exceptions",
    "enable_task_events",
    "_generator_backpressure_num_objects",
    "tensor_transport",
}


def _check_known(what: str, options: Mapping[str, object], known: set[str]) -> None:
    for key in options:
        if key not in known:
            raise ValueError(f"Invalid option keyword {key} for {what}. Valid ones are {sorted(known)}.")
    for key, instead in _NEAREST.items():
        if options.get(key):
            raise refuse(f"the option {key} of {what}", instead)
    _labels.where(options)


def _check_amounts(options: Mapping[str, object]) -> None:
    if options.get("object_store_memory") is not None:
        warnings.warn(
            "Setting 'object_store_memory' for actors is deprecated since it doesn't actually reserve the required "
            "object store memory.",
            DeprecationWarning,
            stacklevel=4,
        )
    for key in ("num_cpus", "num_gpus", "memory"):
        value = options.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(
                f"The type of keyword '{key}' must be (<class 'float'>, <class 'int'>, <class 'NoneType'>), but "
                f"received type {type(value)}"
            )
        if value < 0:
            raise ValueError(f"The value of keyword '{key}' must be positive or zero")
        if key != "memory":
            _check_precision(key, value)
        if key == "num_gpus" and value > 1 and value != int(value):
            raise ValueError(f"The value of keyword 'num_gpus' must be a whole number above 1, not {value}")
    resources = options.get("resources")
    if resources is not None:
        if not isinstance(resources, dict):
            raise TypeError(f"The type of keyword 'resources' must be a dict, but received type {type(resources)}")
        for name in ("CPU", "GPU"):
            if name in resources:
                raise ValueError(
                    f"Use the 'num_cpus' and 'num_gpus' keyword instead of '{name}' in 'resources' keyword"
                )
        for name, value in resources.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(
                    f"The amount of the resource {name!r} must be a number, but received type {type(value)}"
                )
            if value < 0:
                raise ValueError(f"The resource quantities of {name!r} must be positive or zero")
            _check_precision(name, value)


def _check_precision(name: str, value: float) -> None:
    if value and round(value, 4) == 0:
        raise ValueError(f"The precision of the fractional quantity of resource {name} cannot go beyond 0.0001")


def check_actor(options: Mapping[str, object]) -> None:
    _check_known("actors", options, ACTOR)
    _check_amounts(options)
    if options.get("get_if_exists") and not options.get("name"):
        raise ValueError("The actor name must be specified to use `get_if_exists`.")
    name = options.get("name")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be None or a string, got: '{type(name)}'.")
    if name == "":
        raise ValueError("Actor name cannot be an empty string.")
    namespace = options.get("namespace")
    if namespace is not None:
        check_namespace(namespace)
    if options.get("lifetime") not in (None, "detached", "non_detached"):
        raise ValueError("actor `lifetime` argument must be one of 'detached', 'non_detached', or None")
    limit = options.get("max_concurrency")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError("max_concurrency must be an int, and at least 1")
    groups = options.get("concurrency_groups")
    if groups is not None and not isinstance(groups, (dict, list)):
        raise TypeError("concurrency_groups must be a dict of limits by name")
    for key in ("max_restarts", "max_task_retries"):
        _check_count(key, options.get(key))


def _check_count(key: str, value: object) -> None:
    """Checks a number of attempts; -1 means unlimited."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"The type of keyword '{key}' must be {(int, type(None))}, but received type {type(value)}")
    if value < -1:
        raise ValueError(
            f"The keyword '{key}' only accepts None, 0, -1 or a positive integer, where -1 represents infinity."
        )


def _check_calls(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"The type of keyword 'max_calls' must be {(int, type(None))}, but received type {type(value)}")
    if value < 0:
        raise ValueError("The keyword 'max_calls' only accepts None, 0 or a positive integer")
    if value > 1:
        raise refuse(f"max_calls={value}", "max_calls=1, a process for each call")


def check_task(options: Mapping[str, object]) -> None:
    _check_known("remote functions", options, TASK)
    _check_amounts(options)
    _check_calls(options.get("max_calls"))
    _check_returns(options)
    _check_count("max_retries", options.get("max_retries"))
    _check_retried(options.get("retry_exceptions"))


def check_method(options: Mapping[str, object]) -> None:
    _check_known("methods of actors", options, METHOD)
    _check_returns(options)
    _check_retried(options.get("retry_exceptions"))


def _check_retried(value: object) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(c, type) and issubclass(c, BaseException) for c in value
    ):
        raise TypeError("The keyword 'retry_exceptions' must be either a boolean or a list of exceptions")


def exceptions_to_wire(value: Any) -> Any:
    """Returns retry_exceptions as a handle carries it: a boolean, or the pickled exception classes."""
    if value is None or isinstance(value, bool):
        return bool(value)
    return cloudpickle.dumps(tuple(value))


def is_retried(frame: Frame, wire: bool | bytes) -> bool:
    """Returns whether a call that failed with this frame is retried."""
    if not wire:
        return False
    error = _serialize.loads(frame)
    return isinstance(error, exceptions.RayTaskError) and (wire is True or isinstance(error.cause, pickle.loads(wire)))


def _check_returns(options: Mapping[str, object]) -> None:
    value = options.get("num_returns")
    if value == "dynamic":
        warnings.warn(
            "num_returns='dynamic' is deprecated. Use num_returns='streaming' instead.",
            DeprecationWarning, stacklevel=4,
        )  # fmt: skip
    if value in (None, "streaming", "dynamic"):
        _check_backpressure(options.get("_generator_backpressure_num_objects"))
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"The type of keyword 'num_returns' must be {(int, str, type(None))}, but received type {type(value)}"
        )
    if value < 0:
        raise ValueError(
            "The keyword 'num_returns' only accepts None, a non-negative integer, 'streaming' (for generators), or "
            "'dynamic'"
        )


def _check_backpressure(value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"_generator_backpressure_num_objects must be an int, but received type {type(value)}")
    if value < -1 or value == 0:
        raise ValueError(
            f"_generator_backpressure_num_objects={value} is not allowed. Use a value > 0: with 1, the generator "
            "makes an "
            "object when the previous one was taken; -1 is no limit."
        )


def returns_of(value: Any, function: object = None) -> int:
    """Returns num_returns as calls carry it: a number, STREAMING or DYNAMIC. None, the default, is 1, and STREAMING for
    a generator function."""
    if value is None:
        return STREAMING if is_generator(function) else 1
    return int({"streaming": STREAMING, "dynamic": DYNAMIC}.get(value, value))


def is_generator(function: object) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def check_namespace(namespace: object) -> None:
    if not isinstance(namespace, str):
        raise TypeError(f"namespace must be None or a string, got: '{type(namespace)}'.")
    if namespace == "":
        raise ValueError("namespace cannot be an empty string")


def demand(options: dict[str, Any], cpus: float) -> dict[str, float]:
    """Returns the resources that the options request; cpus is the default for num_cpus."""
    found = {
        "CPU": cpus if options.get("num_cpus") is None else float(options["num_cpus"]),
        "GPU": float(options.get("num_gpus") or 0),
        "memory": float(options.get("memory") or 0),
        **{name: float(value) for name, value in (options.get("resources") or {}).items()},
    }
    return {name: amount for name, amount in found.items() if amount}


def strategy(options: dict[str, object], parent: object = None) -> dict[str, object] | None:
    """Returns the scheduling strategy in wire form. parent: the placement group of the calling actor or task."""
    found, where = _strategy(options, parent), _labels.where(options)
    if not where:
        return found
    if found and found.get("where"):
        raise ValueError("label_selector and NodeLabelSchedulingStrategy cannot both be given.")
    return {**(found or {}), "where": where}


def _strategy(options: dict[str, Any], parent: Any) -> dict[str, Any] | None:
    given = options.get("scheduling_strategy")
    group = options.get("placement_group")
    if group is not None and group != "default" and given is not None:
        raise ValueError(
            "Placement groups should be specified via the scheduling_strategy option. The placement_group option is "
            "deprecated."
        )
    if isinstance(given, str):
        if given not in ("DEFAULT", "SPREAD"):
            raise ValueError(
                f"Invalid scheduling_strategy string {given!r}; it is DEFAULT, SPREAD, or an object of "
                "ray.util.scheduling_strategies"
            )
        return {"kind": "SPREAD"} if given == "SPREAD" else None
    if given is not None:
        to_wire = getattr(given, "to_wire", None)
        if to_wire is None:
            raise TypeError(
                "scheduling_strategy must be a string or an object of ray.util.scheduling_strategies, not "
                f"{type(given).__name__}"
            )
        return dict(to_wire() or {}) or None
    if group is not None and group != "default":
        _warn_of_group_option()
        index = options.get("placement_group_bundle_index", -1)
        return PlacementGroupSchedulingStrategy(
            group, index, options.get("placement_group_capture_child_tasks")
        ).to_wire()
    if options.get("placement_group_bundle_index", -1) not in (-1, None):
        raise ValueError("If placement group is not set, the value of bundle index must be -1.")
    if "placement_group" in options and group is None:
        return None  # an explicit None opts out of the parent's group
    return parent if parent is not None and parent.get("capture") else None


def _warn_of_group_option() -> None:
    warnings.warn(
        "placement_group parameter is deprecated. Use scheduling_strategy=PlacementGroupSchedulingStrategy(...) "
        "instead, see the usage at "
        f"https://docs.ray.io/en/{get_ray_doc_version()}/ray-core/package-ref.html#ray-remote.",
        DeprecationWarning,
        stacklevel=5,
    )


def membership(strategy: Mapping[str, object] | None) -> dict[str, object] | None:
    """Returns the placement group of an actor or task with this strategy, as a strategy for any of its bundles, or
    None. If its "capture" is set, the group also applies to what the actor or task creates."""
    if strategy is None or strategy.get("kind") != "placement_group":
        return None
    return {**strategy, "bundle": -1}


def environment(runtime_env: object) -> dict[str, object]:
    """Returns a runtime environment as a plain dict with env_vars, working_dir and py_executable. Refuses other fields
    that are set, except config and excludes, which are ignored."""
    if runtime_env is None:
        return {}
    plain = dict(runtime_env.items()) if hasattr(runtime_env, "items") else None
    if plain is None:
        raise TypeError(f"runtime_env must be a dict or a RuntimeEnv, not {type(runtime_env).__name__}")
    out: dict[str, Any] = {}
    for key, value in plain.items():
        if value is None or key in ("config", "_validate", "excludes"):
            continue
        if key == "env_vars":
            out[key] = _env_vars(value)
        elif key == "working_dir":
            if not isinstance(value, str):
                raise TypeError("`working_dir` must be a string")
            if "://" in value or not os.path.isdir(value):
                raise ValueError(
                    f"working_dir {value!r} is no folder of this machine; remote archives are not in troupe.ray"
                )
            out[key] = os.path.abspath(value)
        elif key == "py_executable":
            out[key] = str(value)
        elif (key == "py_modules" and not value) or not value:
            continue
        else:
            raise refuse(
                f"runtime_env[{key!r}]", "an interpreter that has what is needed, and troupe.init(working_dir=…)"
            )
    return out


def _env_vars(value: object) -> dict[str, str]:
    if not hasattr(value, "items"):
        raise TypeError("runtime_env['env_vars'] must be of type Dict[str, str]")
    out = {}
    for name, text in value.items():
        if not isinstance(name, str):
            raise TypeError(
                f"runtime_env['env_vars'] must be of type Dict[str, str], but the key {name} is of type {type(name)}."
            )
        if not isinstance(text, str):
            raise TypeError(
                f"runtime_env['env_vars'] must be of type Dict[str, str], but the value {text} is of type {type(text)}."
            )
        if not _launch.set_by_troupe(name):  # programs often pass on their whole environment
            out[name] = text
    return out


def merged(job: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, object]:
    """Returns the job's environment, overridden by a worker's own."""
    out = {**job, **own}
    variables = {**job.get("env_vars", {}), **own.get("env_vars", {})}
    if variables:
        out["env_vars"] = variables
    return out
