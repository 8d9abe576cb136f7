"""An exception of a task or of an actor's method, as its callers receive it."""

from __future__ import annotations

import os
import traceback

from . import _process_title, _serialize, _state, exceptions


def wrap(title: str, err: BaseException, state: _state.State) -> BaseException:
    """Wraps an exception as callers receive it, with the traceback of this process."""
    frames = traceback.extract_tb(err.__traceback__)
    here = os.path.dirname(os.path.abspath(__file__))
    shown = [f for f in frames if not os.path.abspath(f.filename).startswith(here)] or frames
    text = "".join(traceback.format_list(shown)) + "".join(traceback.format_exception_only(type(err), err))
    instance = getattr(getattr(state, "host", None), "instance", None)
    shown_actor = _shown(instance) if instance is not None else None
    of_actor = f", actor_id={state.actor_id}, repr={shown_actor}" if shown_actor is not None else ""
    text = text.replace("troupe.ray.exceptions.", "ray.exceptions.")
    name = (
        title.rpartition("<locals>.")[2] if instance is not None else _process_title.get_title().removeprefix("ray::")
    )
    head = f"ray::{name}() (pid={os.getpid()}, ip={state.node_ip}{of_actor})"
    cause: BaseException = err
    if isinstance(err, exceptions.RayTaskError):
        cause = err.cause
    try:
        _serialize.loads(_serialize.dumps(cause)[0])
    except Exception as why:
        cause = _unpicklable(cause, why)
    return exceptions.RayTaskError(
        title,
        f"{head}\n{text}",
        cause,
        _process_title.get_title(),
        os.getpid(),
        state.node_ip,
        shown_actor,
        state.actor_id,
    )


def _shown(instance: object) -> str:
    try:
        return repr(instance)
    except Exception:
        return object.__repr__(instance)


def _unpicklable(cause: BaseException, why: BaseException) -> BaseException:
    """Replaces an exception that cannot be pickled by an instance of its nearest built-in base class with the same
    message."""
    for base in type(cause).__mro__:
        if base.__module__ == "builtins" and issubclass(base, Exception):
            try:
                return base(str(cause))
            except Exception:
                continue
    return exceptions.UnserializableException(f"{type(cause).__name__}: {cause} ({why})")
