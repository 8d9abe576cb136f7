"""Ray's API on Troupe: `import troupe.ray as ray`, or `python -m troupe.ray SCRIPT` for programs that `import ray`.

Modules:
    __init__, _session      init, shutdown, namespaces, implicit init
    _state                  the current session; control_call and control_async call the control service
    _control                the client of the head's control service: jobs, actors, names, handles, task workers,
                            resources
    _serialize, _peers      values as frames; calls to other processes of the session
    _objects, _waiting      ObjectRef, put, Promise (a reference whose value is set later); get, wait, cancel
    _generators             the values of tasks and methods that yield
    _host                   the process of an actor or of a task worker
    actor, remote_function  actor classes, remote functions, handles
    _options, _refused      options and their validation; the errors of what is not supported
    exceptions, runtime_context, runtime_env, _ids
    util, cluster_utils, _private, experimental, _raylet, scripts   ray.util and the rest
"""

from __future__ import annotations

import inspect
from typing import Any

import cloudpickle

from . import _refused, actor, exceptions, runtime_context
from ._generators import DynamicObjectRefGenerator, ObjectRefGenerator
from ._ids import ActorID, JobID, NodeID, PlacementGroupID, TaskID, UniqueID, WorkerID
from ._objects import ObjectRef, put
from ._session import init, is_initialized, shutdown
from ._waiting import cancel, get, wait
from .actor import get_actor, kill, method
from .remote_function import RemoteFunction
from .runtime_context import get_gpu_ids, get_runtime_context

__version__ = "2.60.0"
__commit__ = "troupe"
LOCAL_MODE, SCRIPT_MODE, WORKER_MODE = 2, 0, 1
ObjectID = ObjectRef


def remote(*args: object, **options: object) -> Any:
    """Turns a function into a remote function and a class into an actor class: `@ray.remote`,
    `@ray.remote(num_cpus=2)`."""
    if len(args) == 1 and not options and callable(args[0]):
        return _decorated(args[0], {})
    if args or not options:
        raise TypeError(
            "The @ray.remote decorator must be applied either with no arguments and no parentheses, for example "
            "'@ray.remote', or it must be applied "
            "using some of the arguments in the list of options, for example '@ray.remote(num_returns=2, "
            'resources={"CustomResource": 1})\'.'
        )
    return lambda target: _decorated(target, options)


def _decorated(target: object, options: dict[str, object]) -> Any:
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
    raise _refused.absent(__name__, name)


_refused.install()


# Names that are imported on first use.
_LATE = {
    "util": ".util",
    "cluster_utils": ".cluster_utils",
    "_private": "._private",
    "experimental": ".experimental",
    "_raylet": "._raylet",
    "runtime_env": ".runtime_env",
    "nodes": "._nodes:nodes",
    "cluster_resources": "._nodes:cluster_resources",
    "available_resources": "._nodes:available_resources",
    "timeline": "._timeline:timeline",
}

__all__ = [
    "SCRIPT_MODE",
    "WORKER_MODE",
    "ActorID",
    "DynamicObjectRefGenerator",
    "JobID",
    "NodeID",
    "ObjectID",
    "ObjectRef",
    "ObjectRefGenerator",
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
