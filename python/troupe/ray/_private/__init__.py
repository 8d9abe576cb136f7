"""The private names of Ray that programs import; modules of this package list what each does."""

import importlib
from typing import Any

_MODULES = ("async_compat", "client_mode_hook", "log_monitor", "profiling", "ray_constants", "runtime_env", "services", "state", "utils", "worker")


def __getattr__(name: str) -> Any:
    """A module of this package, which need not be imported before."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; see docs/ray.md")
