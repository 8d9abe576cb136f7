"""Resident memory of a driver and its workers before, during and after many large calls; one JSON object.

make memory-python            # CALLS=1000, 16 MiB each way
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("TROUPE_SHM_KEEP", "2")

import numpy

import troupe

MIB = 1 << 20


def resident() -> dict[str, int]:
    """MiB: private memory, and the pages of shared memory that this process has mapped."""
    with open("/proc/self/status") as f:
        fields = dict(line.split(":", 1) for line in f)
    kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")}
    return {"private": (kib["RssAnon"] + kib["RssFile"]) >> 10, "shared": kib["RssShmem"] >> 10}


class Worker:
    def echo(self, x: Any) -> Any:
        return x

    def resident(self) -> dict[str, int]:
        return resident()


def main() -> int:
    calls, size, world = int(sys.argv[1]) if len(sys.argv) > 1 else 1000, 16 * MIB, 4
    with troupe.init(gpus="none"):
        cluster = troupe.Cluster("memory", Worker, worker_config=troupe.WorkerConfig(world_size=world))

        def look() -> list[dict[str, int]]:
            return [resident(), *cluster.execute_all_sync("resident")]

        array = numpy.zeros(size, numpy.uint8)
        for handle in cluster.workers:
            assert (handle.echo(array) == array).all()
        time.sleep(6)
        before, most = look(), look()
        for n in range(calls):
            array[:8] = n % 251
            got = cluster.workers[n % world].echo(array)
            assert got[0] == n % 251 and got[-1] == 0 and len(got) == size
            if n % 20 == 0:
                most = [{k: max(a[k], b[k]) for k in a} for a, b in zip(most, look(), strict=True)]
        del got
        time.sleep(6)
        after = look()
        grown = max(a["private"] + a["shared"] - b["private"] - b["shared"] for a, b in zip(after, before, strict=True))
    print(
        json.dumps(
            {
                "calls": calls,
                "mib": size // MIB,
                "processes": "driver, 4 workers",
                "before": before,
                "most": most,
                "after": after,
                "grown": grown,
            }
        )
    )
    return 1 if grown > 2 * size // MIB else 0


if __name__ == "__main__":
    sys.exit(main())
