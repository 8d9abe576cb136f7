"""ray._private.utils: small helpers."""

from __future__ import annotations

import importlib
from typing import Any


def get_ray_doc_version() -> str:
    """Returns the version part of a documentation URL."""
    version = str(importlib.import_module(__name__.rpartition("._private")[0]).__version__)
    return "master" if "dev" in version else f"releases-{version}"


def hex_to_binary(text: str) -> bytes:
    return bytes.fromhex(text)


def binary_to_hex(data: bytes) -> str:
    return data.hex()


def get_num_cpus(*args: Any, **kwargs: Any) -> int:
    import os

    return os.cpu_count() or 1
