"""The title of this process, as shown by ps."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_title = ""
_prctl = ctypes.PyDLL(None).prctl  # PyDLL calls keep the GIL; these calls are short
_line: Any = None  # the process's command line in memory; False if it cannot be found
_encoded: dict[str, tuple[bytes, bytes]] = {}  # command line and thread name, by title
_ENCODED = 1024  # number of titles to cache


def _command_line() -> object:
    try:
        with open("/proc/self/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        size = int(fields[46]) - int(fields[45])
        return size > 1 and (ctypes.c_char * size).from_address(int(fields[45]))
    except (OSError, ValueError, IndexError):
        return False


def set_title(title: str) -> None:
    """Sets the title, truncated to the length of the original command line."""
    global _title, _line
    if title == _title:
        return
    _title = title
    found = _encoded.get(title)
    if found is None:
        if _line is None:
            _line = sys.platform == "linux" and _command_line()
        if not _line:
            return
        if len(_encoded) >= _ENCODED:
            _encoded.clear()
        text = title.encode()[: len(_line) - 1]
        found = _encoded[title] = (text + b"\0" * (len(_line) - len(text)), text[:15])
    _line.raw, name = found
    _prctl(15, name, 0, 0, 0)


def get_title() -> str:
    return _title or "python"
