"""Optimisations of the Go core switched on and off (TROUPE_AB_OFF), in turns: one JSON object for each row, medians of all rounds.

    .venv/bin/python benchmarks/python/ab.py batch_writes --rows call_1_1,in_flight_1000 --rounds 7
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys

import bench


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("optimisation")
    parser.add_argument("--rows", default="call_1_1,in_flight_1000,one_to_all_8")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rows = args.rows.split(",")
    values: dict[tuple[str, str], list[float]] = {(row, state): [] for row in rows for state in ("on", "off")}
    unit = {}
    for n in range(args.rounds):
        for state in ("on", "off") if n % 2 == 0 else ("off", "on"):
            os.environ["TROUPE_AB_OFF"] = args.optimisation if state == "off" else ""
            system = bench.System("troupe", sys.executable)
            for row in rows:
                answer = system.measure(row, 60) or sys.exit(f"{row}: no figure")
                unit[row] = next(iter(answer))
                values[row, state].append(answer[unit[row]])
            system.close()
    for row in rows:
        on, off = statistics.median(values[row, "on"]), statistics.median(values[row, "off"])
        change = round(100 * (off / on - 1), 1)
        print(json.dumps({"optimisation": args.optimisation, "row": row, "unit": unit[row], "rounds": args.rounds, "on": on, "off": off, "change_percent": change}))


if __name__ == "__main__":
    main()
