"""ray.timeline(): what the tasks and methods of this cluster did, from the flight recorders of their processes."""

from __future__ import annotations

import json
from typing import Any

from . import _processes, _session


def timeline(filename: str | None = None) -> list[dict[str, object]] | None:
    """Returns the executions of tasks, methods and constructors, and sections marked by profile or troupe.span, as
    events of the Chrome trace format, or writes them to a file."""
    if not _session.is_initialized():
        raise RuntimeError("Ray has not been started yet. Timeline requires Ray to be initialized first.")
    events = [event for lane, said in _processes.processes() for event in _events_of(lane, said)]
    if filename is None:
        return events
    with open(filename, "w") as f:
        json.dump(events, f)
    return None


def _events_of(lane: dict[str, Any], said: dict[str, Any]) -> list[dict[str, object]]:
    named = [(e, f"task::{name}", name.rpartition(".")[2]) for e, name, *_ in _processes.executions(lane, said)]
    named += [(e, e["name"], e["name"]) for e in lane["events"] if e["kind"] == "span"]
    process = lane["process"]
    return [
        {
            "cat": category,
            "name": name,
            "pid": process["host"],
            "tid": f"worker:{lane['role']}:{process['pid']}",
            "ts": event["begin_ns"] / 1e3,
            "dur": (event["end_ns"] - event["begin_ns"]) / 1e3,
            "ph": "X",
            "cname": "generic_work",
            "args": {"failed": event.get("failed", False), "running": event.get("open", False)},
        }
        for event, category, name in sorted(named, key=lambda found: found[0]["begin_ns"])
    ]
