"""Hooks of Ray Client, which is not supported: client mode is always off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .._refused import import_only

is_client_mode_enabled = False


def client_mode_should_convert(*args: object, **kwargs: object) -> bool:
    return False


def client_mode_hook(func: object = None, **kwargs: object) -> object:
    return func if func is not None else lambda f: f


@contextmanager
def disable_client_hook() -> Iterator[None]:
    yield


def __getattr__(name: str) -> object:
    return import_only(__name__, name)
