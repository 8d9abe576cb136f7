"""Replaces a framework's classes by an adapter's when the framework's module is imported, for unmodified programs."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import types
import warnings

# By adapter and module of the framework: the replaced names, and the adapter's names for them.
_REPLACED = {
    "verl": {
        "verl.single_controller.ray.base": {
            "RayWorkerGroup": "TroupeWorkerGroup",
            "RayResourcePool": "TroupeResourcePool",
        },
        "verl.single_controller.ray": {"RayWorkerGroup": "TroupeWorkerGroup", "RayResourcePool": "TroupeResourcePool"},
    },
    "roll": {
        "roll.distributed.executor.cluster": {"Cluster": "TroupeCluster"},
        "roll.distributed.scheduler.resource_manager": {"ResourceManager": "TroupeResourceManager"},
    },
}
ADAPTERS = tuple(_REPLACED)


_installed: set[str] = set()
_loading: dict[str, int] = {}  # by adapter, the nesting depth of imports of its framework's modules


def install_named(variable: str) -> None:
    """Installs the adapters named in the value of TROUPE_RAY."""
    for adapter in variable.split(",")[1:]:
        install(adapter)


def install(adapter: str) -> None:
    """Replaces the framework's classes by the adapter's in this process, in modules imported already and later."""
    if adapter in _installed:
        return
    _installed.add(adapter)
    sys.meta_path.insert(0, _Finder(adapter, set(_REPLACED[adapter])))
    there = [sys.modules[m] for m in _REPLACED[adapter] if m in sys.modules]
    early = [m.__name__ for m in there if getattr(m.__spec__, "_initializing", False)]
    if early:
        warnings.warn(
            f"{early[0]} is not replaced by troupe.adapters.{adapter}: it was the first to import ray here; import "
            "ray before it",
            stacklevel=2,
        )
    elif there:
        _replace(adapter)


def _replace(adapter: str) -> None:
    """Replaces the names in the modules that have been imported."""
    ours = importlib.import_module(f"troupe.adapters.{adapter}")
    for module, names in _REPLACED[adapter].items():
        for theirs, name in names.items():
            if hasattr(sys.modules.get(module), theirs) and hasattr(
                ours, name
            ):  # otherwise one is still being imported, and its end calls this
                setattr(sys.modules[module], theirs, getattr(ours, name))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the framework's modules in their usual place, and has their names replaced after loading."""

    def __init__(self, adapter: str, modules: set[str]) -> None:
        self._adapter, self._modules = adapter, modules

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._modules:
            return None
        self._modules.discard(name)  # the next finder finds it
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._adapter)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs the module's own loader, and then the replacement."""

    def __init__(self, loader: importlib.abc.Loader, adapter: str) -> None:
        self._loader, self._adapter = loader, adapter

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        _loading[self._adapter] = _loading.get(self._adapter, 0) + 1
        try:
            self._loader.exec_module(module)
        finally:
            _loading[self._adapter] -= 1
        if not _loading[self._adapter]:  # wait for the outermost import, because the adapter imports all of them
            _replace(self._adapter)
