"""Checks for async functions and methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def is_async_func(func: Callable[..., object]) -> bool:
    """Returns whether calling func returns a coroutine or an async generator."""
    function = inspect.unwrap(func)
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def has_async_methods(cls: object) -> bool:
    """Returns whether any method is async, including inherited ones."""
    return any(
        is_async_func(member)
        for _, member in inspect.getmembers(
            cls, predicate=lambda m: inspect.isfunction(inspect.unwrap(m)) if callable(m) else False
        )
    )


def sync_to_async(func: Any) -> Any:
    """Wraps a function in a coroutine function; returns an async function unchanged."""
    if is_async_func(func):
        return func

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return wrapper
