"""Roles that are resized while several threads and another role call them."""

import asyncio
import os
import queue
import signal
import threading
import time

import pytest

import resized
import troupe
from troupe import WorkerConfig


def test_no_call_fails_while_a_role_is_resized(session):
    with (
        troupe.Cluster("pool", resized.Pool, worker_config=WorkerConfig(world_size=2)) as pool,
        troupe.Cluster("caller", resized.Caller, worker_config=WorkerConfig(world_size=1)) as caller,
    ):
        pool.load(7)
        stop, wrong, counts = threading.Event(), [], [0] * 4
        elsewhere = caller.workers[0].begin(pool)

        def call(thread):
            while not stop.is_set():
                try:
                    wrong.extend(resized.check(pool))
                    counts[thread] += 1
                except Exception as err:
                    wrong.append(repr(err))

        threads = [threading.Thread(target=call, args=(n,)) for n in range(len(counts))]
        for thread in threads:
            thread.start()
        for replicas in (4, 1, 3, 2):
            pool.resize(replicas)
            assert len(pool.workers) == pool.world_size == pool.dp_size == replicas
            before, end = list(counts), time.monotonic() + 60
            while any(n == b for n, b in zip(counts, before, strict=True)) and time.monotonic() < end:
                time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == [] and all(counts)
        assert elsewhere and caller.workers[0].end() == []


def test_a_rank_that_leaves_finishes_its_calls(session):
    with troupe.Cluster("pool", resized.Pool, worker_config=WorkerConfig(world_size=2, stop_grace=0.1)) as pool:
        slow = pool.workers[1].slow.remote(1.0)
        pool.resize(1)
        assert slow.result(60) == 1
        with pytest.raises(troupe.InvalidError, match="replicas"):
            pool.resize(0)


def test_a_replica_is_resized_as_a_whole(session):
    config = WorkerConfig(world_size=2, tensor_parallel_size=2)
    with troupe.Cluster("pool", resized.Pool, worker_config=config) as pool:
        pool.load(7)
        pool.resize(replicas=2)
        assert (pool.world_size, pool.dp_size, pool.tp_size) == (4, 2, 2)
        assert resized.check(pool) == []


def test_a_role_is_resized_in_an_event_loop(session):
    async def resize(pool):
        await pool.aresize(2)
        return pool.world_size

    with troupe.Cluster("pool", resized.Pool, worker_config=WorkerConfig(world_size=1)) as pool:
        assert asyncio.run(resize(pool)) == 2


def test_members_and_changes(session):
    config = WorkerConfig(world_size=2, policy="restart_rank", stop_grace=0.2)
    with troupe.Cluster("pool", resized.Pool, worker_config=config) as pool:
        pool.load(7)
        first = pool.members()
        assert [m.pid for m in first.members] == pool.pid() and first.epoch == 1
        assert [[m.rank for m in replica] for replica in first.replicas] == [[0], [1]]
        changes = queue.Queue()
        pool.on_change(changes.put)
        pool.resize(3)
        assert [m.rank for m in changes.get(timeout=60).came] == [2]
        slow = pool.workers[1].slow.remote(60)
        while not pool.health()[1]["busy"]:
            time.sleep(0.01)
        pool.replace(1, "a test")
        with pytest.raises(troupe.MembershipChanged, match="a test") as caught:
            slow.result(60)
        assert caught.value.left == caught.value.came == [1]
        change = changes.get(timeout=60)
        assert [m.rank for m in change.left] == [1] and change.now.members[1].pid not in [m.pid for m in first.members]
        assert asyncio.run(_later(pool, change.now.epoch - 1)) == change.now
        assert resized.check(pool) == []


async def _later(pool, epoch):
    return await pool.changed(epoch)


def test_a_stopped_rank_is_replaced(session):
    config = WorkerConfig(world_size=2, policy="restart_rank", spares=1, stall_after=2)
    with troupe.Cluster("pool", resized.Pool, worker_config=config) as pool:
        pool.load(7)
        before = pool.members()
        os.kill(before.members[1].pid, signal.SIGSTOP)
        after = pool.changed(before.epoch).result(60)
        assert "stalls" in after.cause and after.members[0] == before.members[0]
        assert resized.check(pool) == []
        with pytest.raises(troupe.InvalidError, match="StallAfter"):
            troupe.Cluster("other", resized.Pool, worker_config=WorkerConfig(world_size=1, stall_after=0.5))


def test_replicas_follow_free_devices(session):
    config = WorkerConfig(replicas=(1, 3), num_gpus_per_worker=1, num_cpus_per_worker=0)
    with troupe.Cluster("pool", resized.Pool, worker_config=config) as pool:
        pool.load(7)
        now = pool.members()
        while len(now.members) < 3:
            now = pool.changed(now.epoch).result(60)
        assert pool.world_size == 3 and "devices are free" in now.cause
        assert resized.check(pool) == []
        pool.resize(2)
        assert pool.world_size == 2
        with pytest.raises(troupe.InvalidError, match="it may have from 1 to 3 replicas"):
            pool.resize(4)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"replicas": 3}, r"replicas=3 is not \(least, most\)"),
        ({"replicas": (3, 2)}, "the first number is the least"),
        ({"replicas": (0, 2)}, "replicas"),
        ({"replicas": (1, 2), "min_replicas": 1}, "leave min_replicas out"),
        ({"min_replicas": -1}, "min_replicas"),
    ],
)
def test_ranges_of_replicas_are_checked(fields, says):
    with pytest.raises(troupe.InvalidError, match=says):
        WorkerConfig(**fields)
