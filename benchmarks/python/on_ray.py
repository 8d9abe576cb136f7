"""The same rows on Ray."""

from __future__ import annotations

import time
from typing import Any

import numpy
import ray

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


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=64)
    loops.serve(
        {
            "call_1_1": call_1_1, "call_1_1_busy_thread": busy, "in_flight_1000": in_flight, "one_to_all_1": lambda: one_to_all(1),
            "one_to_all_8": lambda: one_to_all(8), "one_to_all_32": lambda: one_to_all(32), "create_8": lambda: create(8),
            "create_32": lambda: create(32), "argument_64mib": argument, "result_64mib": result,
        }
    )  # fmt: skip
