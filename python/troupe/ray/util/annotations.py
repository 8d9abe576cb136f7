"""Decorators that mark the stability of an API; they have no effect."""

from __future__ import annotations


class RayDeprecationWarning(DeprecationWarning):
    pass


def _mark(*args: object, **kwargs: object) -> object:
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda marked: marked


PublicAPI = DeveloperAPI = Deprecated = RayInternal = _mark
