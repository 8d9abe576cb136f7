"""How much the output of workers slows down calls: 32 ranks print 1,000 lines a second each while a driver makes
blocking calls.

Rounds alternate between three states, so that the load of the machine affects them alike: the ranks are quiet; they
print to /dev/null, which costs the machine the printing alone; they print to their stdout, which Troupe reads, stores
and shows. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from typing import Any

import troupe
from troupe import Cluster, Worker, WorkerConfig


class Printer(Worker):
    """Prints lines at a steady rate, from a thread of its own."""

    state = "quiet"
    printed = 0

    def start(self, rate: int) -> None:
        threading.Thread(target=self._run, args=(rate,), daemon=True).start()

    def _run(self, rate: int) -> None:
        null = open(os.devnull, "w")  # noqa: SIM115
        due = time.monotonic()
        while True:
            due += 0.02
            time.sleep(max(0.0, due - time.monotonic()))
            out = {"quiet": None, "null": null, "shown": sys.stdout}[self.state]
            for _ in range(rate // 50 if out is not None else 0):
                print(
                    f"step {self.printed} of rank {self.rank}: loss 0.123456, gradient norm 1.2345",
                    file=out,
                    flush=True,
                )
                self.printed += 1

    def become(self, state: str) -> int:
        self.state = state
        return self.printed


class Echo(Worker):
    def echo(self, value: int) -> int:
        return value


def measure(echo, seconds: float) -> list[float]:
    """The times of blocking calls, in microseconds."""
    times, end = [], time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        echo(1)
        times.append((time.perf_counter() - begun) * 1e6)
    return times


def summary(times: list[float]) -> dict[str, float]:
    """The fifth of the calls that was fastest shows the cost where other programs use the machine too."""
    fast, median = statistics.quantiles(times, n=10)[1:5:3]
    return {
        "fast_us": round(fast, 1),
        "median_us": round(median, 1),
        "mean_us": round(statistics.fmean(times), 1),
        "calls": len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--rate", type=int, default=1000, help="lines a second of each rank")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each state in a round")
    parser.add_argument("--output", default="all", help="mode of init")
    args = parser.parse_args()
    shown = open(os.devnull, "w") if os.environ.get("TROUPE_BENCH_QUIET") else sys.stderr  # noqa: SIM115
    result, sys.stdout = sys.stdout, shown  # the workers' lines go where they do not hide the result
    troupe.init(output=args.output, gpus="none")
    printers = Cluster("printers", Printer, worker_config=WorkerConfig(world_size=args.ranks))
    echo = troupe.actor(Echo, name="echo").echo
    printers.execute_all_sync("start", args.rate)
    measure(echo, 1.0)
    times: dict[str, list[float]] = {"quiet": [], "null": [], "shown": []}
    printed, shown_seconds = 0, 0.0
    for _ in range(args.rounds):
        for state in times:
            before = sum(printers.execute_all_sync("become", state))
            begun = time.perf_counter()
            measure(echo, 0.2)  # the last state has died away
            times[state] += measure(echo, args.seconds)
            if state == "shown":
                printed += sum(printers.execute_all_sync("become", "quiet")) - before
                shown_seconds += time.perf_counter() - begun
    troupe.shutdown()
    row: dict[str, Any] = {state: summary(t) for state, t in times.items()}
    row["lines_per_second"] = round(printed / shown_seconds)
    for state, against in (("shown", "quiet"), ("shown", "null"), ("null", "quiet")):
        row[f"{state}_slower_than_{against}_percent"] = round(
            100 * (row[state]["median_us"] / row[against]["median_us"] - 1), 1
        )
    print(json.dumps(row), file=result)


if __name__ == "__main__":
    main()
