"""Calls of a framework on Ray, on troupe.ray and with its adapter, each in a process of its own, in turns; prints the
medians.

measure_on_ray.py verl|roll          FRAMEWORK_calls.py has the calls
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import time

ROUNDS = 7
STARTS = 3  # attempts: Ray gives up after 30 seconds, which a busy machine may need


def serve(framework, fd):
    """One of the processes: runs what it reads from standard input, and tells the milliseconds of each call."""
    calls = importlib.import_module(f"{framework}_calls").runs()
    for run, _ in calls.values():
        run()
    with os.fdopen(fd, "w", buffering=1) as out:
        out.write(json.dumps(list(calls)) + "\n")
        for line in sys.stdin:
            run, count = calls[line.strip()]
            start = time.perf_counter()
            for _ in range(count):
                run()
            out.write(f"{(time.perf_counter() - start) / count * 1e3}\n")


class Side:
    def __init__(self, command, framework):
        for _ in range(STARTS):
            self._start(command, framework)
            if self.calls:
                return
            self._process.wait()
        raise SystemExit(f"{' '.join(command)} did not start")

    def _start(self, command, framework):
        told, tells = os.pipe()  # standard output is the framework's
        self._process = subprocess.Popen(
            [*command, __file__, framework, str(tells)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            pass_fds=(tells,),
        )
        os.close(tells)
        self._told = os.fdopen(told)
        self.calls = json.loads(self._told.readline() or "null")

    def measure(self, what):
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return float(self._told.readline())

    def end(self):
        self._process.stdin.close()
        self._process.wait()


def main(framework):
    ours = [sys.executable, "-m", "troupe.ray"]
    sides = {
        "Ray": Side([sys.executable], framework),
        "troupe.ray": Side(ours, framework),
        "adapter": Side([*ours, "--adapter", framework], framework),
    }
    for what in sides["Ray"].calls:
        times = {side: [] for side in sides}
        for _ in range(ROUNDS):
            for side, process in sides.items():
                times[side].append(process.measure(what))
        found = {side: statistics.median(t) for side, t in times.items()}
        text = ", ".join(f"{side} {ms:.2f} ms" for side, ms in found.items())
        print(
            f"{framework}, 4 workers, {what}: {text}; Ray {found['Ray'] / found['adapter']:.1f} times as long as the "
            "adapter",
            flush=True,
        )
    for process in sides.values():
        process.end()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        serve(sys.argv[1], int(sys.argv[2]))
