"""A queue shared by processes; an async actor holds the items."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Empty(queue.Empty):
    pass


class Full(queue.Full):
    pass


class _QueueActor:
    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self.queue: asyncio.Queue[Any] = asyncio.Queue(maxsize)

    def qsize(self) -> int:
        return self.queue.qsize()

    def empty(self) -> bool:
        return self.queue.empty()

    def full(self) -> bool:
        return self.queue.full()

    async def put(self, item: object, timeout: float | None = None) -> None:
        try:
            await asyncio.wait_for(self.queue.put(item), timeout)
        except asyncio.TimeoutError:
            raise Full from None

    async def get(self, timeout: float | None = None) -> object:
        try:
            return await asyncio.wait_for(self.queue.get(), timeout)
        except asyncio.TimeoutError:
            raise Empty from None

    def put_nowait(self, item: object) -> None:
        try:
            self.queue.put_nowait(item)
        except asyncio.QueueFull:
            raise Full from None

    def put_nowait_batch(self, items: Sequence[object]) -> None:
        if self.maxsize > 0 and len(items) + self.qsize() > self.maxsize:
            raise Full(f"Cannot add {len(items)} items to queue of size {self.qsize()} and maxsize {self.maxsize}.")
        for item in items:
            self.queue.put_nowait(item)

    def get_nowait(self) -> object:
        try:
            return self.queue.get_nowait()
        except asyncio.QueueEmpty:
            raise Empty from None

    def get_nowait_batch(self, num_items: int) -> list[object]:
        if num_items > self.qsize():
            raise Empty(f"Cannot get {num_items} items from queue of size {self.qsize()}.")
        return [self.queue.get_nowait() for _ in range(num_items)]

    async def get_batch(
        self, batch_size: int | None, total_timeout: float | None, first_timeout: float | None
    ) -> list[object]:
        """Waits for the first item, then takes up to batch_size items, waiting for more until total_timeout seconds
        after the first."""
        items = [await self.get(first_timeout)]
        deadline = None if total_timeout is None else asyncio.get_running_loop().time() + total_timeout
        while batch_size is None or len(items) < batch_size:
            left = None if deadline is None else deadline - asyncio.get_running_loop().time()
            if self.queue.empty() and (left is None or left <= 0):
                break
            try:
                items.append(self.get_nowait() if not self.queue.empty() else await self.get(left))
            except Empty:
                break
        return items


class Queue:
    """A first-in, first-out queue. maxsize 0: unbounded. actor_options: options of the actor that holds the items."""

    def __init__(self, maxsize: int = 0, actor_options: Mapping[str, object] | None = None) -> None:
        from .. import remote

        self.maxsize = maxsize
        self.actor: Any = remote(_QueueActor).options(**{"num_cpus": 0, **(actor_options or {})}).remote(maxsize)

    def __len__(self) -> int:
        return self.size()

    def __getstate__(self) -> dict[str, object]:
        return {"maxsize": self.maxsize, "actor": self.actor}

    def size(self) -> int:
        from .. import get

        return int(get(self.actor.qsize.remote()))

    def qsize(self) -> int:
        return self.size()

    def empty(self) -> bool:
        from .. import get

        return bool(get(self.actor.empty.remote()))

    def full(self) -> bool:
        from .. import get

        return bool(get(self.actor.full.remote()))

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        """Adds an item. Raises Full if there is no room, at once or after the timeout."""
        from .. import get

        get(self.actor.put_nowait.remote(item) if not block else self.actor.put.remote(item, _timeout(timeout)))

    async def put_async(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        await (self.actor.put_nowait.remote(item) if not block else self.actor.put.remote(item, _timeout(timeout)))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Removes and returns an item. Raises Empty if there is none, at once or after the timeout."""
        from .. import get

        return get(self.actor.get_nowait.remote() if not block else self.actor.get.remote(_timeout(timeout)))

    async def get_async(self, block: bool = True, timeout: float | None = None) -> Any:
        return await (self.actor.get_nowait.remote() if not block else self.actor.get.remote(_timeout(timeout)))

    def put_nowait(self, item: object) -> None:
        self.put(item, block=False)

    def put_nowait_batch(self, items: Iterable[object]) -> None:
        """Adds all items, or none."""
        from .. import get

        if not isinstance(items, Iterable):
            raise TypeError("Argument 'items' must be an Iterable")
        get(self.actor.put_nowait_batch.remote(list(items)))

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def get_nowait_batch(self, num_items: int) -> list[Any]:
        """Removes and returns num_items items, or none."""
        from .. import get

        if not isinstance(num_items, int):
            raise TypeError("Argument 'num_items' must be an int")
        if num_items < 0:
            raise ValueError("'num_items' must be nonnegative")
        return list(get(self.actor.get_nowait_batch.remote(num_items)))

    def get_batch(
        self, batch_size: int | None = None, total_timeout: float | None = None, first_timeout: float | None = None
    ) -> list[Any]:
        """Removes and returns a batch. Waits up to first_timeout for the first item, and up to total_timeout for
        further ones."""
        from .. import get

        return list(get(self.actor.get_batch.remote(batch_size, total_timeout, first_timeout)))

    def shutdown(self, force: bool = False, grace_period_s: int = 5) -> None:
        """Ends the queue's actor: with force at once, otherwise after its running calls, but at most after
        grace_period_s."""
        from .. import kill, wait

        if self.actor is not None:
            if not force:
                done, _ = wait([self.actor.__ray_terminate__.remote()], num_returns=1, timeout=grace_period_s)
                force = not done
            if force:
                kill(self.actor, no_restart=True)
        self.actor = None


def _timeout(value: float | None) -> float | None:
    if value is not None and value < 0:
        raise ValueError("'timeout' must be a non-negative number")
    return value
