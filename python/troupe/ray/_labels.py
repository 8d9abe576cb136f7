"""Labels of nodes: those that a node gets, and the terms by which actors, tasks and bundles choose nodes.

On the wire a selector is a list of terms [key, values, not], which a node matches if all of them hold, and `where` is a
list of selectors of which it must match one, the preferred one first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_NAME}")
_VALUE = re.compile(rf"({_NAME})?")
_SELECTOR = re.compile(rf"(!)?(?:in\(\s*({_NAME}(?:\s*,\s*{_NAME})*)\s*\)|({_NAME})?)")
_RULE = (
    "63 chars or less beginning and ending with an alphanumeric character ([a-z0-9A-Z]) with dashes (-), underscores "
    "(_), dots (.), and alphanumerics between."
)

IP_LABEL, HOST_LABEL = "ray-node-ip", "ray-node-host"  # of every node: the address and the host name that others see

Selector = list[dict[str, object]]


def term(key: str, values: Sequence[str] = (), opposite: bool = False) -> dict[str, object]:
    return {"key": key, "values": list(values), "not": opposite}


def check_labels(labels: object) -> dict[str, str]:
    """Returns the labels of a node, or raises the error of those that cannot be."""
    if labels is None:
        return {}
    if not isinstance(labels, Mapping):
        raise ValueError(f"labels must be a dictionary of texts, not {type(labels).__name__}")
    for key, value in labels.items():
        if not isinstance(key, str):
            raise ValueError("The key is not string type.")
        if not isinstance(value, str):
            raise ValueError(f'The value of "{key}" is not string type')
        _check_key(key)
        if not _VALUE.fullmatch(value):
            raise ValueError(f"Invalid label key value `{value}`. Value must be {_RULE}")
    return dict(labels)


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"Invalid label key name `{key}`. Name must be {_RULE}")


def selector(given: object, what: str = "label_selector") -> Selector:
    """Returns the terms of a label selector: {"region": "us", "zone": "!b", "gpu": "in(a, b)", "kind": "!in(c)"}."""
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise TypeError(f"The type of keyword '{what}' must be a dict, but received type {type(given)}")
    found = []
    for key, value in given.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"Invalid label selector provided: {given!r} is not a dictionary of texts")
        _check_key(key)
        match = _SELECTOR.fullmatch(value)
        if match is None:
            raise ValueError(
                f"Invalid label selector value `{value}`. The label selector value should contain optional operators "
                f"and a label value. Supported operators are: ! and ['in']. Value must be {_RULE}"
            )
        values = re.split(r"\s*,\s*", match[2]) if match[2] else [value.removeprefix("!")]
        found.append(term(key, values, bool(match[1])))
    return found


def where(options: Mapping[str, object]) -> list[Selector]:
    """Returns the alternatives that the options label_selector and fallback_strategy give."""
    first = selector(options.get("label_selector"))
    others = options.get("fallback_strategy") or []
    if not isinstance(others, list):
        raise TypeError(f"The type of keyword 'fallback_strategy' must be a list, but received type {type(others)}")
    found = [first]
    for one in others:
        if not isinstance(one, dict):
            raise ValueError("Each element in fallback_strategy must be a dictionary.")
        if not one:
            raise ValueError("Empty dictionary found in `fallback_strategy`.")
        if set(one) != {"label_selector"}:
            raise ValueError(
                f"Unsupported option found: '{min(set(one) - {'label_selector'})}'. Only ['label_selector'] is "
                "currently supported."
            )
        if not isinstance(one["label_selector"], dict):
            raise ValueError('The value of "label_selector" must be a dictionary.')
        found.append(selector(one["label_selector"]))
    return found if any(found) else []
