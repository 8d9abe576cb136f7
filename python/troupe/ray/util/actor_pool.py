"""A pool of actors, each of which runs one call at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class ActorPool:
    """Distributes calls over idle actors. A dead actor leaves the pool; an actor whose call failed stays."""

    def __init__(self, actors: Iterable[object]) -> None:
        self._idle_actors: list[Any] = list(actors)
        self._future_to_actor: dict[
            Any, tuple[int, Any]
        ] = {}  # index and actor of each call, by its reference or tuple of references
        self._index_to_future: dict[int, Any] = {}
        self._next_task_index = 0
        self._next_return_index = 0
        self._pending_submits: list[tuple[Callable[[Any, Any], Any], Any]] = []

    def map(self, fn: Callable[[object, object], object], values: Iterable[object]) -> Iterator[object]:
        """Yields the results of fn(actor, value) in order. All values are submitted at once."""
        return self._map(fn, values, self.get_next)

    def map_unordered(self, fn: Callable[[object, object], object], values: Iterable[object]) -> Iterator[object]:
        """Yields the results as map does, but in order of completion."""
        return self._map(fn, values, self.get_next_unordered)

    def _map(
        self, fn: Callable[[object, object], object], values: Iterable[object], take: Callable[..., object]
    ) -> Iterator[object]:
        while self.has_next():  # discard untaken results of earlier submits
            try:
                self.get_next(timeout=0, ignore_if_timedout=True)
            except TimeoutError:
                pass
        for value in values:
            self.submit(fn, value)

        def results() -> Iterator[object]:
            while self.has_next():
                yield take()

        return results()

    def submit(self, fn: Callable[[object, object], object], value: object) -> None:
        """Calls fn(actor, value), which returns a reference, with an idle actor, or queues the call until an actor is
        idle."""
        if not self._idle_actors:
            self._pending_submits.append((fn, value))
            return
        actor = self._idle_actors.pop()
        ref = fn(actor, value)
        key = tuple(ref) if isinstance(ref, list) else ref
        self._future_to_actor[key] = (self._next_task_index, actor)
        self._index_to_future[self._next_task_index] = ref
        self._next_task_index += 1

    def has_next(self) -> bool:
        """Returns whether there are results to take."""
        return bool(self._future_to_actor)

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> object:
        """Returns the next result in order of submission. Raises TimeoutError after the timeout; the call stays in the
        pool unless ignore_if_timedout."""
        from .. import wait

        if not self.has_next():
            raise StopIteration("No more results to get")
        if self._next_return_index not in self._index_to_future:
            raise ValueError("It is not allowed to call get_next() after get_next_unordered().")
        ref = self._index_to_future[self._next_return_index]
        timed_out = False
        if timeout is not None:
            ready, _ = wait([_first(ref)], timeout=timeout)
            timed_out = not ready
        if timed_out and not ignore_if_timedout:
            raise TimeoutError("Timed out waiting for result")
        del self._index_to_future[self._next_return_index]
        self._next_return_index += 1
        return self._finish(ref, timed_out)

    def get_next_unordered(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> object:
        """Returns the next result to complete. Raises TimeoutError after the timeout."""
        from .. import wait

        if not self.has_next():
            raise StopIteration("No more results to get")
        by_first = {_first(key): key for key in self._future_to_actor}
        ready, _ = wait(list(by_first), num_returns=1, timeout=timeout)
        if not ready:
            if not ignore_if_timedout:
                raise TimeoutError("Timed out waiting for result")
            ready = [next(iter(by_first))]
            key = by_first[ready[0]]
            self._drop_index(key)
            return self._finish(key, True)
        key = by_first[ready[0]]
        self._drop_index(key)
        return self._finish(key, False)

    def _drop_index(self, key: object) -> None:
        index = self._future_to_actor[key][0]
        del self._index_to_future[index]
        self._next_return_index = max(self._next_return_index, index + 1)

    def _finish(self, ref: object, timed_out: bool) -> object:
        """Returns the result of a finished call and makes its actor idle again, unless the actor is dead."""
        import sys

        from .. import exceptions

        ray = sys.modules[__name__.rpartition(".util.")[0]]
        _, actor = self._future_to_actor.pop(tuple(ref) if isinstance(ref, (list, tuple)) else ref)
        if timed_out:
            self._return_actor(actor)
            raise TimeoutError("Timed out waiting for result")
        try:
            value = ray.get(list(ref) if isinstance(ref, tuple) else ref)
        except exceptions.ActorUnavailableError:
            self._return_actor(actor)
            raise
        except exceptions.RayActorError:
            self._hand_out()  # the actor is dead
            raise
        except BaseException:
            self._return_actor(actor)
            raise
        self._return_actor(actor)
        return value

    def _return_actor(self, actor: object) -> None:
        self._idle_actors.append(actor)
        self._hand_out()

    def _hand_out(self) -> None:
        if self._pending_submits and self._idle_actors:
            self.submit(*self._pending_submits.pop(0))

    def has_free(self) -> bool:
        """Returns whether an actor is idle and no call is queued."""
        return bool(self._idle_actors) and not self._pending_submits

    def pop_idle(self) -> object:
        """Removes an idle actor from the pool and returns it, or None."""
        return self._idle_actors.pop() if self.has_free() else None

    def push(self, actor: object) -> None:
        """Adds an actor to the pool."""
        if actor in self._idle_actors or any(actor == busy for _, busy in self._future_to_actor.values()):
            raise ValueError("Actor already belongs to current ActorPool")
        self._return_actor(actor)


def _first(ref: object) -> object:
    return ref[0] if isinstance(ref, (list, tuple)) else ref
