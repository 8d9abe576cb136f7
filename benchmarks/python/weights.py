"""Weights between processes of one host: publish, stage and commit beside a copy of the same bytes. Prints one JSON
object a line.

    .venv/bin/python benchmarks/python/weights.py [--mib 512] [--rounds 5] [--device cpu]

Each row starts its roles, takes the median of the rounds, and checks what has arrived. "floors" is a time in units of
one copy of the bytes that a receiver takes, by one thread, in the same run and with all receivers at once. --mib is the
size of the largest rows. With --device cuda the tensors are torch's, on the GPU, and travel through memory of the host;
the floor is a copy on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import troupe
from troupe import Box, Cluster, Worker, WorkerConfig

Layout = list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]  # name, whole, start, size


class Member(Worker):
    """A process with parts of tensors."""

    def setup(self, name: str, layouts: Sequence[Layout], device: str) -> None:
        self.device = device
        self.parts = [(whole, start, self.empty(size)) for _, whole, start, size in layouts[self.rank]]
        tensors: dict[str, list[Box]] = {}
        for (tensor, *_), (whole, start, part) in zip(layouts[self.rank], self.parts, strict=True):
            tensors.setdefault(tensor, []).append(Box(whole, start, part))
        self.weights = troupe.weights(name)
        self.weights.bind(tensors)

    def empty(self, size: tuple[int, ...]) -> Any:
        if self.device == "cpu":
            return np.zeros(size, "u2")
        import torch

        return torch.zeros(size, dtype=torch.int16, device=self.device)

    def sync(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize()

    def publish(self, step: int) -> tuple[troupe.Version, float]:
        for i, (_, _, part) in enumerate(self.parts):
            part[...] = (step + i) % 100
        self.sync()
        began = time.perf_counter()
        return self.weights.publish(step), time.perf_counter() - began

    def stage(self, version: troupe.Version) -> float:
        began = time.perf_counter()
        self.weights.stage(version)
        return time.perf_counter() - began

    def commit(self, version: troupe.Version) -> float:
        self.sync()
        began = time.perf_counter()
        self.weights.commit(version)
        self.sync()
        return time.perf_counter() - began

    def floor(self) -> float:
        """One copy of the bytes that this process has, into memory that has been written before."""
        n = sum(int(np.prod(part.shape)) for _, _, part in self.parts)
        source, target = self.empty((n,)), self.empty((n,))
        source[...] = 1
        times = []
        for _ in range(3):
            self.sync()
            began = time.perf_counter()
            if self.device == "cpu":
                np.copyto(target, source)
            else:
                target.copy_(source)
            self.sync()
            times.append(time.perf_counter() - began)
        return min(times)

    def values(self) -> list[list[int]]:
        """What the parts begin and end with."""
        return [[int(part.reshape(-1)[0]), int(part.reshape(-1)[-1])] for _, _, part in self.parts]


def rows_of(tensors: int, shape: tuple[int, int], ranks: int, axis: int) -> list[Layout]:
    """Each rank has a slice of every tensor."""
    out = []
    for rank in range(ranks):
        start, size = [0, 0], list(shape)
        size[axis] //= ranks
        start[axis] = rank * size[axis]
        out.append([(f"t{i}", shape, tuple(start), tuple(size)) for i in range(tensors)])
    return out


def experts(tensors: int, shape: tuple[int, int], ranks: int) -> list[Layout]:
    """Each rank has whole tensors."""
    zero = (0, 0)
    return [[(f"t{i}", shape, zero, shape) for i in range(tensors) if i * ranks // tensors == r] for r in range(ranks)]


def flat(tensors: int, shape: tuple[int, int], ranks: int) -> list[Layout]:
    """Each rank has a range of the rows of all tensors one after the other, as FSDP has elements."""
    rows = tensors * shape[0]
    out: list[Layout] = []
    for rank in range(ranks):
        at, end = rank * rows // ranks, (rank + 1) * rows // ranks
        layout: Layout = []
        while at < end:
            i, row = divmod(at, shape[0])
            n = min(shape[0] - row, end - at)
            layout.append((f"t{i}", shape, (row, 0), (n, shape[1])))
            at += n
        out.append(layout)
    return out


def nbytes(layout: Layout) -> int:
    return sum(2 * int(np.prod(size)) for *_, size in layout)


def run(row: str, source: list[Layout], target: list[Layout], args: argparse.Namespace) -> None:
    share = 0.0 if args.device == "cpu" else 0.05  # of the GPU: all processes are on one
    train = Cluster(
        f"train-{row}", Member, worker_config=WorkerConfig(world_size=len(source), num_gpus_per_worker=share)
    )
    infer = Cluster(
        f"infer-{row}", Member, worker_config=WorkerConfig(world_size=len(target), num_gpus_per_worker=share)
    )
    try:
        infer.execute_all_sync("setup", row, target, args.device)
        train.execute_all_sync("setup", row, source, args.device)
        floor = max(infer.execute_all_sync("floor"))
        times: dict[str, list[float]] = {"publish": [], "stage": [], "commit": []}
        for step in range(1, args.rounds + 2):  # the first makes the plan, and touches the memory
            published = train.execute_all_sync("publish", step)
            version = published[0][0]
            staged = infer.execute_all_sync("stage", version)
            committed = infer.execute_all_sync("commit", version)
            for name, took in (("publish", [t for _, t in published]), ("stage", staged), ("commit", committed)):
                times[name].append(max(took))
        check(train, source, infer, target)
    finally:
        infer.shutdown()
        train.shutdown()
    median = {name: statistics.median(all_of_them[1:]) for name, all_of_them in times.items()}
    report(
        row, args, tensors=len({name for layout in source for name, *_ in layout}), mib=max(map(nbytes, target)) >> 20,
        receivers=len(target), publishers=len(source), floor_ms=floor * 1e3,
        first_ms=sum(t[0] for t in times.values()) * 1e3,
        **{f"{name}_ms": took * 1e3 for name, took in median.items()},
        commit_floors=median["commit"] / floor, whole_floors=sum(median.values()) / floor,
    )  # fmt: skip


def check(train: Cluster, source: list[Layout], infer: Cluster, target: list[Layout]) -> None:
    """Every part has the values of the publishers at its first and last element."""
    has = {}
    for layout, values in zip(source, train.execute_all_sync("values"), strict=True):
        for (name, _, start, size), (value, _) in zip(layout, values, strict=True):
            has.setdefault(name, []).append((start, size, value))
    for layout, values in zip(target, infer.execute_all_sync("values"), strict=True):
        for (name, _, start, size), found in zip(layout, values, strict=True):
            for at, value in (
                (start, found[0]),
                (tuple(a + n - 1 for a, n in zip(start, size, strict=True)), found[1]),
            ):
                (want,) = (v for s, n, v in has[name] if all(a <= x < a + m for a, x, m in zip(s, at, n, strict=True)))
                assert value == want, (name, at, value, want)


def report(row: str, args: argparse.Namespace, **result: float) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    settings = {"rounds": args.rounds, "device": args.device}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    rounded = {k: round(v, 2) for k, v in result.items()}
    print(json.dumps({"row": row, **rounded, **settings, "machine": machine, "commit": commit}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="rows that begin with this")
    args = parser.parse_args()

    def shape(tensors: int, mib: float) -> tuple[int, int]:
        """A tensor of a row with so many MiB."""
        return (max(16, round(mib * (1 << 20) / tensors / 2 / 256 / 16) * 16), 256)

    big, small = shape(400, args.mib), shape(5000, args.mib / 8)
    many = shape(18_000, args.mib)
    third = shape(128, args.mib / 2)
    table = {
        "400_large": (experts(400, big, 1), experts(400, big, 1)),
        "18000_small": (experts(18_000, many, 1), experts(18_000, many, 1)),
        "5000_small_to_two": (experts(5000, small, 1), experts(5000, small, 1) * 2),
        "tp4_to_tp2": (rows_of(128, third, 4, 1), rows_of(128, third, 2, 1)),
        "rows4_to_columns2": (rows_of(128, third, 4, 0), rows_of(128, third, 2, 1)),
        "ep8_to_ep4": (experts(128, third, 8), experts(128, third, 4)),
        "fsdp8_to_tp2": (flat(128, third, 8), rows_of(128, third, 2, 1)),
    }
    with troupe.init(gpus="none" if args.device == "cpu" else "auto", output="none"):
        for row, (source, target) in table.items():
            if row.startswith(args.only):
                run(row, source, target, args)


if __name__ == "__main__":
    main()
