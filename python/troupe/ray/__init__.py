"""Ray's API on Troupe: `import troupe.ray as ray`, or `python -m troupe.ray SCRIPT` for programs that `import ray`.

Modules:
    __init__, _session      init, shutdown, namespaces, implicit init
    _state                  the current session; control_call and control_async call the control service
    _control                the client of the head's control service, which keeps jobs, actors, names, handles, task workers, resources
    _objects                ObjectRef, get, put, wait, cancel; Promise: a reference whose value is set later
    _host                   the process of an actor or of a task worker
    actor, remote_function  actor classes, remote functions, handles
    _options                options and their validation; refuse() creates the error for an unsupported feature
    exceptions, runtime_context, runtime_env, _ids
    util, cluster_utils, _private, experimental, _raylet, scripts      ray.util and the rest
"""

from __future__ import annotations

import inspect
from typing import Any

import cloudpickle

from . import actor, exceptions, runtime_context
from ._ids import ActorID, JobID, NodeID, PlacementGroupID, TaskID, UniqueID, WorkerID
from ._objects import ObjectRef, cancel, get, put, wait
from ._session import init, is_initialized, shutdown
from .actor import get_actor, kill, method
from .remote_function import RemoteFunction
from .runtime_context import get_gpu_ids, get_runtime_context

__version__ = "2.60.0"
__commit__ = "troupe"
LOCAL_MODE, SCRIPT_MODE, WORKER_MODE = 2, 0, 1
ObjectID = ObjectRef


def remote(*args: Any, **options: Any) -> Any:
    """Turns a function into a remote function and a class into an actor class: `@ray.remote`, `@ray.remote(num_cpus=2)`."""
    if len(args) == 1 and not options and callable(args[0]):
        return _decorated(args[0], {})
    if args or not options:
        raise TypeError(
            "The @ray.remote decorator must be applied either with no arguments and no parentheses, for example '@ray.remote', or it must be applied "
            "using some of the arguments in the list of options, for example '@ray.remote(num_returns=2, resources={\"CustomResource\": 1})'."
        )
    return lambda target: _decorated(target, options)


def _decorated(target: Any, options: dict[str, Any]) -> Any:
    if inspect.isclass(target):
        return actor.make_actor(target, options)
    if inspect.isfunction(target) or callable(target):
        return RemoteFunction(target, options)
    raise TypeError("The @ray.remote decorator must be applied to either a function or a class.")


def __getattr__(name: str) -> Any:
    if name == "cloudpickle":
        return cloudpickle
    if name in _LATE:
        import importlib

        module, _, attribute = _LATE[name].partition(":")
        found = importlib.import_module(module, __name__)
        return getattr(found, attribute) if attribute else found
    raise AttributeError(f"module 'ray' has no attribute {name!r} in troupe.ray; see docs/ray.md")


# Names that are imported on first use.
_LATE = {
    "util": ".util", "cluster_utils": ".cluster_utils", "_private": "._private", "experimental": ".experimental", "_raylet": "._raylet",
    "runtime_env": ".runtime_env", "nodes": "._nodes:nodes", "cluster_resources": "._nodes:cluster_resources",
    "available_resources": "._nodes:available_resources", "timeline": "._nodes:timeline",
}  # fmt: skip

__all__ = [
    "SCRIPT_MODE",
    "WORKER_MODE",
    "ActorID",
    "JobID",
    "NodeID",
    "ObjectID",
    "ObjectRef",
    "PlacementGroupID",
    "TaskID",
    "UniqueID",
    "WorkerID",
    "actor",
    "cancel",
    "cloudpickle",
    "exceptions",
    "get",
    "get_actor",
    "get_gpu_ids",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "method",
    "put",
    "remote",
    "runtime_context",
    "shutdown",
    "wait",
]  # fmt: skip
