"""Names of Ray that are not in this package: the errors of their use and import, which name the nearest thing."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import NoReturn

# By name in Ray, for the names inside of it too.
NEAREST = {
    "ray.data": "a troupe.Pipeline, or the loader of the framework in the workers",
    "ray.train": "a troupe.Cluster with torch.distributed",
    "ray.tune": "calls of troupe.remote functions",
    "ray.serve": "a troupe.Router over a troupe.Cluster",
    "ray.rllib": "a troupe.Pipeline of samplers and learners",
    "ray.llm": "a troupe.Router over a cluster of engines",
    "ray.air": "a troupe.Cluster",
    "ray.workflow": "a troupe.Pipeline with a log",
    "ray.autoscaler": "`troupe join` on each machine",
    "ray.job_submission": "run the script itself: `python -m troupe.ray SCRIPT`",
    "ray.dashboard": "`troupe up --metrics` and its page",
    "ray.client": "init(address=…)",
    "ray.client_builder": "init(address=…)",
    "ray.ClientBuilder": "init(address=…)",
    "ray.LoggingConfig": "the logging module",
    "ray.Language": "workers in Go are called by their role: troupe.Cluster.attach",
    "ray.cross_language": "workers in Go are called by their role: troupe.Cluster.attach",
    "ray.java_function": "workers in Go are called by their role: troupe.Cluster.attach",
    "ray.java_actor_class": "workers in Go are called by their role: troupe.Cluster.attach",
    "ray.cpp_function": "workers in Go are called by their role: troupe.Cluster.attach",
    "ray.internal": "references are freed with the last of them",
    "ray.widgets": "the notebook support of troupe",
    "ray._private": "the public functions of ray",
    "ray._common": "the public functions of ray",
    "ray.experimental": "the public functions of ray",
    "ray.util.dask": "troupe.remote functions",
    "ray.util.spark": "troupe.remote functions",
    "ray.util.xgboost": "a troupe.Cluster",
    "ray.util.lightgbm": "a troupe.Cluster",
    "ray.util.sgd": "a troupe.Cluster with torch.distributed",
    "ray.util.horovod": "a troupe.Cluster with torch.distributed",
    "ray.util.client": "init(address=…)",
    "ray.util.iter": "troupe.Pipeline",
    "ray.util.pdb": "breakpoint() and `troupe debug`",
    "ray.util.rpdb": "breakpoint() and `troupe debug`",
    "ray.util.debugpy": "debugpy in the worker's code",
    "ray.util.ray_debugpy": "debugpy in the worker's code",
    "ray.util.connect": "init(address=…)",
    "ray.util.disconnect": "shutdown()",
    "ray.util.serialization": "__reduce__ of the class",
    "ray.util.register_serializer": "__reduce__ of the class",
    "ray.util.deregister_serializer": "__reduce__ of the class",
    "ray.util.tracing": "`troupe timeline`",
    "ray.util.tpu": "custom resources",
    "ray.util.state.get_log": "`troupe logs`",
    "ray.util.state.list_logs": "`troupe logs`",
    "ray.util.state.get_job": "`troupe status`",
    "ray.util.state.list_runtime_envs": "the drivers' own settings",
    "ray.util.state.list_cluster_events": "`troupe events`",
    "ray.util.state.summarize_objects": "`troupe status`",
    "ray.util.state.StateApiClient": "the functions of ray.util.state",
}
# Modules of Ray without a file here, and private names that programs import before they know whether they need them:
# the import succeeds, a use is refused.
IMPORT_ONLY_MODULES = (
    "ray._private.gcs_utils",
    "ray._private.internal_api",
    "ray._private.runtime_env.context",
    "ray._private.runtime_env.packaging",
    "ray.experimental.internal_kv",
    "ray.util.client",
    "ray.util.client.ray_client_helpers",
)
IMPORT_ONLY = {
    "ray._private.accelerators": ("TPUAcceleratorManager",),
    "ray._private.client_mode_hook": ("enable_client_mode",),
    "ray._private.utils": ("DeferSigint",),
}
_OWN = __package__  # troupe.ray


class RefusedAttribute(NotImplementedError, AttributeError):
    """The error of an absent name: a NotImplementedError for code that uses it, an AttributeError for hasattr and
    getattr with a default."""


class RefusedImport(NotImplementedError, ModuleNotFoundError):
    """The error of importing an absent module, or an absent name of a package. Code that takes a module to be optional
    catches it as ImportError."""


def refuse(feature: str, instead: str) -> NotImplementedError:
    """Returns the error for a feature that this package does not support."""
    return NotImplementedError(f"{feature} is not in troupe.ray; nearest in Troupe: {instead}")


def refuse_attribute(feature: str, instead: str) -> RefusedAttribute:
    return RefusedAttribute(str(refuse(feature, instead)))


def absent(module: str, name: str) -> AttributeError:
    """Returns the error for the attribute of a module of this package that does not exist."""
    if name.startswith("__"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    in_ray = f"ray{module.removeprefix(_OWN)}.{name}"
    return refuse_attribute(in_ray, _nearest(in_ray))


class ImportOnly:
    """A name that can be imported; its use is refused."""

    def __init__(self, name: str) -> None:
        self.__name = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise refuse(self.__name, _nearest(self.__name))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refuse_attribute(f"{self.__name}.{name}", _nearest(self.__name))


def import_only(module: str, name: str) -> ImportOnly:
    """Returns the stand-in for a name that can only be imported from a module of this package, or raises the error of
    an absent one."""
    in_ray = f"ray{module.removeprefix(_OWN)}"
    if name.startswith("__") or (in_ray not in IMPORT_ONLY_MODULES and name not in IMPORT_ONLY.get(in_ray, ())):
        raise absent(module, name)
    return ImportOnly(f"{in_ray}.{name}")


def _nearest(name: str) -> str:
    while name:
        if name in NEAREST:
            return NEAREST[name]
        name = name.rpartition(".")[0]
    return "docs/ray.md lists what there is"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, for modules that no other finder has. `import ray.data` fails with RefusedImport. A look that imports
    nothing (importlib.util.find_spec), by which programs see whether Ray has a module, still finds none."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(_OWN + "."):
            own, name = name, "ray" + name[len(_OWN) :]
            if name in IMPORT_ONLY_MODULES:
                packages = {module.rpartition(".")[0] for module in IMPORT_ONLY_MODULES}
                return importlib.machinery.ModuleSpec(own, self, is_package=name in packages)
        elif not name.startswith("ray.") or sys.modules.get("ray") is not sys.modules[_OWN]:
            return None
        if sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":  # an import, by its caller in importlib
            # Without the module's name: with it, `from ray import data` would take the error for a missing attribute.
            raise RefusedImport(str(refuse(name, _nearest(name))))
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Fills a module of which the import alone succeeds."""
        module.__getattr__ = lambda name: import_only(module.__name__, name)  # type: ignore[method-assign]


def install() -> None:
    """Makes imports of absent modules fail with RefusedImport."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
