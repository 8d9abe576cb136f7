"""Spare processes, which take over lost ranks: real worker processes, killed by SIGKILL."""

import os
import signal
import time

import spared
import troupe
from troupe import WorkerConfig


def until(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def spares():
    """Returns the ids of the spare processes that this program's agent has started."""
    found = set()
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if b"TROUPE_SPARE=" in file.read() and _descends(int(name)):
                    found.add(int(name))
        except (OSError, ValueError):
            pass
    return found


def _descends(pid):
    while pid > 1 and pid != os.getpid():
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def test_a_spare_takes_over_a_lost_rank(session):
    config = WorkerConfig(world_size=2, policy="restart_rank", restarts=1000, spares=1)
    with troupe.Cluster("spared", spared.Spared, worker_config=config) as cluster:
        cluster.load(7)
        assert [one[:2] for one in cluster.state()] == [(False, 7)] * 2
        taken = 0
        while taken < 2:  # a rank that is lost before its spare is ready has another new process
            until(lambda: spares() - set(cluster.pid()))
            waiting = spares() - set(cluster.pid())
            os.kill(cluster.workers[1].pid(), signal.SIGKILL)
            until(lambda: _answers(cluster))
            was_spare, *state = cluster.workers[1].state()
            assert state == [7, 1, "1"]
            taken += was_spare and cluster.workers[1].pid() in waiting
    until(lambda: not spares())


def _answers(cluster):
    try:
        return len(cluster.state(timeout=30)) == 2
    except troupe.WorkerLostError:
        return False


def test_a_spare_that_dies_is_replaced(session):
    config = WorkerConfig(world_size=1, policy="restart_rank", spares=1)
    with troupe.Cluster("spared", spared.Spared, worker_config=config) as cluster:
        until(spares)
        first = spares()
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        until(lambda: spares() - first)
        assert cluster.state() == [(False, None, 0, "0")]
