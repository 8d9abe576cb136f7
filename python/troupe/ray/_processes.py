"""What the processes of this cluster say of themselves, now: the source of ray.timeline() and of the tables of tasks,
objects and workers. A process takes its records with it when it ends."""

from __future__ import annotations

import json
from typing import Any

from .. import _seam
from .._session import current
from . import _peers, _state

_OWN = ("actor-", "group-", "worker-", "driver-")  # roles of this package
_PATIENCE = 10.0  # seconds for a process to answer


def processes(objects: bool = False) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns, of each process, the lane of the flight recorder and what it describes. objects: its objects too."""
    session = current(start=False)
    lanes = json.loads(session.core.ask(_seam.timeline(runtime=session.id)).get())["lanes"]
    found = [lane for lane in lanes if lane.get("role", "").startswith(_OWN)]
    asked = [_ask(lane, objects) for lane in found]
    described = [(lane, _described(reply)) for lane, reply in zip(found, asked, strict=True)]
    return [(lane, said) for lane, said in described if said is not None]


def _ask(lane: dict[str, Any], objects: bool) -> _state.Reply:
    reply = _state.Reply()
    name = lane["role"] if lane["role"].startswith("driver-") else f"{lane['role']}@{lane['rank']}"
    _peers.peer(name).ask("describe", (objects,), reply._finish)
    return reply


def _described(reply: _state.Reply) -> dict[str, Any] | None:
    try:
        return dict(reply.result(_PATIENCE))
    except Exception:
        return None  # the process has ended


def executions(lane: dict[str, Any], said: dict[str, Any]) -> list[tuple[dict[str, Any], str, str, bool]]:
    """Returns the executions of tasks, methods and constructors that the flight recorder has, each with its name, the
    id of the task, and whether it failed."""
    names = {f"{session}/{number}": fields for session, number, *fields in said["calls"]}
    runs = [e for e in lane["events"] if e["kind"] == "run" and e.get("call") in names]
    return [(e, *names[e["call"]]) for e in runs]
