"""A start takes no longer than start_timeout, and its caller waits a second at most for the end of its workers."""

import signal
import time

import pytest

import troupe

TIMEOUT = 3.0  # seconds
MORE = 3.0  # seconds that a busy machine may need beyond it; two steps of the end in order take four


class Deaf(troupe.Worker):
    """Its constructor does not return, and signals do not end it."""

    def __init__(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)


class OneHangs(troupe.Worker):
    """One rank does not start, and the others do not stop."""

    def __init__(self):
        if self.rank == 1:
            time.sleep(600)

    def close(self):
        time.sleep(600)


class Good:
    def echo(self, value):
        return value


def settings(world=1, **more):
    return troupe.WorkerConfig(world_size=world, start_timeout=TIMEOUT, **more)


@pytest.fixture
def hanging_module(tmp_path, monkeypatch):
    (tmp_path / "hangs_when_imported.py").write_text("import time\ntime.sleep(600)\nclass W: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "hangs_when_imported"


STARTS = {
    "a constructor that hangs": lambda module: troupe.Cluster("late", Deaf, worker_config=settings()),
    "several of them": lambda module: troupe.Cluster("late", Deaf, worker_config=settings(4)),
    "one rank of two": lambda module: troupe.Cluster("late", OneHangs, worker_config=settings(2)),
    "an import that hangs": lambda module: troupe.Cluster("late", f"{module}.W", worker_config=settings()),
    "a warm module that hangs": lambda module: troupe.Cluster("late", Good, worker_config=settings(2, warm=[module])),
    "devices that are taken": lambda module: troupe.Cluster(
        "late", Good, worker_config=settings(num_gpus_per_worker=8)
    ),
    "in the background": lambda module: troupe.Cluster.create("late", Deaf, worker_config=settings()).wait_ready(),
}


@pytest.mark.parametrize("start", STARTS)
def test_a_start_ends_in_time(session, hanging_module, start):
    taken = None
    if start.startswith("devices"):
        taken = troupe.Cluster(
            "taken", Good, worker_config=troupe.WorkerConfig(world_size=2, num_gpus_per_worker=8, strategy="SPREAD")
        )
    began = time.monotonic()
    with pytest.raises(troupe.TimedOutError):
        STARTS[start](hanging_module)
    took = time.monotonic() - began
    assert took < TIMEOUT + MORE
    if taken is not None:
        taken.shutdown()
    free_again("late")


def free_again(name):
    """Waits until a role of that name can be created."""
    end = time.monotonic() + 60
    while True:
        try:
            troupe.Cluster(name, Good, worker_config=troupe.WorkerConfig(world_size=1)).shutdown()
            return
        except troupe.ExistsError:
            assert time.monotonic() < end
            time.sleep(0.1)
