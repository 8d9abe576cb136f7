"""Records of runs with a private head. `troupe status` and `troupe logs` find the head by them, and the output of the
last runs is kept."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

_KEPT = 5  # number of finished runs to keep
_KEPT_BYTES = 1 << 30  # bytes of their output to keep


def state_dir() -> str:
    """Returns the directory of files that outlive a process, the same as the command line's."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "troupe")


def create(namespace: str) -> str | None:
    """Creates a directory for a new run; returns None if that fails. Deletes finished runs except for the last few."""
    now = datetime.datetime.now(datetime.timezone.utc)
    runs = os.path.join(state_dir(), "runs")
    folder = os.path.join(runs, f"{now:%Y%m%d-%H%M%S}-{os.getpid()}")
    try:
        os.makedirs(folder, mode=0o700)
    except OSError:
        return None
    record(folder, {"driver_pid": os.getpid(), "namespace": namespace, "since": now.isoformat()})
    try:
        _prune(runs)
    except OSError:
        pass  # another process deletes them too
    return folder


def new_namespace() -> str:
    """Returns a namespace for one run: the name of the script, the time, and a random part."""
    script = os.path.splitext(os.path.basename(sys.argv[0] or ""))[0]
    name = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "-" for c in script).strip("-")[:32] or "run"
    now = datetime.datetime.now(datetime.timezone.utc)
    return f"{name}-{now:%m%d-%H%M%S}-{os.urandom(3).hex()}"


def record(folder: str, fields: Mapping[str, object]) -> None:
    """Adds fields to the record of a run. If the file cannot be written, the run goes on, but commands do not find
    it."""
    path = os.path.join(folder, "run.json")
    try:
        with open(path + ".new", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as f:
            json.dump({**_read(folder), **fields}, f)
        os.replace(path + ".new", path)
    except OSError:
        pass


def end(folder: str) -> None:
    """Marks the run as ended, or deletes its directory if there was no output."""
    import shutil  # imported in functions, because workers import this module and do not need it

    if not os.path.isdir(os.path.join(folder, "logs")):
        shutil.rmtree(folder, ignore_errors=True)
        return
    record(folder, {"ended": True})


def _read(folder: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, "run.json")) as f:
            fields: dict[str, Any] = json.load(f)
            return fields
    except (OSError, ValueError):
        return {}


def _prune(runs: str) -> None:
    import shutil

    kept = size = 0
    for name in sorted(os.listdir(runs), reverse=True):
        folder = os.path.join(runs, name)
        fields = _read(folder)
        if not fields.get("ended") and _lives(fields.get("pid") or fields.get("driver_pid") or 0):
            continue
        kept, size = kept + 1, size + _size(folder)
        if kept > _KEPT or size > _KEPT_BYTES:
            shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return pid > 0


def _size(folder: str) -> int:
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)
