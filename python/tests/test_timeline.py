"""Sections that a program marks, in the timeline of its ranks."""

import json
import os
import subprocess
import sys
import time

import pytest

import troupe
from troupe import Cluster, Worker, WorkerConfig

PROGRAM = os.path.join(os.path.dirname(troupe.__file__), "bin", "troupe")


class Trainer(Worker):
    def __init__(self, worker_config=None):
        with troupe.span("construct"):
            pass

    def step(self, path):
        self.load()
        with troupe.span("allreduce"):
            while len(os.listdir(path)) < self.world_size:
                self.arrive(path)
                time.sleep(0.005)

    @troupe.span("load")
    def load(self):
        if self.rank == 1:
            time.sleep(0.2)

    def arrive(self, path):
        open(os.path.join(path, str(self.rank)), "w").close()

    def fail(self):
        with troupe.span("boom"):
            raise ValueError("no")


class AsyncTrainer(Worker):
    @troupe.span("nap")
    async def nap(self):
        import asyncio

        await asyncio.sleep(0.01)


def timeline(session, *words):
    env = {
        **os.environ,
        "TROUPE_URL": session.url,
        "TROUPE_TOKEN_FILE": session.head.token_file,
        "TROUPE_NAMESPACE": session.namespace,
    }
    p = subprocess.run([PROGRAM, "timeline", *words], capture_output=True, text=True, timeout=90, env=env)
    assert p.returncode == 0, p.stderr
    return p.stdout


def test_spans_of_driver_and_workers_are_in_the_timeline(session, tmp_path):
    one, three = WorkerConfig(world_size=1), WorkerConfig(world_size=3)
    with (
        Cluster("spans", Trainer, worker_config=three) as cluster,
        Cluster("aspans", AsyncTrainer, worker_config=one) as other,
    ):
        with troupe.span("train"):
            cluster.step(str(tmp_path))
        other.nap()
        with pytest.raises(ValueError):
            cluster.workers[0].fail()
        events = json.loads(timeline(session, "spans", "aspans", "-o", "-"))["traceEvents"]
        late = timeline(session, "spans")
    spans = [e for e in events if e.get("cat") == "span"]
    names = sorted(e["name"] for e in spans if e["name"] != "train")
    assert names == ["allreduce"] * 3 + ["boom"] + ["construct"] * 3 + ["load"] * 3 + ["nap"], names
    assert "train" in [e["name"] for e in spans]  # in the process of the driver, which other tests share
    loads = sorted(e["dur"] for e in spans if e["name"] == "load")
    assert loads[-1] >= 200_000 > 10 * loads[0]  # in microseconds
    assert [e["args"].get("failed") for e in spans if e["name"] in ("boom", "load")].count(True) == 1
    assert "spans[1] began late span allreduce" in late and "meanwhile: span load" in late, late


def test_a_span_names_its_mistakes():
    for name in ("", None, 3):
        with pytest.raises(troupe.InvalidError, match="name must be a text"):
            troupe.span(name)
    with pytest.raises(troupe.InvalidError, match="is a generator"):

        @troupe.span("all")
        def numbers():
            yield 1

    with troupe.span("x" * 1000 + "\ud800") as s:
        pass
    with s:  # one after the other
        pass


def test_a_span_without_a_session_and_in_a_child_does_nothing(session):
    text = "import troupe\nwith troupe.span('a'): print(troupe._core.loaded())"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "None\n"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with troupe.span("child"):
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
