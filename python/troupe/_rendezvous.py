"""How the ranks of a role find each other: a store of keys on which others wait, also as init_method="troupe://" of
torch.distributed. The store is in Go (roles/rendezvous); torch is imported by its users alone."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import _core, _errors, _seam

if TYPE_CHECKING:
    import types
    from datetime import timedelta

_MODULE = "torch.distributed.rendezvous"
_TIMEOUT = 300.0


class Rendezvous:
    """The ranks of this worker's role, in one epoch of its membership: keys with values, which any of them sets and
    others wait for. All ranks call troupe.rendezvous(name). After a rank was replaced or the role was resized, every
    method raises MembershipChanged; then all call troupe.rendezvous(name) again, and find none of the old keys."""

    __slots__ = ("_core", "_where", "epoch", "name", "rank", "timeout", "world_size")

    def __init__(self, name: str, timeout: float, rank: int) -> None:
        self.name, self.timeout, self.rank = name, timeout, rank
        self._core = _core.get()
        self._where: dict[str, Any] = {"group": name, "epoch": None, "round": None}
        joined = self._ask("join", timeout=timeout)
        self.epoch: int = joined["epoch"]
        self.world_size: int = joined["world"]
        self._where.update(epoch=self.epoch, round=joined["round"])

    def _ask(
        self,
        verb: str,
        keys: Sequence[str] | None = None,
        values: Sequence[bytes] | None = None,
        delta: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        limit = self.timeout if timeout is None else timeout
        request = _seam.rendezvous(
            verb=verb, keys=keys, values=values, delta=delta, waits=timeout is not None, timeout=limit, **self._where
        )
        answer: dict[str, Any] = self._core.ask(request).get()
        return answer

    def set(self, key: str, value: str | bytes) -> None:
        self.set_many([key], [value])

    def set_many(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask("set", keys, [_bytes(value) for value in values])

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """Waits until the key is set, and returns its value."""
        return self.get_many([key], timeout)[0]

    def get_many(self, keys: Sequence[str], timeout: float | None = None) -> list[bytes]:
        """Waits until all keys are set, and returns their values."""
        if not keys:
            return []
        got: list[bytes] = self._ask("get", keys, timeout=self.timeout if timeout is None else timeout)["values"]
        return got

    def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
        """Waits until all keys are set."""
        if keys:
            self._ask("check", keys, timeout=self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are set now."""
        return not keys or bool(self._ask("check", keys).get("there"))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which begins at 0, and returns the sum."""
        return int(self._ask("add", [key], delta=amount).get("number", 0))

    def append(self, key: str, value: str | bytes) -> None:
        """Adds to the end of a value, which begins empty."""
        self._ask("append", [key], [_bytes(value)])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets the key to the desired value if it has the expected one, or is not set and the expected one is empty.
        Returns the value that it has then, or the expected one if it is not set."""
        got = self._ask("swap", [key], [_bytes(expected), _bytes(desired)]).get("values")
        return bytes(got[0] or b"") if got else b""

    def delete(self, key: str) -> bool:
        """Removes the key, and returns whether it was set."""
        return bool(self._ask("delete", [key]).get("there"))

    def __len__(self) -> int:
        return int(self._ask("count").get("number", 0))

    def __repr__(self) -> str:
        return f"<troupe.Rendezvous {self.name!r}: rank {self.rank} of {self.world_size}, epoch {self.epoch}>"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


_rank: int | None = None  # of the worker of this process


def become(rank: int) -> None:
    """Makes init_method="troupe://" known to torch.distributed in this worker process, once that is imported."""
    global _rank
    _rank = rank
    if _MODULE in sys.modules:
        _register(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def rendezvous(name: str = "default", *, timeout: float = _TIMEOUT) -> Rendezvous:
    """Joins the ranks of this worker's role under a name: all of them call this, and may then find each other by the
    keys that they set. The timeout, in seconds, is for this call and each wait. It returns before the others have
    joined."""
    if _rank is None:
        raise _errors.InvalidError("troupe.rendezvous() works in workers alone: their ranks find each other by it")
    return Rendezvous(name, timeout, _rank)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch's module of rendezvous in its usual place, and has our scheme registered after loading."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # the next finder finds it
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs the module's own loader, and then registers our scheme."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)


def _register(module: Any) -> None:
    if "troupe" not in module._rendezvous_handlers:
        module.register_rendezvous_handler("troupe", _handle)


def _handle(url: str, timeout: timedelta | None = None, **_: object) -> Iterator[tuple[Any, int, int]]:
    """Gives torch the store, the rank and the size of the world for troupe:// or troupe://name. Ranks and sizes that
    the program gives must be those of the role."""
    from urllib.parse import parse_qsl, urlsplit

    parts = urlsplit(url)
    found = rendezvous(parts.netloc or "default", timeout=_TIMEOUT if timeout is None else timeout.total_seconds())
    given = dict(parse_qsl(parts.query))
    for name, own in (("rank", found.rank), ("world_size", found.world_size)):
        if int(given.get(name, -1)) not in (-1, own):
            raise _errors.InvalidError(
                f"init_process_group({name}={given[name]}, init_method={url.split('?')[0]!r}): the {name} of this "
                f"worker in its role is {own}; leave it out, or use another init_method for a part of the role"
            )
    yield _store(found), found.rank, found.world_size
    raise _errors.InvalidError("troupe:// forms a group once; call init_process_group again after a change")


_store_class: Any = None
_stores: dict[str, Any] = {}  # by name, the last one: torch keeps the C++ part of a store alone


def _store(found: Rendezvous) -> Any:
    """Returns the rendezvous as a torch.distributed.Store."""
    global _store_class
    if _store_class is None:
        _store_class = _make_store_class()
    _stores[found.name] = _store_class(found)
    return _stores[found.name]


def _make_store_class() -> Any:
    import datetime

    import torch.distributed as dist

    class TroupeStore(dist.Store):  # type: ignore[misc]  # torch is not there when this is checked
        """torch finds these methods by name. Keys and values are those of the rendezvous."""

        def __init__(self, found: Rendezvous) -> None:
            super().__init__()
            self.rendezvous = found
            self.set_timeout(datetime.timedelta(seconds=found.timeout))

        def _limit(self) -> float:
            return float(self.timeout.total_seconds())

        def set(self, key: str, value: str | bytes) -> None:
            self.rendezvous.set(key, value)

        def get(self, key: str) -> bytes:
            return self.rendezvous.get(key, self._limit())

        def add(self, key: str, value: int) -> int:
            return self.rendezvous.add(key, value)

        def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
            return self.rendezvous.compare_set(key, expected, desired)

        def append(self, key: str, value: str | bytes) -> None:
            self.rendezvous.append(key, value)

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return self.rendezvous.get_many(keys, self._limit())

        def multi_set(self, keys: list[str], values: list[Any]) -> None:
            self.rendezvous.set_many(keys, values)

        def has_extended_api(self) -> bool:
            return True

        def check(self, keys: list[str]) -> bool:
            return self.rendezvous.check(keys)

        def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
            self.rendezvous.wait(keys, self._limit() if timeout is None else timeout.total_seconds())

        def delete_key(self, key: str) -> bool:
            return self.rendezvous.delete(key)

        def num_keys(self) -> int:
            return len(self.rendezvous)

        def clone(self) -> Any:
            return self

        deleteKey, getNumKeys = delete_key, num_keys  # torch's C++ calls them by these names

    return TroupeStore
