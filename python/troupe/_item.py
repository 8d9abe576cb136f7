"""Items that travel through a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Item:
    """One item of a pipeline: a value, and the attributes that stages use.

    In an output, omitted attributes (key, group, priority, version) are those of the input. `to` names the stream if
    the stage has several outputs. An item received from a stage or a take also has its attempt, whether it is stale,
    and its stream.
    """

    __slots__ = ("attempt", "group", "id", "key", "of", "priority", "stale", "stream", "to", "value", "version")

    def __init__(
        self, value: object = None, *, id: str = "", key: str = "", group: str = "", of: int = 0, priority: int = 0,
        version: float | None = None, to: str = "",
    ) -> None:  # fmt: skip
        self.value, self.id, self.key, self.group, self.of = value, id, key, group, of
        self.priority, self.version, self.to = priority, version, to
        self.attempt, self.stale, self.stream = 0, False, ""

    def _fields(self) -> dict[str, object]:
        """Returns the attributes that are set, under their wire names, without the value."""
        all_of_them = {"id": self.id, "key": self.key, "group": self.group, "of": self.of, "priority": self.priority}
        out = {name: value for name, value in all_of_them.items() if value}
        if self.version is not None:
            out["version"] = float(self.version)
        return out

    @classmethod
    def _of(cls, fields: Mapping[str, Any], value: Any) -> Item:
        known = ("id", "key", "group", "of", "priority", "version")
        item = cls(value, **{name: fields[name] for name in known if fields.get(name) is not None})
        item.attempt, item.stale, item.stream = (
            fields.get("attempt") or 0,
            bool(fields.get("stale")),
            fields.get("stream") or "",
        )
        return item

    def __repr__(self) -> str:
        said = "".join(f", {name}={value!r}" for name, value in self._fields().items())
        return f"Item({self.value!r}{said})"


def given(argument: Any) -> object:
    """Converts the argument of a stage's method to an Item, or to a list of them for a group."""
    if isinstance(argument, list):
        return [Item._of(fields, fields.get("body")) for fields in argument]
    return Item._of(argument, argument.get("body"))


def outputs(result: object) -> list[dict[str, object]]:
    """Converts the result of a stage's method to wire format: None is no output, a list is several outputs, anything
    else is one."""
    if result is None:
        return []
    out = []
    for one in result if isinstance(result, list) else [result]:
        item = one if isinstance(one, Item) else Item(one)
        out.append({**item._fields(), **({"to": item.to} if item.to else {}), "body": item.value})
    return out
