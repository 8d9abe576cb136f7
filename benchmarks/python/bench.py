"""Calls from Python, measured: one JSON object a line.

    make bench-python                       # all rows
    make bench-python ROWS=call_1_1,create_8

Where TROUPE_RAY_PYTHON or TROUPE_MONARCH_PYTHON names an interpreter that has them, the same loops run on Ray and
Monarch too, in turns with ours: each system is a child process that measures one row when it is told to, and a row is
measured in several rounds, of which the middle one counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
ROWS = [
    "call_1_1",
    "call_1_1_served",
    "call_1_1_control",
    "call_1_1_busy_thread",
    "in_flight_1000",
    "one_to_all_1",
    "one_to_all_8",
    "one_to_all_32",
    "create_8",
    "create_32",
    "kill_busy_1",
    "kill_busy_8",
    "argument_64mib",
    "result_64mib",
    "result_made_64mib",
    "result_empty_64mib",
    "result_written_64mib",
    "result_copied_written_64mib",
    "scatter_gather_256mib",
    "broadcast_256mib",
    "broadcast_read_256mib",
    "worker_to_worker_64mib",
    "plain_copy_64mib",
]
ONLY_TROUPE = {
    "kill_busy_1",
    "kill_busy_8",
    "call_1_1_served",
    "call_1_1_control",
    "result_empty_64mib",
    "result_written_64mib",
    "result_copied_written_64mib",
    "plain_copy_64mib",
}
ROUNDS = {"create_32": 1, "create_8": 2}
BUDGET = 240.0  # seconds for everything


class System:
    """A child process that measures rows of one system."""

    def __init__(self, name: str, python: str, command: list[str] | None = None) -> None:
        """command: the arguments of the interpreter, instead of the script on_NAME.py."""
        self.name = name
        quiet = subprocess.DEVNULL if not name.startswith("troupe") else None
        self.process: subprocess.Popen[str] | None = subprocess.Popen(
            [python, *(command or [os.path.join(HERE, f"on_{name}.py")])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=quiet,
        )

    def measure(self, row: str, limit: float) -> dict[str, Any] | None:
        """One round of a row; None: it could not be measured."""
        if self.process is None:
            return None
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(row + "\n")
            self.process.stdin.flush()
        except OSError:
            return self.give_up()
        import select

        end = time.monotonic() + limit
        while time.monotonic() < end:
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                break
            line = self.process.stdout.readline()
            if not line:
                return self.give_up()
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return None if "error" in answer else answer
        return self.give_up()

    def give_up(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()


def commit() -> str:
    out = subprocess.run(["git", "-C", HERE, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return out.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = [r for r in args.rows.split(",") if r]
    unknown = [r for r in rows if r not in ROWS]
    if unknown:
        parser.error(f"there is no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    pythons = {
        "troupe": sys.executable,
        "ray": os.environ.get("TROUPE_RAY_PYTHON"),
        "monarch": os.environ.get("TROUPE_MONARCH_PYTHON"),
    }
    systems = [System(name, python) for name, python in pythons.items() if python]
    began = time.monotonic()
    about = {
        "commit": commit(),
        "machine": f"{platform.node()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    failed = False
    for row in rows:
        taken: dict[str, list[dict[str, Any]]] = {s.name: [] for s in systems}
        for _ in range(min(args.rounds, ROUNDS.get(row, args.rounds))):
            for system in systems:
                if row in ONLY_TROUPE and system.name != "troupe":
                    continue
                left = BUDGET - (time.monotonic() - began)
                if left < 5 and taken[system.name]:
                    continue
                answer = system.measure(row, min(90.0, max(left, 20.0)))
                if answer is not None:
                    taken[system.name].append(answer)
        for system in systems:
            if not taken[system.name]:
                if row in ONLY_TROUPE and system.name != "troupe":
                    continue
                sys.stderr.write(f"{row}: no figure for {system.name}\n")
                failed = failed or system.name == "troupe"
                continue
            print(
                json.dumps(
                    {
                        "row": row,
                        "system": system.name,
                        **middle(taken[system.name]),
                        "rounds": len(taken[system.name]),
                        **about,
                    }
                ),
                flush=True,
            )
    for system in systems:
        system.close()
    return 1 if failed else 0


def middle(answers: list[dict[str, Any]]) -> dict[str, Any]:
    key = "p50_us" if "p50_us" in answers[0] else "per_s"
    return sorted(answers, key=lambda a: float(a[key]))[len(answers) // 2]


if __name__ == "__main__":
    sys.exit(main())
