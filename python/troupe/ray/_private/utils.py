"""ray._private.utils: small helpers."""

from __future__ import annotations

import importlib
import os
import tempfile

from .._refused import import_only


def get_ray_doc_version() -> str:
    """Returns the version part of a documentation URL."""
    version = str(importlib.import_module(__name__.rpartition("._private")[0]).__version__)
    return "master" if "dev" in version else f"releases-{version}"


def hex_to_binary(text: str) -> bytes:
    return bytes.fromhex(text)


def binary_to_hex(data: bytes) -> str:
    return data.hex()


def get_num_cpus(*args: object, **kwargs: object) -> int:
    return os.cpu_count() or 1


def get_ray_temp_dir() -> str:
    return os.path.join(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray")


def __getattr__(name: str) -> object:
    return import_only(__name__, name)
