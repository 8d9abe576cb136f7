"""kill: a role ends at once, whatever it is doing."""

import os
import time

import pytest

import nested
import troupe
from test_nested import alive, roles, until

# On a quiet machine a kill takes 10 to 30 ms: `make bench-python` has the figure. The machine of the tests is busy.
LIMIT = 30.0


def timed(do):
    begun = time.monotonic()
    do()
    return time.monotonic() - begun


def test_kill_of_a_role_with_running_calls(session):
    config = troupe.WorkerConfig(world_size=2, num_gpus_per_worker=8)
    cluster = troupe.Cluster("doomed", nested.Leaf, worker_config=config)
    pids = cluster.execute_all_sync("pid")
    running = cluster.execute_all_async("nap", 60)
    waiting = cluster.execute_all_async("pid")
    until(lambda: all(i["calls"] for i in cluster.info()))
    assert timed(lambda: troupe.kill(cluster)) < LIMIT
    assert not any(map(alive, pids)) and "doomed" not in roles(session)
    for future in (running, waiting):
        with pytest.raises(troupe.WorkerLostError, match="doomed was killed by"):
            future.result(1)
    with pytest.raises(troupe.Error):
        cluster.execute_all_sync("pid")
    troupe.kill(cluster)  # a second time it does nothing
    with troupe.Cluster("doomed", nested.Leaf, worker_config=config) as again:  # the name and all devices are free
        assert not set(again.execute_all_sync("pid")) & set(pids)


def test_kill_of_an_actor_by_another_process(session, workers):
    """Callers elsewhere get the cause as soon as the process has exited."""
    actor = troupe.actor(nested.Leaf, name="target")
    running = actor.nap.remote(60)
    until(lambda: actor.cluster.info()[0]["calls"])
    killer = troupe.actor(nested.Middle)
    try:
        pid = actor.pid.remote()
        begun = time.monotonic()
        killer.kill(actor)
        assert time.monotonic() - begun < LIMIT
        for future in (running, pid):
            with pytest.raises(troupe.WorkerLostError, match="killed on request"):
                future.result(90)
        until(lambda: "target" not in roles(session))
    finally:
        killer.cluster.shutdown()


def test_kill_takes_the_roles_of_the_killed_worker_with_it(session):
    top = troupe.actor(nested.Top, name="top")
    pids = [top.pid(), *top.grow()]
    top.occupy()
    troupe.kill(top)
    until(lambda: not any(map(alive, pids)))
    until(lambda: not roles(session) & {"top", "middle", "leaves"})


def test_kill_of_a_role_that_restarts(session):
    cluster = troupe.Cluster(
        "stubborn", nested.Leaf, worker_config=troupe.WorkerConfig(world_size=2, policy="restart_rank")
    )
    pids = cluster.execute_all_sync("pid")
    os.kill(pids[0], 9)
    until(lambda: cluster.health()[0]["state"] == "restarting" or cluster.health()[0]["gen"] > 0)
    troupe.kill(cluster)
    assert "stubborn" not in roles(session)
    assert not any(map(alive, pids))


@pytest.mark.parametrize("now", [True, False])
def test_shutdown_now(script, now):
    """With a private head, two roles and three levels; with now they are busy, and nothing waits for the calls' grace."""
    done = script(
        f"""
        import nested, time, troupe
        from test_nested import alive
        troupe.init(gpus="sim:1x8")
        top = troupe.actor(nested.Top)
        pids = [top.pid(), *top.grow(stop_grace=60)]
        busy = troupe.Cluster("busy", nested.Leaf, worker_config=troupe.WorkerConfig(world_size=2, stop_grace=60))
        pids += busy.execute_all_sync("pid")
        if {now}:
            running = busy.execute_all_async("nap", 60)
            top.occupy()
        begun = time.monotonic()
        troupe.shutdown(now={now})
        print(time.monotonic() - begun, sum(map(alive, pids)))
        """,
        env={"TROUPE_URL": "", "TROUPE_TOKEN_FILE": "", "TROUPE_FINGERPRINT": ""},
    )
    took, left = done.stdout.split()
    assert float(took) < 50 and left == "0", done.stdout


def test_arguments_of_kill_and_shutdown(session, workers):
    with pytest.raises(troupe.InvalidError, match="end together"):
        troupe.kill(workers.workers[0])
    with pytest.raises(troupe.InvalidError, match="kill takes"):
        troupe.kill("actor")
    with pytest.raises(troupe.InvalidError, match="now"):
        troupe.shutdown(now="yes")
