"""Checks of arguments. Each raises InvalidError that names the argument, the given value and what is expected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from . import _errors


def seconds(name: str, value: Any, *, zero: bool = False) -> float | None:
    """Checks a number of seconds, or None for no limit."""
    if value is None:
        return None
    if isinstance(value, bool) or (not isinstance(value, (int, float)) and not _is_number(value)):
        raise _errors.InvalidError(
            f"{name}={value!r} is of type {type(value).__name__}; give a number of seconds, or None for no limit"
        )
    if math.isnan(value) or value < 0 or (value == 0 and not zero):
        raise _errors.InvalidError(
            f"{name}={value!r} must be {'zero or positive' if zero else 'positive'}, or None for no limit"
        )
    return float(value)


def integer(name: str, value: object, least: int = 0) -> int:
    """Checks an integer of at least `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _errors.InvalidError(
            f"{name}={value!r} is of type {type(value).__name__}; give a whole number of at least {least}"
        )
    number = int(value.__index__())
    if number < least:
        raise _errors.InvalidError(f"{name}={value!r} must be a whole number of at least {least}")
    return number


def number(name: str, value: Any, *, unit: str = "") -> float:
    """Checks a finite number that is zero or positive."""
    if (
        isinstance(value, bool)
        or (not isinstance(value, (int, float)) and not _is_number(value))
        or not math.isfinite(value)
        or value < 0
    ):
        raise _errors.InvalidError(
            f"{name}={value!r} must be a finite number{f' of {unit}' if unit else ''}, zero or positive"
        )
    return float(value)


def thousandths(name: str, value: Any) -> int:
    """Converts a number of devices or CPUs to thousandths; more than three decimals are an error."""
    amount = round(number(name, value) * 1000)
    if abs(amount - float(value) * 1000) > 1e-6:
        raise _errors.InvalidError(f"{name}={value!r} has more than three decimals: shares are counted in thousandths")
    return amount


def devices(name: str, value: object) -> int:
    """Converts a number of devices to thousandths; it must be whole, or less than one."""
    amount = thousandths(name, value)
    if amount > 1000 and amount % 1000:
        raise _errors.InvalidError(
            f"{name}={value!r} must be a whole number of devices, or less than one: a share is of a single device"
        )
    return amount


def resources(name: str, value: object) -> dict[str, int]:
    """Converts amounts of resources that nodes declare by name to thousandths."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _errors.InvalidError(
            f"{name}={value!r} is of type {type(value).__name__}; give a dict such as {{'licence': 1}}"
        )
    for key in value:
        if key in ("CPU", "GPU", "memory"):
            raise _errors.InvalidError(
                f"{name} has {key!r}, which has a setting of its own: num_cpus, num_gpus, memory, in WorkerConfig "
                "with _per_worker"
            )
    return {text(name, key): thousandths(f"{name}[{key!r}]", amount) for key, amount in value.items()}


_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def memory(name: str, value: object) -> int:
    """Converts an amount of memory, a number or text with a unit such as "4GiB", to bytes."""
    if isinstance(value, str):
        digits = value.rstrip("BKMGTi ")
        unit = value[len(digits) :].strip()
        try:
            return int(float(digits) * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            raise _errors.InvalidError(
                f'{name}={value!r} is no amount of memory; give bytes, or text such as "4GiB"'
            ) from None
    return int(number(name, value, unit="bytes"))


def flag(name: str, value: object) -> bool:
    """Checks that a value is True or False."""
    if not isinstance(value, bool):
        raise _errors.InvalidError(f"{name}={value!r} must be True or False")
    return value


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _errors.InvalidError(f"{name}={value!r} is of type {type(value).__name__}; give text")
    return value


def modules(name: str, value: object) -> list[str]:
    """Checks a list of module names."""
    if (
        isinstance(value, str)
        or not isinstance(value, Iterable)
        or not all(isinstance(v, str) and all(p.isidentifier() for p in v.split(".")) for v in value)
    ):
        raise _errors.InvalidError(f'{name}={value!r} must be a list of names of modules, such as ["torch"]')
    return list(value)


def _is_number(value: object) -> bool:
    """Returns whether a value of another library, such as a numpy scalar, is a real number."""
    return (
        hasattr(value, "__float__")
        and hasattr(value, "__lt__")
        and not hasattr(value, "__len__")
        and not isinstance(value, str)
    )


def suggestion(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Returns `; did you mean …?` if a name resembles a known one, otherwise an empty string."""
    import difflib

    near = difflib.get_close_matches(name, list(known), 1, likeness)
    return f"; did you mean {near[0]!r}?" if near else ""
