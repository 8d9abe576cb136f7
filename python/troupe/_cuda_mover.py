"""Copies of weights on a CUDA device: by kernels of Triton with tables of what to copy, or by torch where Triton is
missing or finds no compiler."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ._device_backend import DeviceError, Lent

if TYPE_CHECKING:
    import torch

_PIECE = 64 << 20  # bytes between two of which other work gets the device
_FLYING = 3  # pieces that are queued: between them other threads of this process run
_FIELDS = 7  # of a copy, see Mover.table
_WORDS = 2048  # that a block of a kernel copies,
_TOGETHER = 8192  # and one of words that follow each other in the tensor: its table is smaller

# The digest of a bucket: see weights/pack/digest.go.
_LOW, _HIGH, _SEED_LOW, _SEED_HIGH, _LENGTH = 0x9E3779B1, 0x85EBCA6B, 0x243F6A88, 0xB7E15162, 0xC2B2AE3D27D4EB4F
_MASK = 0xFFFFFFFF
_CHUNK = 1 << 20  # words whose digest torch makes at once


class Driver(Protocol):
    """What is needed of _cuda.Cuda."""

    def allocate(self, device: int, nbytes: int) -> tuple[int, Callable[[], None]]: ...

    def _lent(self, source: torch.Tensor) -> Lent: ...


class _Memory:
    """An allocation of its own, because those of torch's allocators may give no handles, in the form that torch
    accepts."""

    def __init__(self, cuda: Driver, device: int, nbytes: int) -> None:
        self._free: Callable[[], None] | None = None
        pointer, self._free = cuda.allocate(device, nbytes)
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 2,
        }  # fmt: skip

    def __del__(self) -> None:
        try:
            if self._free is not None:
                self._free()
        except Exception:  # the interpreter is exiting
            pass


class CudaMover:
    """Implements Mover for CUDA."""

    def __init__(self, cuda: Driver, device: int) -> None:
        import torch

        self._cuda, self._device, self._torch = cuda, device, torch
        self._stream = torch.cuda.Stream(device)
        self._kernels = _kernels()
        self._events = [torch.cuda.Event() for _ in range(_FLYING)]

    def mark(self) -> object:
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def at_work(self, after: Any) -> Iterator[None]:
        with self._torch.cuda.device(self._device), self._torch.cuda.stream(self._stream), self._torch.no_grad():
            if after is not None:
                self._stream.wait_event(after)
            yield

    def memory(self, nbytes: int) -> Lent:
        try:
            made = _Memory(self._cuda, self._device, nbytes)
        except DeviceError:
            self._torch.cuda.empty_cache()
            try:
                made = _Memory(self._cuda, self._device, nbytes)
            except DeviceError as err:
                raise DeviceError(
                    f"no memory for {nbytes} bytes of weights beside the tensors ({err}): free some, or set "
                    "TROUPE_DEVICE=0 to keep them in memory of the host"
                ) from err
        whole = self._torch.as_tensor(made, device=f"cuda:{self._device}")
        whole.zero_()
        return self._cuda._lent(whole)

    def wait(self) -> None:
        self._stream.synchronize()

    # Tables.

    def table(self, copies: bytes) -> list[Any]:
        rows = (
            self._torch.frombuffer(bytearray(copies), dtype=self._torch.int64).reshape(-1, _FIELDS) if copies else None
        )
        if rows is None:
            return []
        if self._kernels is not None:
            try:
                return self._tiles(rows)
            except _Unfit:
                pass
        return [_Views(self._torch, self._device, rows)]

    def _tiles(self, rows: torch.Tensor) -> list[Any]:
        """Returns tables for the kernel, by the size of the words that it copies, and by whether they follow each
        other in the tensor."""
        torch = self._torch
        address, _, run, n0, n1, s0, s1 = rows.unbind(1)
        strided = (n0 > 1) | (n1 > 1)
        together = address | rows[:, 1] | run | torch.where(n0 > 1, s0, 0) | torch.where(n1 > 1, s1, 0)
        out = []
        for word in (8, 4, 2, 1):
            fits = together % word == 0
            if word < 8:
                fits &= together % (2 * word) != 0
            for apart in (False, True):
                chosen = rows[fits & (strided == apart)]
                if len(chosen):
                    out.append(_Tiles(torch, self._device, self._kernels, chosen, word, apart))
        return out

    def pack(self, table: list[Any], arena: int) -> None:
        self._copy(table, arena, True)

    def unpack(self, table: list[Any], arena: int) -> None:
        self._copy(table, arena, False)

    def _copy(self, table: list[Any], arena: int, pack: bool) -> None:
        for part in table:
            part.copy(arena, pack)

    # Digests.

    def digests(self, parts: Sequence[tuple[int, int, int]]) -> list[int]:
        torch, cuda = self._torch, f"cuda:{self._device}"
        sums = torch.zeros(len(parts), dtype=torch.int64, device=cuda)
        flying: deque[Any] = deque()
        count = 0
        for number, (source, target, nbytes) in enumerate(parts):
            for at in range(0, nbytes, _PIECE):
                n = min(_PIECE, nbytes - at)
                self._add(sums, number, source + at, target and target + at, -(-n // 8), at // 8)
                if len(flying) == _FLYING:
                    flying.popleft().synchronize()
                event = self._events[count % _FLYING]
                event.record(self._stream)
                flying.append(event)
                count += 1
        return [(s + n * _LENGTH) % (1 << 64) for s, (_, _, n) in zip(sums.tolist(), parts, strict=True)]

    def _add(self, sums: torch.Tensor, number: int, source: int, target: int, words: int, position: int) -> None:
        if self._kernels is not None:
            grid = (-(-words // _WORDS),)
            self._kernels.digest[grid](
                source, target or source, words, position, sums, number,
                COPY=bool(target), WORDS=_WORDS, num_warps=8,
            )  # fmt: skip
            return
        torch = self._torch
        values = _view(torch, self._device, source, words * 8).view(torch.int64)
        if target:
            into = _view(torch, self._device, target, words * 8).view(torch.int64)
            values = into.copy_(values)
        for first in range(0, words, _CHUNK):
            sums[number] += digest_of(values[first : first + _CHUNK], self._positions(position + first))

    def _positions(self, first: int) -> torch.Tensor:
        torch = self._torch
        return torch.arange(first, first + _CHUNK, device=f"cuda:{self._device}")


def digest_of(words: Any, positions: Any) -> Any:
    """Returns the sum of the products of words of eight bytes, arrays of int64 that wrap around, with the keys of their
    positions."""
    positions = positions[: len(words)]
    low = ((words & _MASK) + positions * _LOW + _SEED_LOW) & _MASK
    high = ((words >> 32) + positions * _HIGH + _SEED_HIGH) & _MASK
    return (low * high).sum()


class _Unfit(Exception):
    """A copy is too large for the kernel."""


class _Tiles:
    """Copies as tiles: records of the address, the offset, the first word and the end of a tile, and of how the words
    lie in the tensor."""

    def __init__(self, torch: Any, device: int, kernels: Any, rows: torch.Tensor, word: int, apart: bool) -> None:
        self._kernels, self._apart, self._words = kernels, apart, _WORDS if apart else _TOGETHER
        self._type = {8: kernels.int64, 4: kernels.int32, 2: kernels.int16, 1: kernels.int8}[word]
        address, offset, run, n0, n1, s0, s1 = rows.unbind(1)
        words = run * n0 * n1 // word
        if int(words.max()) >= 1 << 31:
            raise _Unfit
        count = -(-words // self._words)
        which = torch.repeat_interleave(torch.arange(len(rows)), count)
        first = torch.cumsum(count, 0) - count
        start = (torch.arange(len(which)) - first[which]) * self._words
        end = torch.minimum(start + self._words, words[which])
        fields = [
            address[which],
            offset[which],
            start,
            end,
            (run // word)[which],
            n0[which],
            (s0 // word)[which],
            (s1 // word)[which],
        ]
        self._table = torch.stack(fields, 1).contiguous().to(f"cuda:{device}")
        self._n = len(which)

    def copy(self, arena: int, pack: bool) -> None:
        self._kernels.copy[(self._n,)](
            self._table, arena,
            PACK=pack, APART=self._apart, TYPE=self._type, WORDS=self._words, num_warps=8,
        )  # fmt: skip


class _Views:
    """Copies as views of the tensors, and views of an arena for each place where it was."""

    def __init__(self, torch: Any, device: int, rows: torch.Tensor) -> None:
        self._torch, self._device, self._rows = torch, device, rows.tolist()
        self._tensors = [
            _view(torch, device, at, run + (n0 - 1) * s0 + (n1 - 1) * s1).as_strided((n1, n0, run), (s1, s0, 1))
            for at, _, run, n0, n1, s0, s1 in self._rows
        ]
        self._arenas: dict[int, list[Any]] = {}

    def copy(self, arena: int, pack: bool) -> None:
        if arena not in self._arenas:
            if len(self._arenas) > 2:
                self._arenas.clear()
            self._arenas[arena] = [
                _view(self._torch, self._device, arena + offset, run * n0 * n1).view(n1, n0, run)
                for _, offset, run, n0, n1, _, _ in self._rows
            ]
        target, source = self._arenas[arena], self._tensors
        self._torch._foreach_copy_(*((target, source) if pack else (source, target)))


class _At:
    """Memory at an address, in the form that torch accepts."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2,
        }  # fmt: skip


def _view(torch: Any, device: int, address: int, nbytes: int) -> torch.Tensor:
    made: torch.Tensor = torch.as_tensor(_At(address, nbytes), device=f"cuda:{device}")
    return made


@functools.cache
def _kernels() -> Any:
    """Returns the kernels, or None where they cannot be compiled."""
    try:
        kernels = importlib.import_module("._cuda_kernels", __package__)
        kernels.check()
    except Exception as err:
        logging.getLogger("troupe").info("weights are packed by torch, without Triton: %s", err)
        return None
    return kernels
