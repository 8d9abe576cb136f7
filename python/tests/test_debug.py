"""Workers that hang or are stopped: stacks, interrupts and breakpoints."""

import json
import os
import subprocess
import time

import numpy as np
import pytest

import troupe
from troupe import Cluster, Worker, WorkerConfig

PROGRAM = os.path.join(os.path.dirname(troupe.__file__), "bin", "troupe")


class Busy(Worker):
    def compute(self, batch, steps=1):
        return self.inner()

    def inner(self):
        time.sleep(600)

    def hold_the_lock(self):
        return sum(range(15 * 10**7))  # seconds of C code that does not let go of the interpreter lock

    @troupe.register(concurrency=2)
    def beside(self):
        while True:
            time.sleep(0.01)

    def stop_here(self, x):
        breakpoint()
        return x * 2

    def quick(self):
        return self.rank


class Trainer(Worker):
    def step(self, late, done):
        if self.rank == late:
            self.load(done)
        self.all_reduce(done)

    def load(self, done):
        while not os.path.exists(done):
            time.sleep(0.01)

    def all_reduce(self, done):
        while not os.path.exists(done):
            time.sleep(0.01)


class AsyncBusy(Worker):
    async def nap(self, n):
        import asyncio

        await asyncio.sleep(600)


@pytest.fixture
def busy(session):
    with Cluster("busy", Busy, worker_config=WorkerConfig(world_size=3)) as cluster:
        yield cluster


def command(session, *words, text=None):
    env = {
        **os.environ,
        "TROUPE_URL": session.url,
        "TROUPE_TOKEN_FILE": session.head.token_file,
        "TROUPE_NAMESPACE": session.namespace,
    }
    return subprocess.run([PROGRAM, *words], input=text, capture_output=True, text=True, timeout=90, env=env)


def until(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def runs(cluster, rank, function):
    """Whether a rank is inside the function. A call may be there before its method has begun."""
    return any(f["function"].endswith(function) for t in cluster.stacks(rank)[0]["threads"] for f in t["frames"])


def test_stacks_show_the_method_its_age_its_arguments_and_all_ranks(session, busy):
    futures = [busy.workers[r].compute.remote(np.zeros((8, 1024), np.float32), steps=r) for r in (0, 2)]
    until(lambda: runs(busy, 0, "inner") and runs(busy, 2, "inner"))
    begun = time.monotonic()
    shown = busy.stacks()
    assert time.monotonic() - begun < 30  # a second on a quiet machine
    call = shown[0]["calls"][0]
    assert (call["method"], call["args"]) == ("compute", "ndarray float32[8, 1024], steps=0") and call["seconds"] > 0
    main = next(t for t in shown[0]["threads"] if t["name"] == "MainThread")
    assert main["frames"][0]["function"].endswith("inner") and main["frames"][0]["code"] == "time.sleep(600)"
    text = str(shown)
    assert (
        text.startswith("busy[1] on ") and "busy[0,2]: 2 ranks do the same" in text and "runs no method" in text
    )  # the outlier comes first
    p = command(session, "stacks", "busy/2", "--json")
    assert [w["rank"] for w in json.loads(p.stdout)] == [2], p.stderr
    assert "runs compute(ndarray float32[8, 1024], steps=2) for " in command(session, "stacks", "busy/2").stdout
    for future in futures:
        future.cancel()
    assert busy.interrupt(0) == {0: ["compute"]}
    assert command(session, "interrupt", "busy/2").stdout == "interrupted compute of busy/2\n"
    assert busy.workers[0].quick() == 0 and busy.workers[2].quick() == 2


def test_an_interrupt_of_all_ranks_leaves_out_those_that_run_no_method(busy):
    futures = [busy.workers[r].compute.remote(np.zeros(1), steps=r) for r in (0, 2)]
    until(lambda: runs(busy, 0, "inner") and runs(busy, 2, "inner"))
    assert busy.interrupt() == {0: ["compute"], 2: ["compute"]}
    for future in futures:
        with pytest.raises(troupe.CancelledError, match="interrupted"):
            future.result(90)
    assert busy.interrupt() == {}
    assert [w.quick() for w in busy.workers] == [0, 1, 2]


def test_stacks_while_the_interpreter_lock_is_held(busy):
    future = busy.workers[1].hold_the_lock.remote()
    shown = until(lambda: (s := busy.stacks(1))[0]["by"] != "python" and s[0]["calls"] and s)
    assert shown[0]["by"] in ("faulthandler", "py-spy") and shown[0]["calls"][0]["method"] == "hold_the_lock"
    assert any("hold_the_lock" in f["function"] for t in shown[0]["threads"] for f in t["frames"])
    assert busy.interrupt(1) == {1: []}  # a signal waits for it
    with pytest.raises(troupe.CancelledError, match="interrupted"):
        future.result(300)  # it computes, which takes long on a busy machine


def test_interrupts_of_methods_beside_the_main_thread_and_of_async_ones(session, busy):
    future = busy.workers[0].beside.remote()
    until(lambda: runs(busy, 0, "beside"))

    def interrupted():  # a call that has just begun may not be in its thread yet
        try:
            return busy.interrupt(0)
        except troupe.NotFoundError:
            return None

    assert until(interrupted) == {0: ["beside"]}
    with pytest.raises(troupe.CancelledError):
        future.result(90)
    with pytest.raises(troupe.NotFoundError, match="busy/0 runs no method"):
        busy.interrupt(0)
    with pytest.raises(troupe.NotFoundError, match="no rank 7"):
        busy.stacks(7)
    with Cluster("napping", AsyncBusy, worker_config=WorkerConfig(world_size=1)) as napping:
        future = napping.workers[0].nap.remote(5)
        call = until(lambda: [c for c in napping.stacks()[0]["calls"] if c["args"]])[0]
        assert (call["method"], call["args"]) == ("nap", "5")
        assert napping.interrupt() == {0: ["nap"]}
        with pytest.raises(troupe.CancelledError):
            future.result(90)


def test_a_debugger_attaches_to_a_breakpoint(session, busy):
    assert "no thread of this worker is stopped" in command(session, "debug", "busy/0", text="").stderr
    future = busy.workers[0].stop_here.remote(21)
    until(lambda: "breakpoint" in str(busy.stacks(0)))
    p = command(session, "debug", "busy/0", text="p x + 1\nx = 50\nc\n")
    assert p.returncode == 0 and "22" in p.stdout and "return x * 2" in p.stdout, p
    assert future.result(90) in (42, 100)
    future = busy.workers[0].stop_here.remote(4)
    until(lambda: "breakpoint" in str(busy.stacks(0)))
    command(session, "debug", "busy/0", text="")  # the client leaves: the method goes on
    assert future.result(90) == 8
    assert command(session, "debug", "busy").returncode == 2


def test_doctor_names_a_hung_rank_without_spans(session, tmp_path):
    done = tmp_path / "done"
    with Cluster("train", Trainer, worker_config=WorkerConfig(world_size=4)) as train:
        future = train.step.remote(2, str(done))

        def found():
            p = command(session, "doctor", "--json", "--listen", "1500ms")
            return [f for f in json.loads(p.stdout)["findings"] if f["code"] == "rank_lags"]

        lags = until(found, 90)
        assert [f["subject"] for f in lags] == [f"role {session.namespace}/train, rank 2"]
        assert "the other ranks wait for it: it is in Trainer.load (" in lags[0]["text"]
        assert lags[0]["evidence"][0].startswith("3 of 4 ranks are at Trainer.step (")
        assert lags[0]["evidence"][0].endswith("self.all_reduce(done)")
        done.touch()
        future.result(60)
