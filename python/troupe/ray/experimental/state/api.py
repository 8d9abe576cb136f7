"""The functions of ray.util.state under their old module name; rows are dicts."""

from __future__ import annotations

from typing import Any

from ...util import state as _new


def get_actor(id: str, *args: object, **kwargs: object) -> dict[str, object] | None:
    found = _new.get_actor(id)
    return None if found is None else found.asdict()


def list_actors(*args: Any, **kwargs: Any) -> list[dict[str, object]]:
    return [row.asdict() for row in _new.list_actors(*args, **kwargs)]


def list_nodes(*args: Any, **kwargs: Any) -> list[dict[str, object]]:
    return [row.asdict() for row in _new.list_nodes(*args, **kwargs)]


def list_placement_groups(*args: Any, **kwargs: Any) -> list[dict[str, object]]:
    return [row.asdict() for row in _new.list_placement_groups(*args, **kwargs)]


def list_tasks(*args: Any, **kwargs: Any) -> list[dict[str, object]]:
    return [row.asdict() for row in _new.list_tasks(*args, **kwargs)]


def list_workers(*args: Any, **kwargs: Any) -> list[dict[str, object]]:
    return [row.asdict() for row in _new.list_workers(*args, **kwargs)]


def list_objects(*args: Any, **kwargs: Any) -> list[dict[str, object]]:
    return [row.asdict() for row in _new.list_objects(*args, **kwargs)]


list_jobs = _new.list_jobs
