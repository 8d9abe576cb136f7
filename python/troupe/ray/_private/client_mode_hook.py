"""Hooks of Ray Client, which is not supported: client mode is always off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

is_client_mode_enabled = False


def client_mode_should_convert(*args: Any, **kwargs: Any) -> bool:
    return False


def client_mode_hook(func: Any = None, **kwargs: Any) -> Any:
    return func if func is not None else lambda f: f


@contextmanager
def disable_client_hook() -> Iterator[None]:
    yield
