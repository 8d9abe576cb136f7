"""Routers: requests over the ranks of clusters."""

import asyncio
import os
import signal
import time

import numpy as np
import pytest

import pipeline_workers
import troupe
from test_pipeline import until


@pytest.fixture(scope="module")
def desk(session):
    with troupe.Cluster(
        "desk", pipeline_workers.RequestWorker, worker_config=troupe.WorkerConfig(world_size=2)
    ) as cluster:
        yield cluster


def busy(router, n):
    until(lambda: router.stats()["in_flight"] == n)


def test_requests_are_spread_by_credits(desk):
    with troupe.Router(desk, method="who", credits=4) as router:
        futures = [router.call(i, delay=0.005, blocking=False) for i in range(40)]
        answers = troupe.get(futures, timeout=90)
        assert [i for i, _ in answers] == list(range(40))
        ranks = [rank for _, rank in answers]
        assert min(ranks.count(0), ranks.count(1)) >= 10, ranks
        stats = router.stats()
        assert (stats["ranks"], stats["credits"], stats["served"], stats["in_flight"], stats["suspended"]) == (
            2,
            8,
            40,
            0,
            False,
        )


def test_values_travel_as_in_other_calls(desk):
    with troupe.Router(desk, method="echo") as router:
        assert router.call((1, {"a"}), named=[None]) == [(1, {"a"}), [None]]
        array = np.arange(100_000, dtype=np.float32)
        back, _ = router.call(array)
        back += 1  # and is the caller's own
        assert np.array_equal(back, array + 1)
        assert router.call(max)[0] is max  # a pickle, of our own workers


def test_errors_are_those_of_calls(desk):
    with troupe.Router(desk, method="fail") as router:
        with pytest.raises(troupe.ApplicationError, match="no luck") as err:
            router.call("no luck")
        assert isinstance(err.value, KeyError) and "raise KeyError" in err.value.remote_traceback
    with troupe.Router(desk, method="nothing") as router, pytest.raises(troupe.NotFoundError, match="nothing"):
        router.call()
    with pytest.raises(troupe.ClosedError):
        router.call()
    with pytest.raises(troupe.InvalidError, match="credits"):
        troupe.Router(desk, method="who", credits=0)


def test_keys_stick(desk):
    with troupe.Router(desk, method="who", credits=8, sticky=True) as router:
        first = {key: router.call(0, key=key)[1] for key in "abcd"}
        assert sorted(first.values()) == [0, 0, 1, 1]  # an idle rank gets the key, the one with fewer keys first
        futures = {key: [router.call(i, key=key, blocking=False) for i in range(10)] for key in "abcd"}
        assert {key: {rank for _, rank in troupe.get(f, timeout=90)} for key, f in futures.items()} == {
            key: {rank} for key, rank in first.items()
        }


def test_suspend_busy_and_timeouts(desk):
    with troupe.Router(desk, method="who", waiting=2) as router:
        router.suspend()
        waiting = [router.call(i, blocking=False) for i in range(2)]
        until(lambda: router.stats()["waiting"] == 2)
        with pytest.raises(troupe.BusyError):
            router.call(3)
        assert router.stats()["suspended"] and not waiting[0].done()
        router.resume()
        assert {i for i, _ in troupe.get(waiting, timeout=90)} == {0, 1}
    with troupe.Router(method="who") as empty, pytest.raises(troupe.TimedOutError):
        empty.call(1, timeout=0.05)


def test_abort_returns_what_there_is(session):
    with troupe.Cluster("patient", pipeline_workers.Async, worker_config=troupe.WorkerConfig(world_size=1)) as cluster:
        with troupe.Router(cluster, method="hold", abort="abort", credits=2) as router:
            first, second = (router.call(id, id=id, blocking=False) for id in ("r1", "r2"))
            busy(router, 2)
            third = router.call("r3", id="r3", blocking=False)
            until(lambda: router.stats()["waiting"] == 1)
            with pytest.raises(troupe.ExistsError):
                router.call("r1", id="r1")
            second.abort()
            assert second.result(90) == "part of r2"
            busy(router, 2)  # the third has its place
            router.abort("r1")
            assert first.result(90) == "part of r1"
            third.cancel()
            with pytest.raises(troupe.CancelledError):
                third.result(90)
            with pytest.raises(troupe.NotFoundError):
                router.abort("r3")
        with troupe.Router(cluster, method="hold") as router:  # without a method for it
            held = router.call("r4", blocking=False)
            busy(router, 1)
            held.abort()
            with pytest.raises(troupe.CancelledError, match="aborted"):
                held.result(90)


def test_ranks_join_and_leave_while_it_runs(desk, session):
    with troupe.Router(desk, method="who", credits=1) as router:
        slow = [router.call(i, delay=0.1, blocking=False) for i in range(2)]
        busy(router, 2)
        router.leave(desk, [1], timeout=90)
        assert slow[0].done() or slow[1].done()  # rank 1 has answered what it had
        assert {router.call(i)[1] for i in range(5)} == {0} and router.stats()["ranks"] == 1
        router.join(desk)  # rank 0 is there already
        assert router.stats()["ranks"] == 2
        with pytest.raises(troupe.TimedOutError):
            held = router.call(1, delay=0.5, blocking=False)
            busy(router, 1)
            router.leave(desk, timeout=0.05)
        assert held.result(90)


def test_a_role_grows_and_shrinks_under_a_router(session):
    with (
        troupe.Cluster(
            "elastic", pipeline_workers.RequestWorker, worker_config=troupe.WorkerConfig(world_size=1)
        ) as cluster,
        troupe.Router(cluster, method="who") as router,
    ):
        router.scale(cluster, 3, timeout=90)
        assert router.stats()["ranks"] == 3
        futures = [router.call(i, delay=0.05, blocking=False) for i in range(6)]
        assert {rank for _, rank in troupe.get(futures, timeout=90)} == {0, 1, 2}
        under_way = [router.call(i, delay=0.2, blocking=False) for i in range(3)]
        busy(router, 3)
        router.scale(cluster, 1, timeout=90)
        assert len(troupe.get(under_way, timeout=90)) == 3  # nothing was lost by it
        assert router.stats()["ranks"] == 1


def test_a_killed_rank_comes_back(session):
    """Requests that may be sent again are answered by others; a rank that its role restarts is the router's again."""
    config = troupe.WorkerConfig(world_size=2, policy="restart_rank", restarts=10)
    with (
        troupe.Cluster("killed", pipeline_workers.RequestWorker, worker_config=config) as cluster,
        troupe.Router(cluster, method="who", credits=2) as router,
    ):
        pid = cluster.workers[1].pid()
        futures = [router.call(i, delay=0.3, again=True, blocking=False) for i in range(4)]
        lost = cluster.workers[1].who.remote(0, delay=30)  # until it dies
        busy(router, 4)
        os.kill(pid, signal.SIGKILL)
        assert sorted(i for i, _ in troupe.get(futures, timeout=90)) == [0, 1, 2, 3]
        assert lost.exception(10) is not None
        end = time.monotonic() + 20
        while {
            rank
            for _, rank in troupe.get(
                [router.call(i, delay=0.02, again=True, blocking=False) for i in range(8)], timeout=90
            )
        } != {0, 1}:
            assert time.monotonic() < end, "the rank did not come back"
        assert router.stats()["ranks"] == 2
        assert cluster.workers[1].pid() != pid


def test_in_an_event_loop(desk):
    async def main():
        async with troupe.Router(desk, method="who", credits=8) as router:
            assert router.call(1)[0] == 1
            got = await asyncio.gather(*(router.call(i, blocking=False) for i in range(20)))
            assert [i for i, _ in got] == list(range(20))
            await router.suspend(blocking=False)
            waiting = asyncio.ensure_future(router.call(1, blocking=False))
            while (await router.stats(blocking=False))["waiting"] != 1:
                await asyncio.sleep(0.001)
            waiting.cancel()
            while (await router.stats(blocking=False))["waiting"] != 0:
                await asyncio.sleep(0.001)

    asyncio.run(main())
