"""The title of this process, as shown by ps."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_room: tuple[int, int] | None = None
_title = ""
_libc = ctypes.PyDLL(None)  # PyDLL calls keep the GIL; these calls are short
_buffer: Any = None
_encoded: dict[str, tuple[bytes, bytes]] = {}  # command line and thread name, by title
_ENCODED = 1024  # number of titles to cache


def _area() -> tuple[int, int]:
    """Returns the address and size of the process's command line in memory."""
    global _room
    if _room is None:
        try:
            with open("/proc/self/stat") as f:
                fields = f.read().rpartition(")")[2].split()
            _room = (int(fields[45]), int(fields[46]) - int(fields[45]))
        except (OSError, ValueError, IndexError):
            _room = (0, 0)
    return _room


def set_title(title: str) -> None:
    """Sets the title, truncated to the length of the original command line."""
    global _title, _buffer
    if title == _title:
        return
    _title = title
    if sys.platform != "linux":
        return
    found = _encoded.get(title)
    if found is None:
        if len(_encoded) >= _ENCODED:
            _encoded.clear()
        size = _area()[1]
        text = title.encode()[: max(size - 1, 0)]
        found = _encoded[title] = (text + b"\0" * (size - len(text)), text[:15])
    address, size = _area()
    if size < 2:
        return
    if _buffer is None:
        _buffer = (ctypes.c_char * size).from_address(address)
    _buffer.raw = found[0]
    _libc.prctl(15, found[1], 0, 0, 0)


def get_title() -> str:
    return _title or "python"
