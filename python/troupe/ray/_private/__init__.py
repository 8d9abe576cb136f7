"""The private names of Ray that programs import. Each module documents its own."""

import importlib

from .._refused import absent

_MODULES = (
    "accelerators",
    "async_compat",
    "client_mode_hook",
    "log_monitor",
    "profiling",
    "ray_constants",
    "ray_logging",
    "runtime_env",
    "services",
    "state",
    "utils",
    "worker",
)


def __getattr__(name: str) -> object:
    """Imports a module of this package on first use."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise absent(__name__, name)
