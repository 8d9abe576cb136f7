"""The source of notebook cells. A worker cannot read them, so their source travels with the code, for tracebacks."""

from __future__ import annotations

import linecache
import re

from . import _codec


def dump(codec: _codec.Codec, code: object) -> bytes:
    """Pickles a class or a function, with the source of the cells that define it and what it refers to."""
    pickled = codec._dump(code)
    sources = _cells_in(pickled)
    return codec._dump(_WithSource(code, sources)) if sources else pickled


def _cells_in(pickled: bytes) -> dict[str, str]:
    """Returns, by file name, the source of the cells whose code a pickle contains."""
    cells = {
        name.encode("utf-8", "surrogatepass"): (name, "".join(entry[2]))
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[1] is None  # it has no file
    }
    found = re.findall(b"|".join(re.escape(name) for name in cells), pickled) if cells else []
    return dict(cells[name] for name in found)


class _WithSource:
    """Pickles as its code, which is unpickled as itself after its source has been registered."""

    def __init__(self, code: object, sources: dict[str, str]) -> None:
        self._code = code
        self._sources = sources

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self._code, self._sources)


def _restore(code: object, sources: dict[str, str]) -> object:
    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return code
