"""Whether a class has async methods."""

from __future__ import annotations

import inspect
from typing import Any


def is_async_func(func: Any) -> bool:
    """Whether a call of it gives a coroutine or an async generator."""
    function = inspect.unwrap(func)
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def has_async_methods(cls: object) -> bool:
    """Whether any method is async, inherited ones included."""
    return any(is_async_func(member) for _, member in inspect.getmembers(cls, predicate=lambda m: inspect.isfunction(inspect.unwrap(m)) if callable(m) else False))


def sync_to_async(func: Any) -> Any:
    """The function as a coroutine function; one that is already is returned as it is."""
    if is_async_func(func):
        return func

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return wrapper
