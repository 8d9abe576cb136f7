"""Tensors on a GPU between workers: correctness checks, and how long 1 GiB takes by each way. Needs a GPU and torch;
prints one JSON object a line.

    make bench-device                 # MIB=1024, ROUNDS=20

The driver never initialises CUDA. The last line has "failed", the names of the checks that did not hold.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import troupe
from troupe import _cuda, _device, _reference, register

MIB = int(os.environ.get("MIB", "1024"))
ROUNDS = int(os.environ.get("ROUNDS", "20"))
WANTED = {"same_device": (5, 400), "through_host": (45, 1000)}  # milliseconds: median, first

spans: dict[str, list[float]] = {}


def timed(holder: Any, name: str) -> None:
    """Records how long each call of a function takes."""
    function, label = getattr(holder, name), f"{getattr(holder, '__name__', '').rpartition('.')[2]}.{name}"

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spans.setdefault(label, []).append((time.perf_counter() - began) * 1e3)

    setattr(holder, name, call)


class Gpu:
    """A worker with a GPU. train and infer are two of them."""

    def __init__(self) -> None:
        if not os.environ.get("CUDA_VISIBLE_DEVICES"):
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        import torch

        self.torch = torch
        torch.ones(1, device="cuda")
        for holder, names in (  # where the time goes
            (_device, ("_lend", "receive")),
            (_device.Source, ("__init__", "fetch")),
            (_device.Reader, ("__init__", "_pump")),
            (_cuda.Cuda, ("lend", "wait", "_export", "open", "map", "unmap", "register", "empty")),
        ):
            for name in names:
                timed(holder, name)
        self.weights: Any = None
        self.kept: Any = None

    def about(self) -> dict[str, Any]:
        torch = self.torch
        device = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        found = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": device.name,
            "uuid": str(getattr(device, "uuid", "")),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "free_mib": free >> 20,
            "total_mib": total >> 20,
            "cores": os.cpu_count(),
            "pid": os.getpid(),
            "allocator": torch.cuda.get_allocator_backend(),
            "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        }
        cuda = _cuda.Cuda()
        try:
            found["driver_uuid"] = cuda._uuid(0).hex()
            version = _cuda.ctypes.c_int()
            cuda._lib.cuDriverGetVersion(_cuda.ctypes.byref(version))
            found["driver"] = version.value
            sample = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
            handle, offset = cuda._export(0, sample.data_ptr())
            found["handle"], found["offset"] = handle[:16].hex(), offset
            for name in ("cuMemGetAddressRange_v2", "cuIpcGetMemHandle"):  # why there is no handle, if there is none
                if not handle:
                    with cuda._context(0):
                        base, size, room = _cuda.ctypes.c_uint64(), _cuda.ctypes.c_size_t(), _cuda._Handle()
                        args = (
                            (_cuda.ctypes.byref(base), _cuda.ctypes.byref(size))
                            if "Range" in name
                            else (_cuda.ctypes.byref(room),)
                        )
                        found[name] = getattr(cuda._lib, name)(*args, sample.data_ptr())
        except Exception as err:
            found["driver_error"] = repr(err)
        return found

    def floors(self, mib: int) -> dict[str, Any]:
        """What the hardware does, in milliseconds: a copy on the device, and copies of chunks to and from pinned
        memory."""
        torch, out = self.torch, {}
        x = torch.ones(mib << 20, dtype=torch.uint8, device="cuda")

        def median(do: Callable[[], Any]) -> float:
            times = []
            for _ in range(7):
                torch.cuda.synchronize()
                began = time.perf_counter()
                do()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began) * 1e3)
            return round(statistics.median(times), 3)

        y = torch.empty_like(x)
        out["device_copy"] = median(lambda: y.copy_(x))
        size = min(mib, 32) << 20
        chunk = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        parts = x.split(size)
        out["to_pinned"] = median(lambda: [chunk.copy_(p, non_blocking=True) for p in parts])
        out["from_pinned"] = median(lambda: [p.copy_(chunk, non_blocking=True) for p in parts])
        return out

    # train

    def make(self, mib: int, value: int) -> None:
        if self.weights is None or self.weights.numel() != mib << 19:
            self.weights = None
            self.weights = self.torch.empty(mib << 19, dtype=self.torch.bfloat16, device="cuda")
        self.weights.fill_(value)
        self.torch.cuda.synchronize()

    def give(self) -> Any:
        return self.weights

    @register(share=True)
    def lend(self) -> Any:
        return self.weights

    def fresh(self, mib: int, value: int) -> Any:
        return self.torch.full((mib << 19,), value, dtype=self.torch.bfloat16, device="cuda")

    def odd(self) -> list[Any]:
        """Tensors of every kind: offsets, strides, dtypes, parameters, gradients, no dimension, no element."""
        torch = self.torch
        base = torch.arange(3 << 20, dtype=torch.float32, device="cuda").reshape(1024, 3072)
        made = [
            base,
            base.T,
            base[::2, 1::3],
            base[5:900],
            torch.nn.Parameter(base.clone()),
            base.clone().requires_grad_(),
            base > 7,
            torch.tensor(3.0, device="cuda"),
        ]
        made += [torch.empty(0, 3, device="cuda")]
        for name in (
            "float64",
            "float16",
            "bfloat16",
            "float8_e4m3fn",
            "float8_e5m2",
            "int64",
            "int16",
            "int8",
            "uint8",
        ):
            made.append((base % 100).to(getattr(torch, name)))
        return made

    def state(self, count: int, kib: int) -> dict[str, Any]:
        return {
            f"layer{i}": self.torch.full((kib << 9,), i % 100, dtype=self.torch.bfloat16, device="cuda")
            for i in range(count)
        }

    def change(self, value: int) -> None:
        self.weights.fill_(value)
        self.torch.cuda.synchronize()

    def push(self, infer: Any, **options: Any) -> tuple[str, float]:
        """The weights as an argument of a call by this worker."""
        got: tuple[str, float] = infer.load.options(**options)(self.weights)
        return got

    def keep(self) -> Any:
        return troupe.put(self.weights)

    # infer

    def load(self, x: Any) -> tuple[str, float]:
        self.kept = x
        self.torch.cuda.synchronize()
        return str(x.device), float(x[-1])

    def check(self, value: int) -> bool:
        return bool((self.kept == value).all())

    def load_all(self, values: dict[str, Any]) -> int:
        self.kept = values
        self.torch.cuda.synchronize()
        return len(values)

    def kept_sums(self) -> list[Any]:
        return self.sums(self.kept)

    def first(self) -> float:
        return float(self.kept[0])

    def sums(self, values: Any) -> list[Any]:
        torch = self.torch
        values = values.values() if isinstance(values, dict) else values
        return [
            (
                str(v.dtype),
                list(v.shape),
                v.device.type,
                float(v.detach().to(torch.float64).sum()) if v.numel() else 0.0,
            )
            for v in values
        ]

    def own_sums(self) -> list[Any]:
        return self.sums(self.odd())

    def drop(self) -> None:
        self.kept = None
        gc.collect()

    def drop_weights(self) -> None:
        self.weights = None
        gc.collect()

    def memory(self) -> dict[str, Any]:
        gc.collect()
        lender = _device._lender
        counters = dict(_device.counters)
        return {
            "lent_in_all": counters.pop("lent"),
            **counters,
            "kept": _device.count(),
            "mapped": len(_device.backend()._opened),
            "readers": len(lender._readers) if lender else 0,
            "why": _device.last_refusal,
            "sources": len(_device._sources),
            "allocated_mib": self.torch.cuda.memory_allocated() >> 20,
            "pinned": [s._pinned for s in _device._sources.values()]
            + [r._pinned for r in (lender._readers if lender else [])],
        }

    def spans(self) -> dict[str, Any]:
        out = {
            name: {"n": len(t), "median": round(statistics.median(t), 3), "max": round(max(t), 3)}
            for name, t in spans.items()
        }
        spans.clear()
        return out

    def way(self, name: str) -> None:
        os.environ["TROUPE_DEVICE"] = name

    def ring(self, slots: int, chunk_mib: int) -> None:
        """Of a producer: the memory of its next connections."""
        _device.SLOTS, _device.CHUNK = slots, chunk_mib << 20

    def disconnect(self) -> None:
        for path in list(_device._sources):
            _device._sources.pop(path).end()

    def pid(self) -> int:
        return os.getpid()


def say(row: str, **fields: Any) -> None:
    print(json.dumps({"row": row, **fields}), flush=True)


failed: list[str] = []


def section(do: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Runs a part; what it raises is reported, and the next part runs."""
    began = time.monotonic()
    name = args[0] if args and isinstance(args[0], str) else do.__name__
    try:
        do(*args, **kwargs)
    except Exception as err:
        failed.append(name)
        say(name, error=repr(err)[:1000], at=traceback.format_exc().splitlines()[-8:])
    print(f"# {name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def expect(name: str, holds: bool, **facts: Any) -> None:
    if not holds:
        failed.append(name)
    say(name, ok=bool(holds), **facts)


def until(holds: Callable[[], bool], patience: float = 15.0) -> float:
    """Seconds until it held; -1: it did not."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > patience:
            return -1
        time.sleep(0.02)
    return round(time.monotonic() - began, 3)


def start(count: int, **env: str) -> list[Any]:
    """Workers that share the GPU."""
    share = 0.05 if GRANTS else 0
    workers = [troupe.actor(Gpu, num_gpus=share, env=env, background=True) for _ in range(count)]
    for w in workers:
        w.pid()
    return workers


def end(*workers: Any) -> None:
    for w in workers:
        w.cluster.shutdown()


GRANTS = True  # the head has found the GPU


def transfer(
    row: str,
    train: Any,
    infer: Any,
    send: str = "give",
    rounds: int = ROUNDS,
    mib: int = MIB,
    uses: str = "",
    **options: Any,
) -> None:
    """Times a tensor from one worker to the other: the first one, and the median of the others. uses: the counter of
    the expected way."""
    times, right, device = [], True, ""
    train.make(mib, 1)
    train.spans()
    infer.spans()
    shown: dict[str, Any] = {}
    for i in range(rounds + 1):
        value = 1 + i % 100
        train.make(mib, value)
        gone = infer.memory()
        began = time.perf_counter()
        if send == "push":
            made = None
            device, last = train.push(infer, **options)
        else:
            made = train.keep() if send == "keep" else getattr(train, send).remote()
            device, last = infer.load.options(**options)(made) if options else infer.load(made)
        times.append((time.perf_counter() - began) * 1e3)
        right = right and last == value and infer.check(value)
        del made
        if i == 0:
            shown = {"train": train.spans(), "infer": infer.spans()}
    now = infer.memory()
    used = {k: now[k] - gone[k] for k in ("opened", "shared", "staged", "bus")}
    wanted = WANTED.get(row)
    median, first = round(statistics.median(times[1:]), 2), round(times[0], 1)
    expect(
        row,
        right and (not uses or used[uses] == 1) and (wanted is None or (median <= wanted[0] and first <= wanted[1])),
        median_ms=median,
        least_ms=round(min(times[1:]), 2),
        first_ms=first,
        wanted=wanted,
        right=right,
        device=device,
        mib=mib,
        last_round=used,
        why=now["why"],
        pinned=now["pinned"],
        first_spans=shown,
        spans={"train": train.spans(), "infer": infer.spans()},
    )
    infer.drop()


def correctness(train: Any, infer: Any) -> None:
    want = [list(x) for x in train.own_sums()]

    def same(got: Any, device: str = "") -> bool:
        return all(
            list(g[:2]) == w[:2]
            and g[3] == w[3]
            and (not device or w[3] == 0 or g[2] == device or g[1] == [] or 0 in g[1])
            for g, w in zip(got, want, strict=True)
        )

    for way in ("", "host", "bus"):
        infer.way(way)
        before = infer.memory()
        got = infer.sums(train.odd.remote())
        now = infer.memory()
        used = {k: now[k] - before[k] for k in ("opened", "staged", "bus")}
        expect(
            f"odd_tensors_{way or 'ipc'}",
            same(got, "cuda"),
            used=used,
            why=now["why"],
            got=None if same(got, "cuda") else got,
        )
    infer.way("")
    got = infer.sums(train.odd.options(device=False).remote())
    expect("odd_tensors_device_false", same(got, "cpu"), got=None if same(got, "cpu") else got)
    here = train.odd()  # the driver has no device
    import torch

    got = [
        (str(v.dtype), list(v.shape), v.device.type, float(v.to(torch.float64).sum()) if v.numel() else 0.0)
        for v in here
    ]
    expect(
        "odd_tensors_driver",
        same(got, "cpu") and not torch.cuda.is_initialized(),
        counters=dict(_device.counters),
        initialised=torch.cuda.is_initialized(),
    )


def lifetime(train: Any, infer: Any) -> None:
    settled = until(lambda: train.memory()["kept"] == 0)  # results of earlier checks: the driver has just dropped them
    train.make(256, 3)
    base = train.memory()["allocated_mib"]
    made = train.give.remote()
    infer.load.options(share=True)(made)
    infer_base = infer.memory()
    train.change(4)
    snapshot = infer.first()
    del made
    gc.collect()
    time.sleep(1.5)
    held = train.memory()
    infer.drop()
    took = until(lambda: train.memory()["kept"] == 0)
    after = train.memory()
    holds = (
        settled >= 0
        and base == 256
        and snapshot == 3
        and held["kept"] == 1
        and held["allocated_mib"] == 512
        and 0 <= took < 3
        and after["allocated_mib"] == base
    )
    expect(
        "kept_while_used_in_place",
        holds,
        settled=settled,
        snapshot=snapshot,
        seconds=took,
        base=base,
        held=held,
        after=after,
        infer=infer_base,
    )

    infer.load.options(share=True)(train.lend.remote())
    train.change(5)
    seen = infer.first()
    infer.drop()
    took = until(lambda: train.memory()["kept"] == 0)
    expect("in_place_without_a_copy", seen == 5 and took >= 0, seen=seen, seconds=took)

    (victim,) = start(1)
    made = train.give.remote()
    victim.load.options(share=True)(made)
    del made
    os.kill(victim.pid(), signal.SIGKILL)
    took = until(lambda: (gc.collect(), train.memory()["kept"])[1] == 0)
    after = train.memory()
    expect("killed_receiver", 0 <= took < 9 and after["allocated_mib"] == base, seconds=took, base=base, after=after)
    end(victim)

    for way in ("", "host"):
        (victim,) = start(1)
        victim.make(64, 7)
        made = victim.give.remote()
        troupe.wait([made])
        os.kill(victim.pid(), signal.SIGKILL)
        try:
            victim.pid()  # until it is known to be dead
        except troupe.WorkerLostError:
            pass
        infer.way(way)
        try:
            outcome = f"a value: {infer.load(made)}"
        except troupe.WorkerLostError as err:
            outcome = f"WorkerLostError: {str(err)[:200]}"
        expect(f"killed_producer_{way or 'ipc'}", outcome.startswith("WorkerLostError"), outcome=outcome)
        infer.way("")
        end(victim)
        del made
    infer.drop()


def nothing_left(name: str, train: Any, infer: Any) -> None:
    """The workers have dropped all tensors: no memory is allocated, lent or mapped, and no reference is left."""
    train.drop_weights()
    infer.drop()
    gc.collect()
    took = until(lambda: train.memory()["kept"] == 0 and (c := _reference.counts())["owned"] == c["held"] == 0)
    at = [train.memory(), infer.memory()]
    holds = took >= 0 and all(m["allocated_mib"] == m["kept"] == m["mapped"] == 0 for m in at)
    expect(name, holds, seconds=took, train=at[0], infer=at[1], driver=_reference.counts())


def allocators(infer: Any) -> None:
    for conf in ("backend:cudaMallocAsync", "expandable_segments:True"):
        (train,) = start(1, PYTORCH_CUDA_ALLOC_CONF=conf, PYTORCH_ALLOC_CONF=conf)
        say("allocator", **train.about())
        transfer(f"allocator_{conf.partition(':')[0]}", train, infer, rounds=5, uses="staged")
        end(train)


def rings(train: Any, infer: Any) -> None:
    """The way through the host with other sizes of chunks."""
    infer.way("host")
    for slots, chunk in ((4, 16), (4, 64), (8, 16), (2, 64), (4, 32)):
        infer.disconnect()
        train.ring(slots, chunk)
        transfer(f"ring_{slots}x{chunk}mib", train, infer, rounds=8, uses="staged")
    infer.way("")


def main() -> int:
    global GRANTS
    with troupe.init(gpus="auto"):
        try:
            (probe,) = start(1)
        except troupe.Error as err:
            say("grants", error=str(err)[:500])
            GRANTS = False
            (probe,) = start(1)
        say("machine", node=platform.node(), kernel=platform.release(), **probe.about())
        say("floors", **probe.floors(MIB))
        end(probe)

        train, infer = start(2)
        say("infer", **infer.about())
        section(transfer, "same_device", train, infer, uses="opened")
        section(transfer, "same_device_lent", train, infer, "lend", uses="opened")
        section(transfer, "same_device_in_place", train, infer, "lend", uses="shared", share=True)
        section(transfer, "pushed", train, infer, "push", uses="opened")
        section(transfer, "pushed_in_place", train, infer, "push", uses="shared", share=True)
        section(transfer, "put", train, infer, "keep", uses="opened")
        section(correctness, train, infer)
        section(lifetime, train, infer)
        section(nothing_left, "nothing_left_after_kills", train, infer)
        end(train, infer)

        train, infer = start(2)
        infer.way("host")
        section(transfer, "through_host", train, infer, uses="staged")
        section(transfer, "through_host_lent", train, infer, "lend", uses="staged")
        section(transfer, "pushed_through_host", train, infer, "push", uses="staged")
        section(rings, train, infer)
        infer.way("bus")
        section(transfer, "over_bus", train, infer, rounds=2, uses="bus")
        infer.way("")
        section(transfer, "as_before", _Without(train), infer, rounds=2)
        section(many, train, infer)
        section(allocators, infer)
        section(driver, train)
        section(nothing_left, "nothing_left", train, infer)
        end(train, infer)
    say("end", failed=failed)
    return 1 if failed else 0


class _Without:
    """A worker whose tensors travel in their messages."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._worker, name)
        return method.options(device=False) if name == "give" else method


def many(train: Any, infer: Any) -> None:
    """State dicts of many tensors, to one receiver and to two at once."""
    (other,) = start(1)
    for count, kib in ((256, 4096), (1200, 1024), (5000, 200)):
        for receivers in ([infer], [infer, other]):
            times = []
            for _ in range(4):
                began = time.perf_counter()
                made = train.state.remote(count, kib)
                for done in [r.load_all.remote(made) for r in receivers]:
                    done.result()
                times.append((time.perf_counter() - began) * 1e3)
                del made, done
            want = [float((i % 100) * (kib << 9)) for i in range(count)]
            right = all([g[2:] for g in r.kept_sums()] == [("cuda", w) for w in want] for r in receivers)
            expect(
                f"state_of_{count}_tensors_to_{len(receivers)}",
                right,
                median_ms=round(statistics.median(times[1:]), 1),
                first_ms=round(times[0], 1),
                memory=infer.memory(),
                spans={"train": train.spans(), "infer": infer.spans()},
            )
            for r in receivers:
                r.drop()
    end(other)


def driver(train: Any) -> None:
    """The driver gets a tensor in memory, and CUDA stays untouched."""
    train.make(MIB, 9)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        got = train.give()
        times.append((time.perf_counter() - began) * 1e3)
    import torch

    with open("/proc/self/maps") as f:
        maps = f.read()
    expect(
        "driver",
        got.device.type == "cpu"
        and bool((got == 9).all())
        and not torch.cuda.is_initialized()
        and "/dev/nvidia" not in maps,
        median_ms=round(statistics.median(times[1:]), 1),
        initialised=torch.cuda.is_initialized(),
        libcuda="libcuda.so" in maps,
        counters=dict(_device.counters),
    )


if __name__ == "__main__":
    import device_tensors  # under its own name, so that workers import the class

    sys.exit(device_tensors.main())
