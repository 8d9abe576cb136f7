"""The loops that every system is measured with. A system gives functions; each proves that the work was done."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SMALL = b"x" * 64


def p50(samples: list[float]) -> dict[str, float]:
    samples.sort()
    n = len(samples)
    return {
        "p50_us": round(samples[n // 2] * 1e6, 1),
        "p99_us": round(samples[min(n - 1, n * 99 // 100)] * 1e6, 1),
        "calls": n,
    }


def timed(call: Callable[[], Any], seconds: float, most: int, warm: int = 50) -> dict[str, float]:
    """The time of one call after the other."""
    for _ in range(warm):
        call()
    samples = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and len(samples) < most:
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    return p50(samples)


def in_turns(
    without: Callable[[], Any],
    call: Callable[[], Any],
    seconds: float,
    prepare: Callable[[], Callable[[], Any]] | None = None,
    block: int = 100,
) -> dict[str, float]:
    """The time of a call, and its ratio to that of another: both are measured in blocks, in turns. prepare is called
    before each block of the first; what it returns, after it."""
    samples: dict[bool, list[float]] = {False: [], True: []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not samples[True]:
        for measured in (False, True):
            undo = prepare() if measured and prepare is not None else None
            for i in range(block + 20):
                began = time.perf_counter()
                call() if measured else without()
                if i >= 20:
                    samples[measured].append(time.perf_counter() - began)
            if undo is not None:
                undo()
    out, base = p50(samples[True]), p50(samples[False])
    return {**out, "without_p50_us": base["p50_us"], "ratio": round(out["p50_us"] / base["p50_us"], 3)}


def beside_busy_thread(call: Callable[[], Any], seconds: float) -> dict[str, float]:
    """The same while another thread of the caller's process computes in Python."""
    stop = False

    def busy() -> None:
        n = 0
        while not stop:
            n += 1

    thread = threading.Thread(target=busy, daemon=True)
    thread.start()
    try:
        return timed(call, seconds, 2000, warm=5)
    finally:
        stop = True
        thread.join()


def in_flight(
    send: Callable[[], Any], get: Callable[[Any], Any], seconds: float, width: int = 1000
) -> dict[str, float]:
    """Calls a second with so many under way."""
    from collections import deque

    for f in [send() for _ in range(width)]:
        get(f)
    done = 0
    began = time.perf_counter()
    futures: deque[Any] = deque(send() for _ in range(width))
    while time.perf_counter() - began < seconds:
        for _ in range(100):
            get(futures.popleft())
            futures.append(send())
        done += 100
    for f in futures:
        get(f)
    done += len(futures)
    return {"per_s": round(done / (time.perf_counter() - began), 1), "calls": done}


def serve(rows: dict[str, Callable[[], dict[str, Any]]]) -> None:
    """Measures the rows that are named on standard input."""
    for line in sys.stdin:
        row = line.strip()
        try:
            answer = rows[row]()
        except Exception as err:
            answer = {"error": f"{type(err).__name__}: {err}"}
            sys.stderr.write(f"{row}: {answer['error']}\n")
        print(json.dumps(answer), flush=True)
