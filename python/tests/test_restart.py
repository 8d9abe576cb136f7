"""Restarts by policy, as a driver sees them: real worker processes, killed by SIGKILL."""

import asyncio
import os
import signal
import subprocess
import time

import numpy as np
import pytest

import restarts
import troupe
from troupe import Scatter, _core, _reference

N = 3


@pytest.fixture
def made(session):
    """Makes clusters that end with the test."""
    all_of_them = []

    def make(policy, cls=restarts.Mortal, restarts=5, **kwargs):
        config = troupe.WorkerConfig(world_size=N, policy=policy, restarts=restarts)
        cluster = troupe.Cluster(f"mortal-{policy}", cls, None, config, worker_kwargs=kwargs)
        all_of_them.append(cluster)
        return cluster

    yield make
    for cluster in all_of_them:
        cluster.shutdown()


@pytest.fixture
def slow(tmp_path):
    """A file; while it is there, no worker that is restarted becomes ready."""
    path = tmp_path / "slow"
    yield path
    path.unlink(missing_ok=True)


def until(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def kill(cluster, rank, pid=0):
    """Kills a worker, and returns as soon as the driver knows: a call that was sent before could have run, and
    fails."""
    pid = pid or cluster.workers[rank].pid()
    os.kill(pid, signal.SIGKILL)
    until(lambda: (cluster.info()[rank]["state"], cluster.info()[rank]["pid"]) != ("ready", pid))


def states(cluster):
    return [worker["state"] for worker in cluster.info()]


@pytest.mark.parametrize(
    ("policy", "cls"),
    [("restart_rank", restarts.Mortal), ("restart_role", restarts.Mortal), ("restart_rank", restarts.AsyncMortal)],
)
def test_a_call_after_a_kill_waits_for_the_restart(made, policy, cls):
    cluster = made(policy, cls)
    cluster.initialize(0.1)
    cluster.initialize(0.2)
    before = cluster.step()
    for victim in (1, 0):
        kill(cluster, victim, before[victim]["pid"])
        after = cluster.step(timeout=60)
        for rank in range(N):
            new = policy == "restart_role" or rank == victim
            assert (after[rank]["pid"] != before[rank]["pid"]) == new, (rank, before, after)
            assert after[rank]["setups"] == ([0.2] if new else before[rank]["setups"]), (
                "initialize is replayed, once, with its last arguments"
            )
        before = after
    assert states(cluster) == ["ready"] * N


@pytest.mark.parametrize("policy", ["restart_rank", "restart_role"])
def test_calls_made_while_a_rank_restarts_wait_within_their_timeout(session, made, slow, policy):
    cluster = made(policy, slow=str(slow))
    pids = cluster.execute_all_sync("pid")
    slow.touch()
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: states(cluster)[1] == "restarting")
    assert cluster.health()[1]["state"] == "restarting"
    until(lambda: "restarting" in table(session))

    began = time.monotonic()
    with pytest.raises(troupe.WorkerLostError, match="restart") as caught:
        cluster.step(timeout=60, wait=False)
    assert time.monotonic() - began < 30, "it does not wait for its timeout"
    assert caught.value.rank == 1 or policy == "restart_role"
    assert "[1]" in str(caught.value) or "rank 1" in str(caught.value) or policy == "restart_role"
    for call in (
        lambda: cluster.options(wait=False).step(),
        lambda: cluster.options(wait=False, ranks=[1]).pid(),
        lambda: cluster.options(wait=False).execute_all_sync("pid"),
        lambda: cluster.step(wait=False, blocking=False).result(90),
        lambda: asyncio.run(awaited(cluster.step(wait=False, blocking=False))),
    ):
        began = time.monotonic()
        with pytest.raises(troupe.WorkerLostError):
            call()
        assert time.monotonic() - began < 30

    began = time.monotonic()
    with pytest.raises(troupe.TimedOutError):
        cluster.step(timeout=0.5)
    assert 0.4 < time.monotonic() - began < 30

    waiting = [
        cluster.step(timeout=60, blocking=False),
        cluster.execute_all_async("pid"),
        cluster.workers[1].pid.remote(),
    ]
    gone = cluster.step(blocking=False)
    assert gone.cancel()
    assert not any(f.done() for f in waiting)
    slow.unlink()
    assert [r["count"] for r in waiting[0].result(90)][1] == 1, "the calls that gave up have not run"
    assert waiting[1].result(90)[1] == waiting[2].result(90) != pids[1]
    with pytest.raises(troupe.CancelledError):
        gone.result(90)
    assert states(cluster) == ["ready"] * N


def table(session):
    """What `troupe roles` prints."""
    head = session.head
    env = {
        **os.environ,
        "TROUPE_URL": head.url,
        "TROUPE_TOKEN_FILE": head.token_file,
        "TROUPE_FINGERPRINT": head.fingerprint,
    }
    return subprocess.run(
        [_core.program_path(), "roles"], env=env, capture_output=True, text=True, timeout=90, check=True
    ).stdout


async def awaited(future):
    return await future


def test_the_other_ranks_are_called_meanwhile(made, slow):
    cluster = made("restart_rank", slow=str(slow))
    pids = cluster.execute_all_sync("pid")
    slow.touch()
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: states(cluster)[1] == "restarting")
    assert states(cluster) == ["ready", "restarting", "ready"]
    assert cluster.workers[0].pid() == pids[0]
    assert cluster.options(ranks=[0, 2], wait=False).pid(timeout=90) == [pids[0], pids[2]]


def test_wait_ready(made, slow):
    cluster = made("restart_rank", slow=str(slow))
    cluster.wait_ready()
    asyncio.run(cluster.await_ready(timeout=90))
    pids = cluster.execute_all_sync("pid")
    slow.touch()
    os.kill(pids[2], signal.SIGKILL)
    until(lambda: states(cluster)[2] == "restarting")
    began = time.monotonic()
    with pytest.raises(troupe.TimedOutError, match="rank 2"):
        cluster.wait_ready(timeout=0.3)
    with pytest.raises(troupe.TimedOutError, match="rank 2"):
        asyncio.run(cluster.await_ready(timeout=0.3))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(cluster.await_ready(), 0.3))
    assert time.monotonic() - began < 30
    with pytest.raises(troupe.InvalidError, match="timeout"):
        cluster.wait_ready(timeout=0)

    async def both():
        waits = asyncio.ensure_future(cluster.await_ready(timeout=60))
        await asyncio.sleep(0.1)
        assert not waits.done()
        slow.unlink()
        await waits

    asyncio.run(both())
    assert cluster.options(wait=False).execute_all_sync("pid")[2] != pids[2]


def test_wait_ready_of_a_role_that_fails_says_why(made):
    cluster = made("restart_rank", restarts=1)
    for _ in range(2):
        cluster.wait_ready(timeout=60)
        os.kill(cluster.workers[1].pid(), signal.SIGKILL)
        until(lambda: states_or_error(cluster) != ["ready"] * N)
    with pytest.raises(troupe.WorkerLostError, match="SIGKILL|restarts"):
        cluster.wait_ready(timeout=60)
    with pytest.raises(troupe.WorkerLostError):
        cluster.step(timeout=60)


def states_or_error(cluster):
    try:
        return states(cluster)
    except troupe.Error as err:
        return err


def test_arguments_are_replayed_as_each_rank_had_them(made):
    cluster = made("restart_rank")
    weights = np.arange(200_000, dtype=np.float32)  # large: it lies outside Go's memory
    cluster.initialize(0.5, weights=weights)
    cluster.take_part(Scatter(["a", "b", "c"]))
    weights[:] = 0
    for i in range(20):  # memory of large bodies is used again
        cluster.execute_all_sync("pid")
        cluster.options(ranks=[0]).initialize(0.5, weights=np.full(200_000, i, dtype=np.float32))
    for rank in range(1, N):
        kill(cluster, rank)
        got = cluster.step(timeout=60)
        assert [g["part"] for g in got] == ["a", "b", "c"]
        assert cluster.total(timeout=60)[rank] == float(np.arange(200_000, dtype=np.float32).sum())


SIZES = [8_000, 1_000_000]  # float32 numbers: below and above what a message carries


@pytest.mark.parametrize("size", SIZES)
def test_a_replayed_argument_that_was_a_reference_is_the_value(made, size):
    cluster = made("restart_rank")
    for source in (
        lambda v: troupe.put(np.full(size, v, np.float32)),
        lambda v: cluster.workers[0].export.remote(v, size),
        lambda v: cluster.workers[2].put(v, size),
    ):
        for value in (1, 2):
            cluster.initialize(0.1, weights=source(value))  # the driver keeps no reference
        kill(cluster, 1)
        assert cluster.kind(timeout=60) == ["ndarray"] * N
        assert cluster.total() == [2.0 * size] * N


def test_a_reference_in_an_argument_that_is_split_is_replayed(made):
    cluster = made("restart_rank")
    weights = troupe.put(np.full(100_000, 3, np.float32))
    cluster.take_part(Scatter(["a", "b", "c"]))
    cluster.options(mode=troupe.Dispatch.ALL_TO_ALL).initialize(Scatter([1, 2, 3]), weights=troupe.Broadcast(weights))
    del weights
    kill(cluster, 2)
    assert cluster.total(timeout=60) == [300_000.0] * N
    assert [(s["setups"], s["part"]) for s in cluster.step()] == [([1], "a"), ([2], "b"), ([3], "c")]


def test_a_replayed_reference_inside_an_argument_still_has_its_value(made):
    cluster = made("restart_rank")
    cluster.initialize(0.1, weights=[troupe.put(np.full(100_000, 2, np.float32))])
    kill(cluster, 1)
    assert cluster.inner_total(timeout=60) == [200_000.0] * N


def test_the_values_of_replayed_calls_are_freed_when_other_calls_replace_them(made):
    cluster = made("restart_rank")
    before = _reference.counts()["owned"]
    for value in range(3):
        cluster.initialize(0.1, weights=troupe.put(np.full(100_000, value, np.float32)))
    until(lambda: _reference.counts()["owned"] == before + 1)
    cluster.options(ranks=[0]).initialize(0.1, weights=None)
    kill(cluster, 1)
    assert cluster.options(ranks=[1]).total(timeout=60) == [200_000.0]
    cluster.initialize(0.1)
    until(lambda: _reference.counts()["owned"] == before)
    cluster.initialize(0.1, weights=[troupe.put(np.ones(100_000, np.float32))])
    cluster.shutdown()
    until(lambda: _reference.counts()["owned"] == before)


def test_a_restart_without_the_owner_of_a_replayed_argument_fails_and_says_so(made):
    cluster = made("restart_rank")
    owner = troupe.Cluster("owner", restarts.Mortal, None, troupe.WorkerConfig(world_size=1))
    cluster.initialize(0.1, weights=owner.workers[0].put(1, 100_000))
    troupe.kill(owner)
    kill(cluster, 1)
    with pytest.raises(troupe.WorkerLostError, match="(?s)replay of initialize.*owned the value has ended"):
        cluster.step(timeout=60)
    for _ in range(20):
        assert "ready" not in [h["state"] for h in cluster.health()]
        time.sleep(0.05)


def test_a_call_that_failed_is_not_replayed(made):
    cluster = made("restart_rank")
    cluster.initialize(0.1)
    with pytest.raises(troupe.ApplicationError, match="no learning rate"):
        cluster.initialize(None)
    kill(cluster, 1)
    assert cluster.step(timeout=60)[1]["setups"] == [0.1]


def test_a_call_that_runs_when_its_rank_is_killed_fails_and_is_not_repeated(made):
    cluster = made("restart_rank")
    pids = cluster.execute_all_sync("pid")
    future = cluster.sleep(20, blocking=False, timeout=60)
    until(lambda: all(w["calls"] for w in cluster.info()))
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(troupe.WorkerLostError) as caught:
        future.result(90)
    assert caught.value.rank == 1 and caught.value.signal == "SIGKILL"
    troupe.kill(cluster)  # the other ranks would go on


def test_a_method_argument_named_wait_goes_by_position(made):
    cluster = made("restart_rank")
    with pytest.raises(troupe.InvalidError, match="wait=5 must be True or False"):
        cluster.step(wait=5)
    with pytest.raises(troupe.InvalidError, match="wait='no'"):
        cluster.options(wait="no")


def test_a_detached_role_whose_driver_has_left_is_restarted_and_set_up_again(script):
    driver = script(
        """
        import restarts, troupe
        troupe.init()
        config = troupe.WorkerConfig(world_size=2, policy="restart_rank", restarts=5, detached=True)
        cluster = troupe.Cluster("kept", restarts.Mortal, worker_config=config)
        cluster.initialize(0.3)
        print(cluster.step()[1]["pid"])
        """,
        timeout=60,
    )
    after = script(
        f"""
        import os, signal, time, troupe
        kept = troupe.Cluster.attach("kept")
        try:
            assert kept.step(timeout=60)[1]["pid"] == {int(driver.stdout)}
            os.kill({int(driver.stdout)}, signal.SIGKILL)
            end = time.monotonic() + 30
            while kept.info()[1]["pid"] == {int(driver.stdout)}:
                assert time.monotonic() < end
                time.sleep(0.01)
            after = kept.step(timeout=60)
            print([a["setups"] for a in after], after[1]["pid"] != {int(driver.stdout)})
        finally:
            kept.shutdown()
        """,
        timeout=120,
    )
    assert after.stdout.strip() == "[[0.3], [0.3]] True", (after.stdout, after.stderr)


def test_a_blocking_call_without_a_timeout_waits_too_and_can_be_interrupted(script, slow):
    p = script(
        f"""
        import os, signal, time, restarts, troupe
        troupe.init()
        config = troupe.WorkerConfig(world_size=1, policy="restart_rank", restarts=5)
        cluster = troupe.Cluster("waits", restarts.Mortal, worker_config=config, worker_kwargs={{"slow": {str(slow)!r}}})
        worker = cluster.workers[0]
        pid = worker.pid()
        open({str(slow)!r}, "w").close()
        os.kill(pid, signal.SIGKILL)
        while cluster.info()[0]["state"] != "restarting":
            time.sleep(0.01)
        print("waiting", flush=True)
        try:
            worker.pid()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        os.remove({str(slow)!r})
        print(worker.pid() != pid, flush=True)
        """,
        wait=False,
    )
    assert p.stdout.readline().strip() == "waiting", p.stderr.read()
    time.sleep(0.3)
    assert p.poll() is None
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=90)
    assert out.split() == ["interrupted", "True"], err
