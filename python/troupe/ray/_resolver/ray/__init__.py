"""Makes `import ray` import troupe.ray, and `import ray.x.y` troupe.ray.x.y, in every process that has this folder on
PYTHONPATH."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_TARGET = "troupe.ray"


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Resolves ray.x to troupe.ray.x; both names refer to one module object."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("ray."):
            return None
        try:
            found = importlib.util.find_spec(_TARGET + name[3:])
        except ModuleNotFoundError:
            return None
        return None if found is None else importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        parent, _, child = (_TARGET + spec.name[3:]).rpartition(".")
        before = getattr(importlib.import_module(parent), child, None)
        module = importlib.import_module(_TARGET + spec.name[3:])
        if callable(before):  # a function and a module share the name: the attribute stays the function
            setattr(sys.modules[parent], child, before)
            self._loaded[spec.name] = (module, module.__spec__, module.__name__, parent, child, before)
        else:
            self._loaded[spec.name] = (module, module.__spec__, module.__name__, "", "", None)
        return module

    def exec_module(self, module: object) -> None:
        for found, spec, name, parent, child, before in self._loaded.values():
            if found is module:
                module.__spec__, module.__name__ = spec, name
                if before is not None:
                    setattr(sys.modules[parent], child, before)


sys.meta_path.insert(0, _Alias())
_own = sys.modules.pop("ray", None)
sys.modules["ray"] = importlib.import_module(_TARGET)
for _name, _module in list(sys.modules.items()):
    if _name.startswith(_TARGET + "."):
        sys.modules.setdefault("ray" + _name[len(_TARGET) :], _module)

importlib.import_module("troupe.adapters._install").install_named(os.environ.get("TROUPE_RAY", ""))
