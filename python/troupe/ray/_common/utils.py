"""ray._common.utils."""

from __future__ import annotations

import asyncio

from .._private.utils import binary_to_hex, get_ray_doc_version, hex_to_binary

__all__ = ["binary_to_hex", "get_or_create_event_loop", "get_ray_doc_version", "hex_to_binary"]


def get_or_create_event_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.new_event_loop()
