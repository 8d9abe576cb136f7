"""Calls to four workers by AReaL's LocalScheduler and by TroupeScheduler, in turns: all of them called with the same
small argument, and with a tensor of 16 MiB each that comes back and is read."""

import asyncio
import os
import statistics
import sys
import tempfile
import time

import torch
from areal.api import Job
from areal.api.cli_args import SchedulingSpec
from areal.infra.rpc.rtensor import RTensor
from areal.infra.scheduler.local import LocalScheduler

import troupe
from troupe.adapters.areal import TroupeScheduler

WORKERS, ROUNDS = 4, 5


def begin(cls, folder):
    root = os.path.join(folder, cls.__name__)
    os.makedirs(os.path.join(root, "names"))
    made = cls(
        gpu_devices=[0],
        experiment_name="e",
        trial_name="t",
        fileroot=root,
        nfs_record_root=os.path.join(root, "names"),
        startup_timeout=200.0,
    )
    made.create_workers(
        Job("actor", WORKERS, [SchedulingSpec(cpu=1, gpu=0, cmd="python -m areal.infra.rpc.rpc_server")])
    )
    workers = made.get_workers("actor")

    async def setup():
        await asyncio.gather(*[made.set_worker_env(w.id, {"RANK": str(i)}) for i, w in enumerate(workers)])
        await asyncio.gather(
            *[made.create_engine(w.id, "areal_check_engine.CheckEngine", w.id, config=None) for w in workers]
        )

    asyncio.run(setup())
    return made, workers


async def small(scheduler, workers, calls):
    for _ in range(calls):
        await asyncio.gather(*[scheduler.async_call_engine(w.id, "get_version") for w in workers])


async def large(scheduler, workers, calls):
    for _ in range(calls):
        results = await asyncio.gather(
            *[scheduler.async_call_engine(w.id, "echo", None, torch.ones(4 << 20)) for w in workers]
        )
        for r in results:
            assert float(RTensor.localize(r)[-1]) == 1.0
            await RTensor.clear_node(r.shard.node_addr, [r.shard.shard_id])


def main():
    with tempfile.TemporaryDirectory() as folder, troupe.init(output="none"):
        sides = {"AReaL's RPC": begin(LocalScheduler, folder), "Troupe": begin(TroupeScheduler, folder)}
        for name, what, calls in (("small argument", small, 50), ("16 MiB there and back", large, 1)):
            times = {side: [] for side in sides}
            for _ in range(ROUNDS):
                for side, (scheduler, workers) in sides.items():
                    start = time.perf_counter()
                    asyncio.run(what(scheduler, workers, calls))
                    times[side].append((time.perf_counter() - start) / calls * 1e3)
            theirs, ours = (statistics.median(t) for t in times.values())
            print(
                f"areal, {WORKERS} workers, {name}: AReaL's RPC {theirs:.1f} ms, Troupe {ours:.1f} ms, "
                f"{theirs / ours:.1f} times as long"
            )
        for scheduler, _ in sides.values():
            scheduler.delete_workers()


if __name__ == "__main__":
    sys.exit(main())
