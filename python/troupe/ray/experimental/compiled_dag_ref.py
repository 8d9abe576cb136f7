"""The results of an execution of a compiled graph."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NoReturn


class CompiledDAGRef:
    """One result of an execution, or all of them as a list where the graph has one. get takes it once."""

    def __init__(self, dag: Any, execution: int, channel: int | None = None) -> None:
        self._dag, self._execution_index, self._channel_index = dag, execution, channel
        self._is_taken = False

    def get(self, timeout: float | None = None) -> Any:
        """Returns the value, or raises the error of the execution. None is the timeout of DAGContext, -1 none."""
        if self._is_taken:
            raise ValueError("ray.get() can only be called once on a CompiledDAGRef, and it was already called on it.")
        value = self._dag._get(self._execution_index, self._channel_index, timeout, self._take)
        return value

    _ray_get = get

    def _take(self) -> None:
        self._is_taken = True

    def __del__(self) -> None:
        if not self._is_taken and getattr(self, "_dag", None) is not None:
            self._dag._dropped(self._execution_index, self._channel_index)

    def __str__(self) -> str:
        return (
            f"CompiledDAGRef({self._dag.get_id()}, execution_index={self._execution_index}, "
            f"channel_index={self._channel_index})"
        )

    def __copy__(self) -> NoReturn:
        raise ValueError("CompiledDAGRef cannot be copied.")

    def __deepcopy__(self, _: object) -> NoReturn:
        raise ValueError("CompiledDAGRef cannot be deep copied.")

    def __reduce__(self) -> NoReturn:
        raise ValueError("CompiledDAGRef cannot be pickled.")


class CompiledDAGFuture(CompiledDAGRef):
    """A result of execute_async, for await."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._await().__await__()

    async def _await(self) -> Any:
        if self._is_taken:
            raise ValueError("CompiledDAGFuture can only be awaited once.")
        return await self._dag._aget(self._execution_index, self._channel_index, self._take)

    def __str__(self) -> str:
        return super().__str__().replace("CompiledDAGRef", "CompiledDAGFuture")
