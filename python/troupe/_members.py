"""The membership of a role: its epoch, its replicas, and how they change."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import _deaths, _errors, _seam
from ._future import Asked


class Member(NamedTuple):
    """One rank of a role."""

    rank: int
    replica: int  # its data-parallel index
    node: str
    pid: int  # 0: unknown
    state: str  # ready, restarting, lost or removed
    generation: int  # grows when the rank gets another process


class Membership(NamedTuple):
    """The ranks of a role in one epoch. The epoch grows when ranks have been added or replaced and take calls, or were
    removed; the cause says why."""

    role: str
    epoch: int
    cause: str
    members: tuple[Member, ...]  # by rank

    @property
    def replicas(self) -> tuple[tuple[Member, ...], ...]:
        """The members of each replica, in order."""
        count = 1 + max((m.replica for m in self.members), default=-1)
        return tuple(tuple(m for m in self.members if m.replica == index) for index in range(count))


class MembershipChange(NamedTuple):
    """A new membership, and what has changed since the one before. A rank that was replaced has come and left, with two
    generations."""

    now: Membership
    came: tuple[Member, ...]
    left: tuple[Member, ...]


def read(told: Mapping[str, Any]) -> Membership:
    members = tuple(Member(**member) for member in told["members"] or [])
    return Membership(told["role"], told["epoch"], told["cause"], members)


def _lacking(before: Membership, after: Membership) -> tuple[Member, ...]:
    known = {(m.rank, m.generation) for m in before.members}
    return tuple(m for m in after.members if (m.rank, m.generation) not in known)


def watch(
    cluster: _deaths.Role, before: Membership, callback: Callable[[MembershipChange], object]
) -> Callable[[], None]:
    """Calls the callback for each new membership, on a dedicated thread, until the returned function is called or the
    role ends. The core reports through the side queue, so that threads that make calls are not woken."""
    told: queue.SimpleQueue[Membership | None] = queue.SimpleQueue()
    stopped = threading.Event()
    opened = cluster._open()
    cluster._core.share_side()

    def ask(epoch: int) -> None:
        with opened._core.beside():
            asked = Asked(opened._core, _seam.changed(cluster=opened._id, epoch=epoch))
        asked.add_done_callback(lambda done: told.put(None if done._error is not None else read(done._value)))

    def run(before: Membership) -> None:
        while (now := told.get()) is not None and not stopped.is_set():
            try:
                callback(MembershipChange(now, _lacking(before, now), _lacking(now, before)))
            except Exception as err:
                what = f"{type(err).__name__}: {_errors.text_of(err)}"
                warnings.warn(f"a callback for changes of {cluster.name} raised {what}", RuntimeWarning, stacklevel=2)
            before = now
            ask(now.epoch)

    ask(before.epoch)
    threading.Thread(target=run, args=(before,), daemon=True, name=f"troupe-members-{cluster.name}").start()
    return stopped.set
