"""The title of this process, as ps shows it."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_room: tuple[int, int] | None = None
_title = ""
_libc = ctypes.PyDLL(None)  # its calls keep the interpreter lock: they are short
_buffer: Any = None
_encoded: dict[str, tuple[bytes, bytes]] = {}  # by title, the command line and the name of the thread
_ENCODED = 1024  # titles that are kept


def _area() -> tuple[int, int]:
    """Where the kernel keeps the command line: the address and the size."""
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
    """Sets the title; a long one is cut to the room that the first command line left."""
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
