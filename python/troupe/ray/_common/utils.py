"""ray._common.utils."""

from __future__ import annotations

import asyncio

from .._private.utils import binary_to_hex, get_ray_doc_version, hex_to_binary

__all__ = ["binary_to_hex", "get_or_create_event_loop", "get_ray_doc_version", "hex_to_binary"]


def get_or_create_event_loop() -> asyncio.AbstractEventLoop:
    """Returns the running event loop, or else the event loop of the current thread, which is created if needed."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    try:
        return asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop
