"""Weights between processes of one host: publish, stage and commit beside a copy of the same bytes. Prints one JSON
object a line.

    .venv/bin/python benchmarks/python/weights.py [--mib 512] [--rounds 5] [--device cpu] [--only ROW,…]

Each row starts its roles, takes the median of the rounds, and checks what has arrived. "floors" is a time in units of
one copy of the bytes that a receiver takes, by one thread, in the same run and with all receivers at once. --mib is the
size of the first row (8192 for tensors of 20 MiB), of which the others are parts or multiples. With --device cuda the
tensors are torch's, on the GPU, and the floor is a copy on the device. The rows:

- 400_large, 18000_small, 5000_small_to_two: tensors of 20, 0.9 and 0.2 MiB at --mib 8192.
- tp4_to_tp2, rows4_to_columns2, ep8_to_ep4, fsdp8_to_tp2: other layouts.
- host_to_one, host_to_two: receivers that share the host, and not the device. "directions" is the time in units of a
  copy from the device to pinned memory and one back.
- decode: the worst step of a receiver's loop while it stages, of the worst without.
- deaths: kill -9 of a receiver while it stages, and of a publisher while it publishes; a receiver that joins.
- plan: the plan of a model of 1T in 71,000 tensors, by `go test` (needs Go).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
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

    def directions(self) -> float:
        """One copy of the bytes that this process has from the device to pinned memory, and one back."""
        if self.device == "cpu":
            return 2 * self.floor()
        import torch

        n = sum(int(np.prod(part.shape)) for _, _, part in self.parts)
        on_device, pinned = self.empty((n,)), torch.empty(n, dtype=torch.int16, pin_memory=True)
        times = []
        for _ in range(3):
            self.sync()
            began = time.perf_counter()
            pinned.copy_(on_device, non_blocking=True)
            self.sync()
            on_device.copy_(pinned, non_blocking=True)
            self.sync()
            times.append(time.perf_counter() - began)
        return min(times)

    def decode(self, version: troupe.Version, steps: int = 300) -> tuple[float, float, float, int]:
        """The median and the worst step of a loop, the worst while a version is staged, and the number of those."""
        if self.device == "cpu":
            matrix, vector = np.ones((1024, 1024), "f4"), np.ones(1024, "f4")
        else:
            import torch

            matrix = torch.ones((20480, 20480), dtype=torch.bfloat16, device=self.device)
            vector = torch.ones(20480, dtype=torch.bfloat16, device=self.device)

        def step() -> float:
            began = time.perf_counter()
            matrix @ vector
            self.sync_stream()
            return time.perf_counter() - began

        alone = [step() for _ in range(steps + 50)][50:]
        staged, beside = self.weights.stage(version, blocking=False), []
        while not staged.done():
            beside.append(step())
        staged.result()
        return statistics.median(alone), max(alone), max(beside), len(beside)

    def sync_stream(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.current_stream().synchronize()

    def stage_forever(self) -> None:
        while True:
            self.weights.stage()

    def publish_forever(self, step: int) -> None:
        while True:
            self.publish(step)
            step += 1

    def pid(self) -> int:
        return os.getpid()

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


@contextlib.contextmanager
def members(name: str, row: str, layouts: list[Layout], args: argparse.Namespace, **config: Any) -> Iterator[Cluster]:
    share = 0.0 if args.device == "cpu" else 0.05  # of the GPU: all processes are on one
    config = {"world_size": len(layouts), "num_gpus_per_worker": share, **config}
    with Cluster(f"{name}-{row}", Member, worker_config=WorkerConfig(**config)) as cluster:
        cluster.execute_all_sync("setup", row, layouts, args.device)
        yield cluster


def run(row: str, source: list[Layout], target: list[Layout], args: argparse.Namespace) -> None:
    through_host = row.startswith("host_")
    env = {"TROUPE_DEVICE": "host"} if through_host else {}
    with members("infer", row, target, args, env=env) as infer, members("train", row, source, args) as train:
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
        median = {name: statistics.median(all_of_them[1:]) for name, all_of_them in times.items()}
        whole = sum(median.values())
        own = {"directions": whole / max(infer.execute_all_sync("directions"))} if through_host else {}
    report(
        row, args, tensors=len({name for layout in source for name, *_ in layout}), mib=max(map(nbytes, target)) >> 20,
        receivers=len(target), publishers=len(source), floor_ms=floor * 1e3,
        first_ms=sum(t[0] for t in times.values()) * 1e3,
        **{f"{name}_ms": took * 1e3 for name, took in median.items()},
        commit_floors=median["commit"] / floor, whole_floors=whole / floor, whole_ms=whole * 1e3, **own,
    )  # fmt: skip


def decode(row: str, layouts: list[Layout], args: argparse.Namespace) -> None:
    with members("infer", row, layouts, args) as infer, members("train", row, layouts, args) as train:
        found = []
        for step in range(1, args.rounds + 2):
            ((version, _),) = train.execute_all_sync("publish", step)
            found += infer.execute_all_sync("decode", version)
            infer.execute_all_sync("commit", version)
    step, alone, beside = (statistics.median(column) * 1e3 for column in list(zip(*found[1:], strict=True))[:3])
    report(
        row, args, step_ms=step, worst_alone_ms=alone, worst_beside_ms=beside, worst_of_worst=beside / alone,
        steps_beside=statistics.median(n for *_, n in found[1:]),
    )  # fmt: skip


def deaths(row: str, layouts: list[Layout], args: argparse.Namespace) -> None:
    def take(cluster: Cluster, version: troupe.Version | None = None) -> float:
        began = time.perf_counter()
        for staged in ("stage", "commit"):
            cluster.execute_all_sync(staged, version)
        return (time.perf_counter() - began) * 1e3

    with (
        members("infer", row, layouts, args) as infer,
        members("train", row, layouts, args, policy="restart_rank", restarts=2) as train,
    ):
        took: dict[str, float] = {}
        ((version, _),) = train.execute_all_sync("publish", 1)
        take(infer, version)
        ((version, _),) = train.execute_all_sync("publish", 2)
        took["undisturbed_ms"] = take(infer, version)
        with members("dying", row, layouts, args) as dying:
            pid = dying.workers[0].pid()
            lost = dying.execute_all_async("stage_forever")
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            ((version, _),) = train.execute_all_sync("publish", 3)
            took["others_ms"] = take(infer, version)
            assert isinstance(lost.exception(60), troupe.WorkerLostError)
        with members("joiner", row, layouts, args) as joiner:
            took["joiner_ms"] = take(joiner)
            check(train, layouts, joiner, layouts)
        before = infer.execute_all_sync("values")
        pid = train.workers[0].pid()
        lost = train.execute_all_async("publish_forever", 4)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        assert isinstance(lost.exception(60), troupe.WorkerLostError)
        assert infer.execute_all_sync("values") == before
        began = time.perf_counter()
        train.wait_ready(60)
        train.execute_all_sync("setup", row, layouts, args.device)
        took["restart_ms"] = (time.perf_counter() - began) * 1e3
        ((version, _),) = train.execute_all_sync("publish", 1)
        assert version.epoch == 2
        took["next_epoch_ms"] = take(infer, version)
        check(train, layouts, infer, layouts)
    report(row, args, mib=nbytes(layouts[0]) >> 20, **took)


def plan(row: str, args: argparse.Namespace) -> None:
    command = ["go", "test", "./weights/plan", "-run", "^$", "-bench", "Plan", "-benchtime", "3x"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for to, ns, pieces in re.findall(r"→_(\w+)\S*\s+\d+\s+(\d+) ns/op.*?(\d+) pieces", out):
        report(f"{row}_to_{to.lower()}", args, plan_s=int(ns) / 1e9, pieces=int(pieces))


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
    parser.add_argument("--only", default="", help="rows that begin with one of these, with commas between them")
    args = parser.parse_args()

    def shape(tensors: int, mib: float) -> tuple[int, int]:
        """A tensor of a row with so many MiB."""
        return (max(16, round(mib * (1 << 20) / tensors / 2 / 256 / 16) * 16), 256)

    big, small, many = shape(400, args.mib), shape(5000, args.mib / 8), shape(18_000, 2 * args.mib)
    third, half, little = shape(128, args.mib), shape(128, args.mib / 2), shape(100, args.mib / 16)
    table = {
        "400_large": (experts(400, big, 1), experts(400, big, 1)),
        "18000_small": (experts(18_000, many, 1), experts(18_000, many, 1)),
        "5000_small_to_two": (experts(5000, small, 1), experts(5000, small, 1) * 2),
        "tp4_to_tp2": (rows_of(128, third, 4, 1), rows_of(128, third, 2, 1)),
        "rows4_to_columns2": (rows_of(128, third, 4, 0), rows_of(128, third, 2, 1)),
        "ep8_to_ep4": (experts(128, third, 8), experts(128, third, 4)),
        "fsdp8_to_tp2": (flat(128, third, 8), rows_of(128, third, 2, 1)),
        "host_to_one": (experts(128, half, 1), experts(128, half, 1)),
        "host_to_two": (experts(128, half, 1), experts(128, half, 1) * 2),
    }
    wanted = tuple(args.only.split(","))
    with troupe.init(gpus="none" if args.device == "cpu" else "auto", output="none"):
        for row, (source, target) in table.items():
            if row.startswith(wanted):
                run(row, source, target, args)
        if "decode".startswith(wanted):
            decode("decode", experts(400, big, 1), args)
        if "deaths".startswith(wanted):
            deaths("deaths", experts(100, little, 1), args)
    if "plan".startswith(wanted):
        plan("plan", args)


if __name__ == "__main__":
    main()
