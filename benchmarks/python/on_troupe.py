"""The rows on Troupe."""

from __future__ import annotations

import time
from typing import Any

import numpy

import loops
import troupe


class Worker:
    def __init__(self) -> None:
        self.array = numpy.ones(64 << 17)  # 64 MiB

    def echo(self, x: Any) -> Any:
        return x

    def size(self, x: Any) -> int:
        return int(x.nbytes)

    def result(self) -> Any:
        return self.array

    def made(self) -> Any:
        return numpy.ones(64 << 20, numpy.uint8)

    def empty(self) -> Any:
        array = troupe.empty(64 << 20, numpy.uint8)
        array[:] = 1
        return array


class Small:
    def echo(self, x: Any) -> Any:
        return x

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    @troupe.register(dispatch_mode=troupe.Dispatch.ONE_TO_ALL)
    def size(self, x: Any) -> int:
        return int(x.nbytes)

    @troupe.register(dispatch_mode=troupe.Dispatch.ONE_TO_ALL)
    def largest(self, x: Any) -> int:
        return int(x.view(numpy.uint64).max())

    def made(self) -> Any:
        return numpy.ones(64 << 20, numpy.uint8)


made: dict[int, troupe.Cluster] = {}


def cluster(n: int) -> troupe.Cluster:
    for other in [k for k in made if k != n]:
        made.pop(other).shutdown()
    if n not in made:
        made[n] = troupe.Cluster(
            f"bench-{n}", Worker if n == 1 else Small, worker_config=troupe.WorkerConfig(world_size=n)
        )
    return made[n]


def call_1_1() -> dict[str, Any]:
    handle = cluster(1).workers[0]
    assert handle.echo(loops.SMALL) == loops.SMALL
    return loops.timed(lambda: handle.echo(loops.SMALL), 2.5, 10_000)


class Control:
    """A worker with a method on the control lane."""

    def echo(self, x: Any) -> Any:
        return x

    @troupe.register(lane="control")
    def status(self) -> str:
        return "ok"


class Ledger:
    def note(self, x: Any) -> Any:
        return x


def call_served() -> dict[str, Any]:
    """call_1_1 while the driver serves an object, in turns with calls while it serves none."""
    handle = cluster(1).workers[0]

    def served() -> Any:
        return troupe.serve(Ledger()).cluster.shutdown

    return loops.in_turns(lambda: handle.echo(loops.SMALL), lambda: handle.echo(loops.SMALL), 5, served)


def call_control() -> dict[str, Any]:
    """call_1_1 of a worker that has a method on the control lane, in turns with one that has none."""
    plain, handle = cluster(1).workers[0], troupe.actor(Control)
    try:
        return loops.in_turns(lambda: plain.echo(loops.SMALL), lambda: handle.echo(loops.SMALL), 5)
    finally:
        handle.cluster.shutdown()


def busy() -> dict[str, Any]:
    handle = cluster(1).workers[0]
    return loops.beside_busy_thread(lambda: handle.echo(loops.SMALL), 3)


def in_flight() -> dict[str, Any]:
    handle = cluster(1).workers[0]
    return loops.in_flight(lambda: handle.echo.remote(loops.SMALL), lambda f: f.result(), 3)


def one_to_all(n: int) -> dict[str, Any]:
    role = cluster(n)
    assert role.execute_all_sync("echo", loops.SMALL) == [loops.SMALL] * n
    return loops.timed(lambda: role.execute_all_sync("echo", loops.SMALL), 2.5, 5000)


def actors(n: int) -> list[Any]:
    """Workers of roles of their own."""
    for other in list(made):
        made.pop(other).shutdown()
    found = [troupe.actor(Small, num_cpus=0.01) for _ in range(n)]
    troupe.get([a.echo.remote(1) for a in found])
    return found


def one_to_each(n: int) -> dict[str, Any]:
    """one_to_all with a call for each of n actors."""
    handles = actors(n)
    try:
        return loops.timed(lambda: troupe.get([h.echo.remote(loops.SMALL) for h in handles]), 2.5, 5000, warm=10)
    finally:
        for h in handles:
            troupe.kill(h)


def create_each(n: int) -> dict[str, Any]:
    """create of n roles of one worker."""
    for other in list(made):
        made.pop(other).shutdown()
    began = time.perf_counter()
    handles = [troupe.actor(Small, num_cpus=0.01, background=True) for _ in range(n)]
    assert troupe.get([h.echo.remote(1) for h in handles]) == [1] * n
    took = time.perf_counter() - began
    for h in handles:
        troupe.kill(h)
    return {"p50_us": round(took * 1e6, 1)}


def put_get() -> dict[str, Any]:
    array = numpy.ones(64 << 17)
    return loops.timed(lambda: troupe.put(array).result(), 3, 40, warm=2)


def reserve() -> dict[str, Any]:
    def call() -> None:
        troupe.Reservation([{"CPU": 0.01}] * 4, wait=10).release()

    return loops.timed(call, 2.5, 1000, warm=5)


def create(n: int) -> dict[str, Any]:
    for other in list(made):
        made.pop(other).shutdown()
    began = time.perf_counter()
    role = troupe.Cluster("created", Small, worker_config=troupe.WorkerConfig(world_size=n))
    assert role.execute_all_sync("echo", 1) == [1] * n
    took = time.perf_counter() - began
    role.shutdown()
    return {"p50_us": round(took * 1e6, 1)}


def kill_busy(n: int) -> dict[str, Any]:
    """From kill of a role with a running call on every rank until the call has failed, and name and CPUs are free."""
    taken = []
    for _ in range(5):
        role = troupe.Cluster(
            "killed", Small, worker_config=troupe.WorkerConfig(world_size=n, num_cpus_per_worker=0.01)
        )
        running = role.execute_all_async("nap", 60)
        while not all(i["calls"] for i in role.info()):
            time.sleep(0.01)
        began = time.perf_counter()
        troupe.kill(role)
        try:
            running.result(1)
        except troupe.WorkerLostError:
            taken.append(time.perf_counter() - began)
    taken.sort()
    return {"p50_us": round(taken[len(taken) // 2] * 1e6, 1), "max_us": round(taken[-1] * 1e6, 1)}


def argument() -> dict[str, Any]:
    handle, array = cluster(1).workers[0], numpy.ones(64 << 17)
    assert handle.size(array) == 64 << 20
    return loops.timed(lambda: handle.size(array), 3, 20, warm=2)


def result() -> dict[str, Any]:
    handle = cluster(1).workers[0]
    assert handle.result().nbytes == 64 << 20
    return loops.timed(lambda: handle.result(), 3, 20, warm=2)


def result_made(method: str) -> dict[str, Any]:
    handle = cluster(1).workers[0]
    assert getattr(handle, method)().nbytes == 64 << 20
    return loops.timed(lambda: getattr(handle, method)(), 3, 20, warm=2)


def result_written(copy: bool) -> dict[str, Any]:
    """The caller writes to all of the array that it receives."""
    method = cluster(1).workers[0].result.options(copy=copy)

    def call() -> None:
        method()[:] = 2

    return loops.timed(call, 3, 20, warm=2)


def scatter_gather() -> dict[str, Any]:
    role, parts = cluster(8), [numpy.ones(32 << 20, numpy.uint8) for _ in range(8)]
    assert [a.nbytes for a in role.execute_all_sync("echo", troupe.Scatter(parts))] == [32 << 20] * 8
    return loops.timed(lambda: role.execute_all_sync("echo", troupe.Scatter(parts)), 4, 20, warm=2)


def broadcast(method: str, want: int) -> dict[str, Any]:
    role, array = cluster(8), numpy.ones(256 << 20, numpy.uint8)
    assert getattr(role, method)(array) == [want] * 8
    return loops.timed(lambda: getattr(role, method)(array), 4, 20, warm=2)


def worker_to_worker() -> dict[str, Any]:
    a, b = cluster(8).workers[:2]
    assert b.size(a.made.remote()) == 64 << 20
    return loops.timed(lambda: b.size(a.made.remote()), 3, 20, warm=2)


def plain_copy() -> dict[str, Any]:
    source, target = numpy.ones(64 << 20, numpy.uint8), numpy.zeros(64 << 20, numpy.uint8)
    return loops.timed(lambda: numpy.copyto(target, source), 1, 50, warm=2)


if __name__ == "__main__":
    with troupe.init(gpus="none"):
        loops.serve(
            {
                "call_1_1": call_1_1,
                "call_1_1_served": call_served,
                "call_1_1_control": call_control,
                "call_1_1_busy_thread": busy,
                "in_flight_1000": in_flight,
                "one_to_all_1": lambda: one_to_all(1),
                "one_to_all_8": lambda: one_to_all(8),
                "one_to_all_32": lambda: one_to_all(32),
                "create_8": lambda: create(8),
                "create_32": lambda: create(32),
                "kill_busy_1": lambda: kill_busy(1),
                "kill_busy_8": lambda: kill_busy(8),
                "argument_64mib": argument,
                "result_64mib": result,
                "result_made_64mib": lambda: result_made("made"),
                "result_empty_64mib": lambda: result_made("empty"),
                "result_written_64mib": lambda: result_written(False),
                "result_copied_written_64mib": lambda: result_written(True),
                "scatter_gather_256mib": scatter_gather,
                "broadcast_256mib": lambda: broadcast("size", 256 << 20),
                "broadcast_read_256mib": lambda: broadcast("largest", 0x0101010101010101),
                "worker_to_worker_64mib": worker_to_worker,
                "plain_copy_64mib": plain_copy,
                "one_to_each_8": lambda: one_to_each(8),
                "one_to_each_32": lambda: one_to_each(32),
                "create_each_8": lambda: create_each(8),
                "create_each_32": lambda: create_each(32),
                "put_get_64mib": put_get,
                "placement_group": reserve,
            }
        )
