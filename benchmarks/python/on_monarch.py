"""The same rows on Monarch."""

from __future__ import annotations

import time
from typing import Any

import numpy
from monarch.actor import Actor, endpoint, this_host

import loops


class Worker(Actor):
    def __init__(self) -> None:
        self.array = None

    @endpoint
    async def echo(self, x: Any) -> Any:
        return x

    @endpoint
    async def nbytes(self, x: Any) -> int:
        return int(x.nbytes)

    @endpoint
    async def result(self) -> Any:
        if self.array is None:
            self.array = numpy.ones(64 << 17)
        return self.array


made: dict[int, tuple[Any, Any]] = {}


def spawn(n: int) -> tuple[Any, Any]:
    procs = this_host().spawn_procs(per_host={"gpus": n})
    return procs, procs.spawn("workers", Worker)


def workers(n: int) -> Any:
    for other in [k for k in made if k != n]:
        made.pop(other)[0].stop().get()
    if n not in made:
        made[n] = spawn(n)
        made[n][1].echo.call(1).get()
    return made[n][1]


def call_1_1() -> dict[str, Any]:
    w = workers(1)
    return loops.timed(lambda: w.echo.call_one(loops.SMALL).get(), 2.5, 10_000)


def busy() -> dict[str, Any]:
    w = workers(1)
    return loops.beside_busy_thread(lambda: w.echo.call_one(loops.SMALL).get(), 3)


def in_flight() -> dict[str, Any]:
    w = workers(1)
    return loops.in_flight(lambda: w.echo.call_one(loops.SMALL), lambda f: f.get(), 3)


def one_to_all(n: int) -> dict[str, Any]:
    w = workers(n)
    return loops.timed(lambda: w.echo.call(loops.SMALL).get(), 2.5, 5000, warm=10)


def create(n: int) -> dict[str, Any]:
    for other in list(made):
        made.pop(other)[0].stop().get()
    began = time.perf_counter()
    procs, w = spawn(n)
    w.echo.call(1).get()
    took = time.perf_counter() - began
    procs.stop().get()
    return {"p50_us": round(took * 1e6, 1)}


def argument() -> dict[str, Any]:
    w, array = workers(1), numpy.ones(64 << 17)
    return loops.timed(lambda: w.nbytes.call_one(array).get(), 3, 20, warm=2)


def result() -> dict[str, Any]:
    w = workers(1)
    return loops.timed(lambda: w.result.call_one().get(), 3, 20, warm=2)


if __name__ == "__main__":
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
        }
    )
