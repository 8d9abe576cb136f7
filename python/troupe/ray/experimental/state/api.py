"""The functions of ray.util.state under their old module name; rows are dicts."""

from __future__ import annotations

from typing import Any

from ...util import state as _new


def get_actor(id: str, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
    found = _new.get_actor(id)
    return None if found is None else found.asdict()


def list_actors(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return [row.asdict() for row in _new.list_actors(*args, **kwargs)]


def list_nodes(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return [row.asdict() for row in _new.list_nodes(*args, **kwargs)]


def list_placement_groups(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return [row.asdict() for row in _new.list_placement_groups(*args, **kwargs)]


list_tasks, list_workers, list_objects, list_jobs = _new.list_tasks, _new.list_workers, _new.list_objects, _new.list_jobs
