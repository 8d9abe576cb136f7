"""Roles that start in the background, and events of their deaths."""

import asyncio
import os
import threading
import time

import pytest

import nested
import troupe
from test_nested import roles, until


class Slow(nested.Leaf):
    """Takes a while to construct."""

    def __init__(self, seconds=0.0, fails=False, until=None):
        time.sleep(seconds)
        while until is not None and not os.path.exists(until):
            time.sleep(0.01)
        if fails:
            raise ValueError("no weights")
        self.seen = []

    def note(self, x):
        self.seen.append(x)
        return list(self.seen)

    @troupe.register(dispatch_mode="DP_MP_COMPUTE")
    def double(self, rows):
        return [2 * r for r in rows]

    @troupe.register(lane="control")
    def status(self):
        return "ok"


def test_calls_queue_behind_a_start_in_the_background(session, tmp_path):
    started = tmp_path / "started"
    config = troupe.WorkerConfig(world_size=2)
    cluster = troupe.Cluster.create("slow", Slow, worker_config=config, worker_kwargs={"until": str(started)})
    futures = [cluster.workers[0].note.remote(i) for i in range(3)]
    rows = cluster.double([1, 2, 3, 4], blocking=False)
    status = cluster.workers[1].status.remote()
    assert "slow" in roles(session), "the name is taken at once"
    with pytest.raises(troupe.ExistsError):
        troupe.Cluster.create("slow", Slow, worker_config=troupe.WorkerConfig(world_size=1))
    assert not any(future.done() for future in (*futures, rows, status)), "nothing has waited for the workers"
    started.touch()
    assert troupe.get(futures, 90) == [[0], [0, 1], [0, 1, 2]], "in order"
    assert rows.result(90) == [2, 4, 6, 8] and status.result(90) == "ok"
    cluster.wait_ready(90)
    assert len(cluster.rank2worker) == 2 and cluster.master_port > 0
    assert cluster.status() == ["ok", "ok"]
    cluster.shutdown()


def test_the_error_of_a_constructor_comes_with_the_first_call(session):
    actor = troupe.actor(Slow, 0.2, fails=True, name="bad", background=True)
    early = actor.note.remote(1)
    with pytest.raises(ValueError, match="no weights") as caught:
        early.result(90)
    assert isinstance(caught.value, troupe.ApplicationError)
    with pytest.raises(ValueError, match="no weights"):
        actor.note(2)
    with pytest.raises(ValueError, match="no weights"):
        actor.cluster.wait_ready(10)
    until(lambda: "bad" not in roles(session))
    actor.cluster.shutdown()


def test_a_handle_of_a_starting_actor_is_an_argument(session):
    first = troupe.actor(Slow, 0.5, background=True)
    second = troupe.actor(nested.Leaf, background=True)
    assert second.apply.remote(_ask, first).result(90) == [7]
    for actor in (first, second):
        troupe.kill(actor)


def _ask(handle):
    return handle.note(7)


def test_a_starting_role_is_awaited_and_ended(session):
    async def main():
        cluster = await troupe.Cluster.create(
            "awaited", Slow, worker_config=troupe.WorkerConfig(world_size=1), worker_args=(0.0,)
        )
        assert cluster.rank2worker[0].startswith("awaited-0")
        assert await cluster.workers[0].note.remote(1) == [1]
        troupe.kill(cluster)

    asyncio.run(main())
    never = troupe.actor(Slow, 600.0, name="never", background=True)
    waiting = never.note.remote(1)
    begun = time.monotonic()
    troupe.kill(never)
    with pytest.raises(troupe.Error):
        waiting.result(90)
    assert time.monotonic() - begun < 90 and "never" not in roles(session)


def test_callbacks_tell_of_the_death_of_a_rank_and_of_the_role(session):
    cluster = troupe.Cluster(
        "mortal", nested.Leaf, worker_config=troupe.WorkerConfig(world_size=2, policy="restart_rank")
    )
    deaths, again = [], threading.Event()
    stop = cluster.on_death(lambda death: (deaths.append(death), again.set()))
    pid = cluster.workers[1].pid()
    os.kill(pid, 9)
    assert again.wait(90), "without any call or wait of the driver"
    assert (deaths[0].role, deaths[0].rank, deaths[0].generation) == ("mortal", 1, 0) and deaths[
        0
    ].error.signal == "SIGKILL"
    cluster.wait_ready(20)
    assert cluster.workers[1].pid() != pid
    again.clear()
    cluster.shutdown()
    assert again.wait(90)
    assert deaths[-1].rank is None
    stop()


def test_died_is_a_future_of_the_next_death(session):
    cluster = troupe.Cluster("mortal", nested.Leaf, worker_config=troupe.WorkerConfig(world_size=2))

    async def main():
        died = cluster.died()
        begun = time.monotonic()
        os.kill(await cluster.workers[0].pid.remote(), 9)
        death = await died
        return death, time.monotonic() - begun

    death, took = asyncio.run(main())
    assert death.rank == 0 and took < 60
    assert isinstance(death.error, troupe.WorkerLostError)
    until(lambda: cluster.died().result(90).rank is None)
    cluster.shutdown()
