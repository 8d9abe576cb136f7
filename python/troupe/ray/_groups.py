"""Actor groups in the control service: actors that are the ranks of one role. _forming.py and _group_call.py are the client side.

The creator assigns each actor a group and a rank, and reports the size of the group after creating the last one. Each actor waits for its
own resources. When all have a node, the control service starts one role with a process for each. If an actor dies before that, or the
actors need different programs, the group is broken up and each remaining actor gets its own role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from .. import _deaths, _errors

_EXIT = 1.0  # seconds a process has to exit when told to
GENTLE_EXIT = 6.0  # the same for a process that runs its exit functions


class Process:
    """The description of a process to start, for an actor or for tasks."""

    def __init__(self, node: str, program: dict[str, Any], variables: dict[str, str], fields: dict[str, Any]) -> None:
        self.node = node
        self.program = program  # job, executable, directory, kind and concurrency groups; the same for all ranks of a role
        self.variables = variables  # environment variables
        self.fields = fields  # configuration for the RayHost


class Group:
    """An actor group being formed. It runs on the event loop of the control service."""

    def __init__(self, name: str, create: Callable[[str, list[Process]], Awaitable[Any]]) -> None:
        self.name = name
        self._create = create
        self._size = 0  # 0: not known yet
        self._broken = False
        self._joined: dict[int, Process] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._creating: asyncio.Task[None] | None = None

    def set_size(self, size: int) -> None:
        self._size = size
        if size < 2:
            self.break_up()
        self._start_if_complete()

    async def join(self, rank: int, process: Process) -> Any:
        """Waits until the group's role has started and returns the Rank; None if the actor needs its own role."""
        if self._broken:
            return None
        if any(p.program != process.program for p in self._joined.values()):
            self.break_up()
            return None
        self._joined[rank] = process
        self._waiting[rank] = asyncio.get_running_loop().create_future()
        self._start_if_complete()
        return await self._waiting[rank]

    def break_up(self) -> None:
        """Gives up the group: waiting actors get their own roles. Has no effect once the role is starting or running."""
        if self._creating is None:
            self._broken = True
            self._settle(lambda rank: None)

    def _start_if_complete(self) -> None:
        if self._size and len(self._joined) == self._size and not self._broken and self._creating is None:
            self._creating = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        try:
            cluster = await self._create(f"group-{self.name}", [self._joined[r] for r in range(self._size)])
        except Exception as err:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(err)
            return
        role = Role(cluster)
        self._settle(lambda rank: Rank(role, rank))

    def _settle(self, result: Callable[[int], Any]) -> None:
        for rank, waiting in self._waiting.items():
            if not waiting.done():
                waiting.set_result(result(rank))


class Role:
    """The running role of a group. When a rank dies, the others keep running; the role ends with the last rank."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        loop = asyncio.get_running_loop()
        self.deaths: list[asyncio.Future[_deaths.Death]] = [loop.create_future() for _ in range(cluster.world_size)]
        self._task = loop.create_task(self._watch())

    async def _watch(self) -> None:
        seen, ended = 0, False
        try:
            while not ended and not all(d.done() for d in self.deaths):
                deaths, seen, ended = await _deaths.since(self.cluster, seen)
                for death in deaths:
                    for rank in range(len(self.deaths)) if death.rank is None else [death.rank]:
                        self._died(rank, death)
        except _errors.Error:
            pass  # the session is ending
        for rank in range(len(self.deaths)):
            self._died(rank, _deaths.Death(self.cluster.name, None, 0, _errors.ClosedError(f"the role {self.cluster.name} has ended")))
        try:
            await self.cluster._core.ask("destroy", cluster=self.cluster._id).aget()
        except _errors.Error:
            pass  # already ended

    def _died(self, rank: int, death: _deaths.Death) -> None:
        if not self.deaths[rank].done():
            self.deaths[rank].set_result(death)


class Rank:
    """One rank of a group's role. The control service uses it as the cluster of one actor."""

    def __init__(self, role: Role, rank: int) -> None:
        self._role, self._rank = role, rank
        self.workers = [role.cluster.workers[rank]]

    async def died(self) -> _deaths.Death:
        return await asyncio.shield(self._role.deaths[self._rank])

    async def end(self, gentle: bool) -> None:
        """Asks the process to exit, and kills it with SIGKILL if it does not."""
        dead = self._role.deaths[self._rank]
        if dead.done():
            return
        try:
            self.workers[0]["exit"].remote(gentle)
        except _errors.Error:
            pass
        await asyncio.wait([dead], timeout=GENTLE_EXIT if gentle else _EXIT)
        if not dead.done():
            cluster = self._role.cluster
            try:
                await cluster._core.ask("kill", cluster=cluster._id, ranks=[self._rank]).aget()
            except _errors.Error:
                pass  # the role has ended
