"""The same rows on Ray, and on troupe.ray: `python -m troupe.ray on_ray.py`."""

from __future__ import annotations

import time
from typing import Any

import numpy
import ray
import ray.util

import loops


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self) -> None:
        self.array = None

    def echo(self, x: Any) -> Any:
        return x

    def size(self, x: Any) -> int:
        return int(x.nbytes)

    def result(self) -> Any:
        if self.array is None:
            self.array = numpy.ones(64 << 17)
        return self.array

    def made(self) -> Any:
        return numpy.ones(64 << 20, numpy.uint8)

    def largest(self, x: Any) -> int:
        return int(x.view(numpy.uint64).max())


made: dict[int, list[Any]] = {}


def workers(n: int) -> list[Any]:
    for other in [k for k in made if k != n]:
        for w in made.pop(other):
            ray.kill(w)
    if n not in made:
        made[n] = [Worker.remote() for _ in range(n)]
        ray.get([w.echo.remote(1) for w in made[n]])
    return made[n]


def call_1_1() -> dict[str, Any]:
    w = workers(1)[0]
    return loops.timed(lambda: ray.get(w.echo.remote(loops.SMALL)), 2.5, 10_000)


def busy() -> dict[str, Any]:
    w = workers(1)[0]
    return loops.beside_busy_thread(lambda: ray.get(w.echo.remote(loops.SMALL)), 3)


def in_flight() -> dict[str, Any]:
    w = workers(1)[0]
    return loops.in_flight(lambda: w.echo.remote(loops.SMALL), ray.get, 3)


def one_to_all(n: int) -> dict[str, Any]:
    ws = workers(n)
    return loops.timed(lambda: ray.get([w.echo.remote(loops.SMALL) for w in ws]), 2.5, 5000, warm=10)


def create(n: int) -> dict[str, Any]:
    for other in list(made):
        for w in made.pop(other):
            ray.kill(w)
    began = time.perf_counter()
    ws = [Worker.remote() for _ in range(n)]
    assert ray.get([w.echo.remote(1) for w in ws]) == [1] * n
    took = time.perf_counter() - began
    for w in ws:
        ray.kill(w)
    return {"p50_us": round(took * 1e6, 1)}


def argument() -> dict[str, Any]:
    w, array = workers(1)[0], numpy.ones(64 << 17)
    return loops.timed(lambda: ray.get(w.size.remote(array)), 3, 20, warm=2)


def result() -> dict[str, Any]:
    w = workers(1)[0]
    return loops.timed(lambda: ray.get(w.result.remote()), 3, 20, warm=2)


def result_made() -> dict[str, Any]:
    w = workers(1)[0]
    return loops.timed(lambda: ray.get(w.made.remote()), 3, 20, warm=2)


def scatter_gather() -> dict[str, Any]:
    ws, parts = workers(8), [numpy.ones(32 << 20, numpy.uint8) for _ in range(8)]
    return loops.timed(lambda: ray.get([w.echo.remote(p) for w, p in zip(ws, parts, strict=True)]), 4, 20, warm=2)


def broadcast(method: str) -> dict[str, Any]:
    ws, array = workers(8), numpy.ones(256 << 20, numpy.uint8)

    def call() -> None:
        reference = ray.put(array)
        ray.get([getattr(w, method).remote(reference) for w in ws])

    return loops.timed(call, 4, 20, warm=2)


def put_get() -> dict[str, Any]:
    array = numpy.ones(64 << 17)
    return loops.timed(lambda: ray.get(ray.put(array)), 3, 40, warm=2)


def placement_group() -> dict[str, Any]:
    def call() -> None:
        group = ray.util.placement_group([{"CPU": 1}] * 4)
        ray.get(group.ready())
        ray.util.remove_placement_group(group)

    return loops.timed(call, 2.5, 1000, warm=5)


def worker_to_worker() -> dict[str, Any]:
    a, b = workers(8)[:2]
    return loops.timed(lambda: ray.get(b.size.remote(a.made.remote())), 3, 20, warm=2)


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=64)
    loops.serve(
        {
            "call_1_1": call_1_1,
            "call_1_1_busy_thread": busy,
            "in_flight_1000": in_flight,
            "one_to_all_1": lambda: one_to_all(1),
            "one_to_all_8": lambda: one_to_all(8),
            "one_to_all_32": lambda: one_to_all(32),
            "create_8": lambda: create(8),
            "create_32": lambda: create(32),
            "argument_64mib": argument,
            "result_64mib": result,
            "result_made_64mib": result_made,
            "scatter_gather_256mib": scatter_gather,
            "broadcast_256mib": lambda: broadcast("size"),
            "broadcast_read_256mib": lambda: broadcast("largest"),
            "worker_to_worker_64mib": worker_to_worker,
            "put_get_64mib": put_get,
            "placement_group": placement_group,
        }
    )
