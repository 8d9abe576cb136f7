"""troupe.ray beside Troupe's own API and, where RAY_PYTHON names an interpreter that has it, Ray: a table, or JSON.

    make bench-ray RAY_PYTHON=/path/to/python          # all rows
    make bench-ray ROWS=call_1_1,create_8 JSON=1

The systems take turns: each is a child process that measures one row when it is told to, a row is measured in several
rounds, and the middle one counts. of_own: how many times the time of Troupe's own API troupe.ray takes, the median of
the rounds, because the speed of a machine may change between them; of_ray: how many times Ray's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from typing import Any

import bench

# By row, the row of Troupe's own API that does the same: a call to each of several actors is no role-wide call.
ROWS = {
    "call_1_1": "call_1_1",
    "in_flight_1000": "in_flight_1000",
    "one_to_all_8": "one_to_each_8",
    "one_to_all_32": "one_to_each_32",
    "create_8": "create_each_8",
    "create_32": "create_each_32",
    "placement_group": "placement_group",
    "put_get_64mib": "put_get_64mib",
    "argument_64mib": "argument_64mib",
    "result_made_64mib": "result_made_64mib",
    "broadcast_256mib": "broadcast_256mib",
    "broadcast_read_256mib": "broadcast_read_256mib",
    "worker_to_worker_64mib": "worker_to_worker_64mib",
}
LIMIT = 120.0  # seconds for one round of a row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, with commas between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    args = parser.parse_args()
    rows = [r for r in args.rows.split(",") if r]
    unknown = [r for r in rows if r not in ROWS]
    if unknown:
        parser.error(f"there is no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    systems = [
        bench.System("troupe", sys.executable),
        bench.System("troupe.ray", sys.executable, ["-m", "troupe.ray", os.path.join(bench.HERE, "on_ray.py")]),
    ]
    if os.environ.get("RAY_PYTHON"):
        systems.append(bench.System("ray", os.environ["RAY_PYTHON"]))
    if not args.json:
        print(f"{'row':<24}{'troupe':>14}{'troupe.ray':>14}{'ray':>14}{'of_own':>9}{'of_ray':>9}", flush=True)
    failed = False
    for row in rows:
        result = measured(row, systems, min(args.rounds, bench.ROUNDS.get(row, args.rounds)))
        failed = failed or "troupe.ray" not in result["systems"]
        if args.json:
            print(
                json.dumps(
                    {
                        **result,
                        "commit": bench.commit(),
                        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
                    }
                ),
                flush=True,
            )
        else:
            print(line(result), flush=True)
    for system in systems:
        system.close()
    return 1 if failed else 0


def measured(row: str, systems: list[bench.System], rounds: int) -> dict[str, Any]:
    """The figures of a row, by system, and their ratios."""
    taken: dict[str, list[dict[str, Any] | None]] = {s.name: [] for s in systems}
    for _ in range(rounds):
        for system in systems:
            taken[system.name].append(system.measure(ROWS[row] if system.name == "troupe" else row, LIMIT))
    found = {
        name: bench.middle(known) for name, answers in taken.items() if (known := [a for a in answers if a is not None])
    }
    ours = taken["troupe.ray"]
    return {
        "row": row,
        "systems": found,
        "of_own": ratio(ours, taken["troupe"]),
        "of_ray": ratio(ours, taken.get("ray", [])),
    }


def ratio(ours: list[dict[str, Any] | None], others: list[dict[str, Any] | None]) -> float | None:
    """How many times the other's time ours is: the median of the rounds that both measured."""
    each = [
        float(other["per_s"]) / float(own["per_s"]) if "per_s" in own else float(own["p50_us"]) / float(other["p50_us"])
        for own, other in zip(ours, others, strict=False)
        if own is not None and other is not None
    ]
    return round(statistics.median(each), 2) if each else None


def line(result: dict[str, Any]) -> str:
    def shown(name: str) -> str:
        figures = result["systems"].get(name)
        if figures is None:
            return "-"
        return f"{figures['per_s']:.0f}/s" if "per_s" in figures else f"{figures['p50_us']:.0f} us"

    ratios = "".join(f"{'-' if result[k] is None else result[k]:>9}" for k in ("of_own", "of_ray"))
    return f"{result['row']:<24}" + "".join(f"{shown(n):>14}" for n in ("troupe", "troupe.ray", "ray")) + ratios


if __name__ == "__main__":
    sys.exit(main())
