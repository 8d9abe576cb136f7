"""Packages that a framework imports and the chosen tests do not use, by the names in FRAMEWORKS_ABSENT with commas
between them: they can be imported, and have whatever class is asked of them. What a class can do is nothing.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

_ABSENT = set(filter(None, os.environ.get("FRAMEWORKS_ABSENT", "").split(",")))


class _Empty(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name, cls.__module__)

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def _empty(name, module):
    return _Empty(name, (), {"__module__": module, "__init__": lambda self, *args, **kwargs: None})


class _Module(types.ModuleType):
    __path__ = ()
    __version__ = "99.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = _empty(name, self.__name__)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in _ABSENT else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


if _ABSENT:
    sys.meta_path.insert(0, _Finder())
