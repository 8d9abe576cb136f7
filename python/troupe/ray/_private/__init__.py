"""The private names of Ray that programs import. Each module documents its own."""

import importlib
from typing import Any

_MODULES = ("async_compat", "client_mode_hook", "log_monitor", "profiling", "ray_constants", "runtime_env", "services", "state", "utils", "worker")


def __getattr__(name: str) -> Any:
    """Imports a module of this package on first use."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; see docs/ray.md")
