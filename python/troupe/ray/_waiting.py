"""get, wait and cancel: what a program does with references to objects."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

from .. import _core
from . import _context, _state, exceptions
from ._generators import ObjectRefGenerator
from ._objects import ERROR, Entry, ObjectRef, start_fetch
from ._peers import peer


def _refs(refs: Sequence[ObjectRef], what: str) -> list[ObjectRef]:
    for ref in refs:
        if not isinstance(ref, ObjectRef):
            raise ValueError(
                f"Invalid type of object refs, {type(ref)}, is given. '{what}' takes ray.ObjectRef or a list of them."
            )
    return list(refs)


def get(refs: object, *, timeout: float | None = None, _use_object_store: bool = False) -> Any:
    """Returns the value of a reference, or of each reference in a list, waiting as needed. Raises GetTimeoutError after
    the timeout."""
    state = _state.require()
    if isinstance(refs, ObjectRef):
        entry = refs._entry
        if timeout is not None:
            return _get_all(state, [refs], timeout)[0]
        if not entry._done:
            if entry.call is None:
                start_fetch(entry)
            if _context.current.get() is None:
                _core.get().wait(entry, None)
            else:
                with state.blocked():
                    _core.get().wait(entry, None)
        if entry.body is None:
            _load(state, [entry], None)
        return entry.value()
    if isinstance(refs, list) and refs and hasattr(refs[0], "_ray_get"):
        return _get_each(refs, timeout)
    if not isinstance(refs, (list, tuple)):
        wait_method = getattr(refs, "_ray_get", None)
        if wait_method is not None:
            return wait_method(timeout)
        raise ValueError(
            f"Invalid type of object refs, {type(refs)}, is given. 'object_refs' must either be an ObjectRef or a "
            "list of ObjectRefs. "
        )
    return _get_all(state, _refs(refs, "get"), timeout)


def _get_each(refs: list[Any], timeout: float | None) -> list[object]:
    """Returns the values of results of compiled graphs."""
    if not all(hasattr(ref, "_ray_get") for ref in refs):
        raise ValueError(
            "Invalid type of object refs. 'object_refs' must be a list of CompiledDAGRefs if there is any "
            "CompiledDAGRef within it. "
        )
    return [ref._ray_get(timeout) for ref in refs]


def _get_all(state: _state.State, refs: Sequence[ObjectRef], timeout: float | None) -> list[object]:
    if timeout is not None and timeout < 0:
        raise ValueError(f"timeout must be at least 0, not {timeout}")
    entries = [r._entry for r in refs]
    deadline = None if timeout is None else time.monotonic() + timeout
    missing = [e for e in entries if not e._done]
    if missing:
        for entry in missing:
            start_fetch(entry)
        _await_entries(state, entries, deadline, timeout)
    try:
        _load(state, [e for e in itertools.takewhile(_is_no_error, entries) if e.body is None], deadline)
        return [e.value() for e in entries]
    except BaseException:
        for entry in entries:
            entry.handled()
        raise


def _is_no_error(entry: Entry) -> bool:
    return entry.kind != ERROR


def _load(state: _state.State, entries: list[Entry], deadline: float | None) -> None:
    """Waits until this process has the frames of entries that are done, which come all at once."""
    for entry in entries:
        entry.start_pull()
    if entries:
        with state.blocked():
            for entry in entries:
                entry.load(deadline)


def _await_entries(state: _state.State, entries: list[Entry], deadline: float | None, timeout: float | None) -> None:
    """Waits for the entries in order, until all are done or one has failed."""
    core = _core.get()
    if _context.current.get() is None:
        _wait_for(core, entries, deadline, timeout)
        return
    with state.blocked():
        _wait_for(core, entries, deadline, timeout)


def _wait_for(core: _core.Core, entries: list[Entry], deadline: float | None, timeout: float | None) -> None:
    for entry in entries:
        if not entry._done and not core.wait(entry, deadline):
            raise exceptions.GetTimeoutError(f"Get timed out: some object(s) not ready within {timeout} s.")
        if entry.kind == ERROR:
            return


def wait(
    refs: object, *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[object], list[object]]:
    """Returns (ready, others), both in the order of the list; ready has at most num_returns references. A generator is
    ready when its next reference is, and at its end. Large values of other hosts begin to come here, unless fetch_local
    is false."""
    state = _state.require()
    if isinstance(refs, ObjectRef):
        raise TypeError("wait() expected a list of ray.ObjectRef or ObjectRefGenerator, got a single ray.ObjectRef")
    if not isinstance(refs, (list, tuple)):
        raise TypeError(f"wait() expected a list of ray.ObjectRef or ObjectRefGenerator, got {type(refs)}")
    if timeout is not None and timeout < 0:
        raise ValueError(f"The 'timeout' argument must be nonnegative. Received {timeout}")
    for ref in refs:
        if not isinstance(ref, (ObjectRef, ObjectRefGenerator)):
            raise TypeError(
                f"wait() expected a list of ray.ObjectRef or ObjectRefGenerator, got list containing {type(ref)}"
            )
    if len(set(refs)) != len(refs):
        raise ValueError("Wait requires a list of unique ray_waitables.")
    if num_returns <= 0:
        raise ValueError(f"Invalid number of objects to return {num_returns}.")
    if not refs:
        return [], []
    if num_returns > len(refs):
        raise ValueError("num_returns cannot be greater than the number of ray_waitables provided to ray.wait.")
    entries = [r._entry for r in refs]
    for entry in entries:
        start_fetch(entry)
    deadline = None if timeout is None else time.monotonic() + timeout
    if sum(e._done for e in entries) < num_returns:
        _core.get().look()
        _await_some(state, entries, num_returns, deadline)
    ready = [r for r, e in zip(refs, entries, strict=True) if e._done][:num_returns]
    for ref in ready if fetch_local else ():
        ref._entry.start_pull()
    chosen = set(ready)
    return ready, [r for r in refs if r not in chosen]


class _Count:
    """Becomes done when count of the entries are done."""

    def __init__(self, entries: list[Entry], count: int) -> None:
        self._done = False
        self._waiters: list[Any] = []
        self._left = count
        self._lock = threading.Lock()
        self._notices = [entry.on_done(self._one) for entry in entries]

    def close(self) -> None:
        """Stops waiting for the entries."""
        for notice in self._notices:
            notice.withdraw()
        self._notices = []

    def _one(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left > 0 or self._done:
                return
            self._done = True
        for wake in list(self._waiters):
            wake()


def wait_generators_bulk(
    ray_generators: object, *, num_return: int = 1, timeout: float | None = None
) -> list[tuple[ObjectRefGenerator, list[ObjectRef]]]:
    """Waits until so many of the generators have all the next references that are asked of them, as
    [(generator, [whether to fetch it, for each reference])]. Returns these generators with the references, which are
    taken."""
    if not isinstance(ray_generators, list):
        raise TypeError(f"_wait_generators_bulk() expected a list of (generator, list[bool]), got {ray_generators!r}")
    for pair in ray_generators:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"_wait_generators_bulk() expected (generator, list[bool]), got {pair!r}")
        if not isinstance(pair[0], ObjectRefGenerator) or not isinstance(pair[1], list):
            raise TypeError(f"_wait_generators_bulk() expected (ray.ObjectRefGenerator, list[bool]), got {pair!r}")
        if not pair[1]:
            raise ValueError("_wait_generators_bulk() expected a list[bool] that is not empty")
    peeked = [(generator, generator._get_next_ref_n(len(fetch))) for generator, fetch in ray_generators]
    ready = set(wait([refs[-1] for _, refs in peeked], num_returns=num_return, timeout=timeout)[0])
    found = [(generator, refs) for generator, refs in peeked if refs[-1] in ready]
    for generator, refs in found:
        generator._consume_next_ref_n(len(refs))
    fetched = [
        ref
        for (_, refs), (_, fetch) in zip(peeked, ray_generators, strict=True)
        for ref, f in zip(refs, fetch, strict=True)
        if f and refs[-1] in ready
    ]
    if fetched:
        wait(fetched, num_returns=len(fetched))
    return found


def _await_some(state: _state.State, entries: list[Entry], count: int, deadline: float | None) -> None:
    counter = _Count(entries, count)
    try:
        if not counter._done:
            with state.blocked():
                _core.get().wait(counter, deadline)
    finally:
        counter.close()


def cancel(ref: ObjectRef | ObjectRefGenerator, *, force: bool = False, recursive: bool = True) -> None:
    """Cancels a task or actor call; has no effect on one that is over. recursive: also cancels the calls it made."""
    state = _state.require()
    if isinstance(ref, ObjectRefGenerator):
        ref = ref.completed()
    if not isinstance(ref, ObjectRef):
        raise TypeError(f"ray.cancel() only supported for object refs. For compiled graphs, got: {type(ref)}")
    entry = ref._entry
    if entry._done:
        return
    call = entry.call
    if call is not None:
        call.cancel(force, recursive)
    elif entry.owner and entry.owner != state.process:
        peer(entry.owner).notify("cancel_object", entry.id, force, recursive)
