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
        time.sleep(60)

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


class AsyncBusy(Worker):
    async def nap(self, n):
        import asyncio

        await asyncio.sleep(60)


@pytest.fixture
def busy(session):
    with Cluster("busy", Busy, worker_config=WorkerConfig(world_size=3)) as cluster:
        yield cluster


def command(session, *words, text=None):
    env = {**os.environ, "TROUPE_URL": session.url, "TROUPE_TOKEN_FILE": session.head.token_file, "TROUPE_NAMESPACE": session.namespace}
    return subprocess.run([PROGRAM, *words], input=text, capture_output=True, text=True, timeout=30, env=env)


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_stacks_show_the_method_its_age_its_arguments_and_all_ranks(session, busy):
    futures = [busy.workers[r].compute.remote(np.zeros((8, 1024), np.float32), steps=r) for r in (0, 2)]
    shown = until(lambda: (s := busy.stacks())[0]["calls"] and s[2]["calls"] and s)
    begun = time.monotonic()
    shown = busy.stacks()
    assert time.monotonic() - begun < 3  # a second on a quiet machine
    call = shown[0]["calls"][0]
    assert (call["method"], call["args"]) == ("compute", "ndarray float32[8, 1024], steps=0") and call["seconds"] > 0
    main = next(t for t in shown[0]["threads"] if t["name"] == "MainThread")
    assert main["frames"][0]["function"].endswith("inner") and main["frames"][0]["code"] == "time.sleep(60)"
    text = str(shown)
    assert text.startswith("busy[1] on ") and "busy[0,2]: 2 ranks do the same" in text and "runs no method" in text  # the outlier comes first
    p = command(session, "stacks", "busy/2", "--json")
    assert [w["rank"] for w in json.loads(p.stdout)] == [2], p.stderr
    assert "runs compute(ndarray float32[8, 1024], steps=2) for " in command(session, "stacks", "busy/2").stdout
    for future in futures:
        future.cancel()
    assert busy.interrupt(0) == ["compute"]
    assert command(session, "interrupt", "busy/2").stdout == "interrupted compute of busy/2\n"
    assert busy.workers[0].quick() == 0 and busy.workers[2].quick() == 2


def test_stacks_while_the_interpreter_lock_is_held(busy):
    future = busy.workers[1].hold_the_lock.remote()
    shown = until(lambda: (s := busy.stacks(1))[0]["by"] != "python" and s[0]["calls"] and s)
    assert shown[0]["by"] in ("faulthandler", "py-spy") and shown[0]["calls"][0]["method"] == "hold_the_lock"
    assert any("hold_the_lock" in f["function"] for t in shown[0]["threads"] for f in t["frames"])
    assert busy.interrupt(1) == []  # a signal waits for it
    with pytest.raises(troupe.CancelledError, match="interrupted"):
        future.result(30)


def test_interrupts_of_methods_beside_the_main_thread_and_of_async_ones(session, busy):
    future = busy.workers[0].beside.remote()
    until(lambda: busy.stacks(0)[0]["calls"])
    assert busy.interrupt(0) == ["beside"]
    with pytest.raises(troupe.CancelledError):
        future.result(10)
    with pytest.raises(troupe.NotFoundError, match="busy/0 runs no method"):
        busy.interrupt(0)
    with pytest.raises(troupe.NotFoundError, match="no rank 7"):
        busy.stacks(7)
    with Cluster("napping", AsyncBusy, worker_config=WorkerConfig(world_size=1)) as napping:
        future = napping.workers[0].nap.remote(5)
        call = until(lambda: [c for c in napping.stacks()[0]["calls"] if c["args"]])[0]
        assert (call["method"], call["args"]) == ("nap", "5")
        assert napping.interrupt(0) == ["nap"]
        with pytest.raises(troupe.CancelledError):
            future.result(10)


def test_a_debugger_attaches_to_a_breakpoint(session, busy):
    assert "no thread of this worker is stopped" in command(session, "debug", "busy/0", text="").stderr
    future = busy.workers[0].stop_here.remote(21)
    until(lambda: "breakpoint" in str(busy.stacks(0)))
    p = command(session, "debug", "busy/0", text="p x + 1\nx = 50\nc\n")
    assert p.returncode == 0 and "22" in p.stdout and "return x * 2" in p.stdout, p
    assert future.result(10) in (42, 100)
    future = busy.workers[0].stop_here.remote(4)
    until(lambda: "breakpoint" in str(busy.stacks(0)))
    command(session, "debug", "busy/0", text="")  # the client leaves: the method goes on
    assert future.result(10) == 8
    assert command(session, "debug", "busy").returncode == 2


