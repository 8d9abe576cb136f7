"""@register, Dispatch and Execute: how a worker's method declares the handling of its calls."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from . import _errors

F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(str, enum.Enum):
    """Which ranks get which part of the arguments, and which answers are returned."""

    RANK_ZERO = "RANK_ZERO"
    ONE_TO_ALL = "ONE_TO_ALL"
    ONE_TO_ALL_ONE = "ONE_TO_ALL_ONE"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_MP_COMPUTE = "DP_MP_COMPUTE"
    DP_MP_DISPATCH_FIRST = "DP_MP_DISPATCH_FIRST"
    DP_MP_DISPATCH_FIRST_COLLECT_ALL = "DP_MP_DISPATCH_FIRST_COLLECT_ALL"


class Execute(str, enum.Enum):
    """The ranks that run a method whose dispatch mode does not specify them."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


class Scatter:
    """Marks a list with one element per rank, or, in the DP modes, per data-parallel rank. Each rank gets its own
    element."""

    __slots__ = ("values",)

    def __init__(self, values: Iterable[object]) -> None:
        self.values = list(values)


class Broadcast:
    """Marks an argument that every called rank gets unchanged, even if its type would be split."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Split:
    """Marks an argument that is split along its first axis."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def register(
    dispatch_mode: Dispatch | str = Dispatch.ONE_TO_ALL,
    execute_mode: Execute | str = Execute.ALL,
    *,
    lane: str = "work",
    concurrency: int = 0,
    replay: bool = False,
    share: bool = False,
) -> Callable[[F], F]:
    """Makes a worker's method a method of its cluster.

    - dispatch_mode, execute_mode: which ranks are called and how arguments are split; see Dispatch and Execute.
    - lane="control": the method runs beside others, on a thread of its own. Use it for status and abort.
    - concurrency=n: n calls of the method run at once, on threads.
    - replay=True: a restarted worker is first called with the arguments of the last successful call. Use it for methods
      that set up a worker, such as initialize.
    - share=True: device tensors that the method returns are not copied. The class must not write to them until the
      callers have taken or dropped them.
    """
    try:
        mode = Dispatch(dispatch_mode)
        execute = Execute(execute_mode)
    except ValueError as err:
        known = ", ".join(m.value for m in Dispatch)
        raise _errors.InvalidError(
            f"{err}: the dispatch modes are {known}; the execute modes ALL and RANK_ZERO"
        ) from None
    if execute is Execute.RANK_ZERO:
        if mode not in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
            raise _errors.InvalidError(
                f"execute_mode RANK_ZERO runs on one rank, and {mode.value} sends to many; leave one of them out"
            )
        mode = Dispatch.RANK_ZERO
    if lane not in ("work", "control"):
        raise _errors.InvalidError(
            f'there is no lane {lane!r}: "work" is serial, "control" runs beside it; for more at once give '
            "concurrency=n"
        )
    if concurrency < 0 or (concurrency and lane == "control"):
        raise _errors.InvalidError(
            "concurrency is a positive number, and not for the control lane, which has 64 places"
        )

    def mark(function: F) -> F:
        function._troupe = {  # type: ignore[attr-defined]
            "mode": mode.value,
            "lane": lane,
            "concurrency": concurrency,
            "replay": bool(replay),
            "share": bool(share),
        }
        return function

    return mark


def marks_of(cls: type) -> dict[str, dict[str, object]]:
    """Returns the marks of a class's registered methods. An override without a mark inherits that of the base class."""
    out = {}
    for name in dir(cls):
        if name.startswith("_"):
            continue
        function = getattr(cls, name, None)
        mark = getattr(function, "_troupe", None)
        if mark is None and callable(function):
            for base in cls.__mro__[1:]:
                mark = getattr(base.__dict__.get(name), "_troupe", None)
                if mark is not None:
                    break
        if mark is not None:
            out[name] = mark
    return out
