"""verl's checkpoint engine on troupe.weights, for programs that run with `python -m troupe.ray`:

    actor_rollout_ref.rollout.checkpoint_engine.backend=troupe
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=troupe.adapters.verl_weights

The first rank of the trainer publishes what verl's model engine yields; each rollout worker stages it and gives it to
its server adapter, tensor by tensor. Between hosts the bytes travel once per host.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from .. import _errors, _session, _weights

if TYPE_CHECKING:
    import torch

__all__ = ["TroupeCheckpointEngine"]

_NAME = "verl-checkpoint-engine"


@CheckpointEngineRegistry.register("troupe")
class TroupeCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Versions of troupe.weights as verl's checkpoint engine.

    - name: of the weights, for programs with several models.
    - mode: of publish: "full", "delta" or "auto".
    - device: where receivers yield tensors; the server adapter takes them from there.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        name: str = _NAME,
        mode: str = "full",
        device: str = "cpu",
    ) -> None:
        self.is_master, self._mode, self._device = is_master, mode, device
        self._weights = _weights.weights(name)
        self._host: dict[str, Any] = {}  # of the master: what is bound
        self._last = -1  # step that was published; of receivers, that the master had published before this time
        self._before: _weights.Version | None = None
        self._yielding: _Yielding | None = None

    def prepare(self) -> dict[str, int]:
        return {"last": self._last} if self.is_master else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, int]]
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        last = next((one["last"] for one in metadata if "last" in one), None)
        if last is None:
            raise _errors.InvalidError("no rank of the trainer has is_master=True; verl sets it for rank 0")
        return {"last": [last] * actor_wg_world_size}, {"last": [last] * rollout_world_size}

    def init_process_group(self, last: int) -> None:
        self._last = last
        if not self.is_master:
            self._before = max(self._weights.available(), default=None)

    def finalize(self) -> None:
        """Versions end with the next one; there is nothing to end here."""

    def _step(self, global_steps: int | None) -> int:
        return self._last + 1 if global_steps is None else max(global_steps, self._last + 1)

    async def send_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
    ) -> None:
        """Publishes the weights; all ranks of the trainer take part in what the generator gathers."""
        fits, seen = bool(self._host), set()
        async for name, tensor in _each(weights):
            if not self.is_master:
                continue
            seen.add(name)
            kept = self._host.get(name)
            if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
                kept[...] = tensor
            else:
                copy = tensor.detach().to("cpu", copy=True).contiguous() if hasattr(tensor, "detach") else tensor.copy()
                fits, self._host[name] = False, copy
        if not self.is_master:
            return
        if not fits or seen != set(self._host):
            self._host = {name: kept for name, kept in self._host.items() if name in seen}
            await self._weights.bind(self._host, use="publish", blocking=False)
        step, rank = self._step(global_steps), max(_session.current().own[2], 0)
        await self._weights.publish(step, self._mode, ranks=[rank], blocking=False)
        self._last = step

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yields the names and tensors of what send_weights publishes at this time."""
        version, step = self._before, self._step(global_steps)
        while version is None or version == self._before or version.step != step:
            version = await self._weights.next(after=version)
        self._weights.bind(load=self._load)
        await self._weights.stage(version, blocking=False)
        self._yielding = _Yielding()
        committing = asyncio.ensure_future(asyncio.to_thread(self._weights.commit, version))
        try:
            async for name, tensor in self._yielding.until(committing):
                yield name, tensor if self._device == "cpu" else tensor.to(self._device)
            await committing
        finally:
            self._yielding.over = True

    def _load(self, pairs: Iterator[tuple[str, Any]]) -> None:
        assert self._yielding is not None
        for pair in pairs:
            self._yielding.put(pair)


class _Yielding:
    """Pairs from the thread that commits to the generator in the event loop, one at a time."""

    def __init__(self) -> None:
        self._loop, self._pairs, self.over = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Any]](1), False

    def put(self, pair: tuple[str, Any]) -> None:
        putting = asyncio.run_coroutine_threadsafe(self._pairs.put(pair), self._loop)
        while True:
            try:
                return putting.result(0.5)
            except concurrent.futures.TimeoutError:
                if self.over:
                    putting.cancel()
                    raise _errors.CancelledError("the server adapter did not take all weights") from None

    async def until(self, committing: asyncio.Future[Any]) -> AsyncIterator[tuple[str, Any]]:
        while True:
            pair = asyncio.ensure_future(self._pairs.get())
            await asyncio.wait({pair, committing}, return_when=asyncio.FIRST_COMPLETED)
            if not pair.done():
                pair.cancel()
                return
            yield pair.result()


async def _each(
    weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterator):
        async for pair in weights:
            yield pair
        return
    for pair in weights:
        yield pair
