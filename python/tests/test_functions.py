"""Stages that are plain functions: in this process, and in roles of a file."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import numpy as np
import pytest

import conftest
import pipeline_functions
import pipeline_workers
import troupe
from test_pipeline import all_of, line, until  # noqa: F401
from troupe import Stage, Stream, _core

SINK = Stream(sink=True)


@pytest.fixture(autouse=True)
def with_session(session):
    """Every pipeline needs one."""


def test_a_function_is_a_stage(line):  # noqa: F811
    p = line(
        {"in": Stream(items=10), "out": SINK},
        {"double": Stage(pipeline_functions.double, in_="in", out="out", workers=3)},
    )
    for i in range(30):  # more than fit: a put waits
        p.put("in", i, key=f"k{i}")
    p.drain(timeout=90)
    got = all_of(p, "out")
    assert sorted((item.value, item.key) for item in got) == sorted((2 * i, f"k{i}") for i in range(30))
    assert p.stats()["stages"]["double"]["handled"] == 30


def test_arrays_that_do_not_lie_in_one_piece(line):  # noqa: F811
    array = np.arange(1 << 20).reshape(1024, 1024).T
    p = line({"in": Stream(), "out": SINK}, {"double": Stage(pipeline_functions.double, in_="in", out="out")})
    p.put("in", array)
    p.drain(timeout=90)
    assert (all_of(p, "out")[0].value == 2 * array).all()


def test_no_more_at_once_than_workers(line):  # noqa: F811
    at_once, most, lock = 0, 0, threading.Lock()

    def work(value):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.005)
        with lock:
            at_once -= 1
        return value

    p = line(
        {"in": {}, "out": SINK}, {"work": {"function": work, "in": "in", "out": "out", "workers": 3, "in_flight": 4}}
    )
    p.put_many("in", range(40))
    p.drain(timeout=90)
    assert most == 3 and len(all_of(p, "out")) == 40
    p.close()


def test_items_and_several_outputs(line):  # noqa: F811
    p = line(
        {"in": {}, "left": SINK, "right": SINK},
        {"tag": Stage(pipeline_functions.tag, in_="in", out=("left", "right"), style="item", stamp=True)},
    )
    p.set_version(2.5)
    p.put("in", "a", key="k1", id="one")
    p.drain(timeout=90)
    (left,) = all_of(p, "left")
    (right,) = all_of(p, "right")
    assert left.value == ["a", "k1", 1, 2.5] and left.key == "k1" and left.version == 2.5
    assert right.value == "one" and right.key == "other"


def test_groups_staleness_and_versions(line):  # noqa: F811
    """Of each group the first three, no older than one and a half versions; every group is a version."""
    seen = []

    def train(values):
        seen.append(values)
        return sum(values)

    p = line(
        {"in": {}, "out": SINK},
        {"train": Stage(train, in_="in", out="out", group={"first": 3, "every": 30}, stale={"bound": 1.5}, advance=1)},
    )
    p.put_many("in", [troupe.Item(i, group="a", of=4) for i in range(4)])
    until(lambda: p.version == 1)
    p.put_many("in", [troupe.Item(i, group="b", of=3) for i in range(3)])
    until(lambda: p.version == 2)
    p.put_many(
        "in",
        [
            troupe.Item(9, group="c", of=3, version=0.25),
            *[troupe.Item(i, group="c", of=3, version=0.5) for i in range(3)],
        ],
    )
    p.drain(timeout=90)
    assert [item.value for item in all_of(p, "out")] == [3, 3, 3]
    assert seen == [[0, 1, 2]] * 3 and p.version == 3
    stats = p.stats()["streams"]["in"]
    assert stats["late"] == 1 and stats["stale"] == 1


def test_a_function_without_outputs_may_return_something(line):  # noqa: F811
    seen = []
    p = line({"in": {}}, {"see": Stage(lambda value: seen.append(value) or value, in_="in")})
    p.put_many("in", range(5))
    p.drain(timeout=90)
    assert seen == list(range(5)) and p.stats()["dead"] == 0


def test_failures_end_in_a_dead_letter_with_the_traceback(line):  # noqa: F811
    p = line(
        {"in": {}, "out": SINK}, {"fail": Stage(pipeline_functions.fail, in_="in", out="out", failures=2, backoff=0.01)}
    )
    p.put("in", "bad", id="b1")
    p.put("in", "good")
    until(lambda: p.stats()["dead"] == 1)
    (letter,) = p.dead()
    assert (letter["id"], letter["value"], letter["attempts"], letter["reason"]) == ("b1", "bad", 2, "failures")
    assert "bad luck" in letter["failures"][1]["error"] and "raise ValueError" in letter["failures"][1]["stack"]
    assert [item.value for item in p.take("out", 5, timeout=90)] == ["good"]


def test_what_a_function_gives_is_never_pickled(line):  # noqa: F811
    p = line({"in": {}, "out": SINK}, {"bad": Stage(lambda value: threading.Lock(), in_="in", out="out", failures=1)})
    p.put("in", 1)
    until(lambda: p.stats()["dead"] == 1)
    assert "never pickled" in p.dead()[0]["failures"][0]["error"]


@pytest.mark.parametrize("work", [pipeline_functions.until_aborted, pipeline_functions.until_cancelled])
def test_an_aborted_item_hands_back_what_it_has(line, work):  # noqa: F811
    p = line({"in": {}, "out": SINK}, {"gen": Stage(work, in_="in", out="out", style="item")})
    pipeline_functions.begun.clear()
    p.put("in", "x", id="x1")
    assert pipeline_functions.begun.wait(90)
    p.abort("x1")
    assert [item.value for item in p.take("out", timeout=90)] == ["part of x"]
    assert p.stats()["stages"]["gen"]["aborted"] == 1


def test_the_time_of_an_attempt_is_bounded(line):  # noqa: F811
    def slow(value):
        while True:
            troupe.current_call().check()
            time.sleep(0.002)

    p = line({"in": {}}, {"slow": Stage(slow, in_="in", timeout=0.05, failures=1)})
    p.put("in", 1)
    until(lambda: p.stats()["dead"] == 1)
    assert p.dead()[0]["failures"][0]["code"] == "timed_out"


def test_async_functions_run_at_once(line):  # noqa: F811
    met = []

    async def meet(value):
        met.append(value)
        while len(met) < 4:  # they are all there at the same time
            await asyncio.sleep(0.001)
        return value

    p = line({"in": {}, "out": SINK}, {"meet": Stage(meet, in_="in", out="out", workers=4)})
    p.put_many("in", range(4))
    p.drain(timeout=90)
    assert sorted(item.value for item in all_of(p, "out")) == [0, 1, 2, 3]


def test_a_function_calls_a_cluster(line, session):  # noqa: F811
    with troupe.Cluster(
        "called", pipeline_workers.ItemWorker, worker_config=troupe.WorkerConfig(world_size=2)
    ) as cluster:
        calls = {
            "ask": Stage(lambda value: cluster.workers[value % 2].double(value), in_="in", out="mid", workers=4),
            "role": Stage(cluster, "double", in_="mid", out="out", in_flight=2),
        }
        p = line({"in": {}, "mid": Stream(items=4), "out": SINK}, calls)
        p.put_many("in", range(50))
        p.drain(timeout=90)
        assert sorted(item.value for item in all_of(p, "out")) == [4 * i for i in range(50)]
        p.close()


def test_scale_and_pause(line):  # noqa: F811
    started, go = threading.Semaphore(0), threading.Event()

    def work(value):
        started.release()
        go.wait(10)
        return value

    p = line({"in": {}, "out": SINK}, {"work": Stage(work, in_="in", out="out")})
    p.put_many("in", range(4))
    assert started.acquire(timeout=90)
    p.scale("work", 3)
    for _ in range(3):  # beside the one that the old worker has
        assert started.acquire(timeout=90)
    go.set()
    p.drain(timeout=90)
    assert len(all_of(p, "out")) == 4


def test_closing_does_not_wait_for_a_function_for_ever(session):
    go = threading.Event()
    p = troupe.Pipeline("stuck", {"in": {}}, {"stuck": Stage(lambda value: go.wait(60), in_="in")}, grace=0.1)
    p.put("in", 1)
    until(lambda: p.stats()["stages"]["stuck"]["in_flight"] == 1)
    began = time.monotonic()
    p.close()
    assert time.monotonic() - began < 30  # less than the function takes
    go.set()
    seen = []
    with troupe.Pipeline("stuck", {"in": {}}, {"stuck": Stage(seen.append, in_="in")}) as p:
        p.drain(timeout=90)
    assert seen == [1], "it was back in its stream"


def test_a_killed_driver_goes_on_where_it_was_and_effects_happen_once(session, script, tmp_path):
    """The process with the functions is killed again and again; every item's outputs are there once."""
    text = f"""
        import os, signal
        import troupe
        from troupe import Stage, Stream

        def work(value):
            try:
                os.close(os.open({str(tmp_path)!r} + f"/{{value}}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return value
            if value % 40 == 17:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        troupe.init()
        p = troupe.Pipeline("mortal", {{"in": {{}}, "mid": Stream(items=8), "out": Stream(sink=True)}},
            {{"work": Stage(work, in_="in", out="mid", workers=4), "pass": Stage(lambda v: v, in_="mid", out="out", workers=2)}}, take_over=True)
        if os.environ["DEATHS"] == "0":  # all are stored before the first is handed out
            p.put_many("in", range(120))
        p.drain(timeout=90)
        got = []
        while batch := p.take("out", 1000, timeout=1):  # those of before the last death come from the disk
            got += [item.value for item in batch]
        print(sorted(got) == list(range(120)), p.stats()["dead"], sorted(got))
        p.close()
    """
    deaths = 0
    while True:
        done = script(text, env={"TROUPE_NAMESPACE": session.namespace, "DEATHS": str(deaths)}, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        deaths += 1
        assert deaths <= 3
    assert deaths == 3 and done.stdout.split()[:2] == ["True", "0"], done.stdout + done.stderr


FILE = """
    name: {name}
    roles:
      doubler: {{function: pipeline_functions.double, world: 2, command: [{python}, -m, troupe.worker], policy: restart_rank}}
      failing: {{function: pipeline_functions.fail, command: [{python}, -m, troupe.worker]}}
      holder: {{function: pipeline_functions.{holder}, command: [{python}, -m, troupe.worker]}}
    streams: {{in: {{}}, mid: {{}}, hold: {{}}, out: {{sink: true}}}}
    stages:
      double: {{role: doubler, in: in, out: mid, in_flight: 2}}
      fail: {{role: failing, in: mid, out: out, failures: 1}}
      hold: {{role: holder, in: hold, out: out, style: item}}
"""


@pytest.fixture
def run_file(session):
    """Runs a file with `troupe run` until the test ends."""
    env = {
        **os.environ,
        "TROUPE_URL": session.url,
        "TROUPE_TOKEN_FILE": session.head.token_file,
        "TROUPE_FINGERPRINT": session.head.fingerprint,
        "TROUPE_NAMESPACE": session.namespace,
    }
    runs = []

    def start(text):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as f:
            f.write(textwrap.dedent(text))
        command = [_core.program_path(), "run", f.name, "--json"]
        run = subprocess.Popen(
            command,
            env={k: v for k, v in env.items() if v},
            cwd=conftest.HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        runs.append((run, f.name))
        seen = []
        while not (seen and '"event":"pipeline"' in seen[-1]):
            seen.append(run.stdout.readline())
            assert seen[-1], seen
        return run

    yield start
    for run, path in runs:
        run.kill()
        run.communicate()
        os.unlink(path)


@pytest.mark.parametrize("holder", ["until_aborted", "until_cancelled"])
def test_a_file_has_roles_of_functions(run_file, holder, tmp_path):
    name = holder.replace("_", "-")
    run = run_file(FILE.format(name=name, holder=holder, python=sys.executable))
    with troupe.Pipeline.attach(name) as p:
        p.put_many("in", [1, 2, "ba"], timeout=90)
        got = [item.value for _ in range(3) for item in p.take("out", 1, timeout=90)]
        assert sorted(got, key=str) == [2, 4, "baba"]
        p.put("in", "b", timeout=90)
        x = tmp_path / "x"
        p.put("hold", str(x), id="x1", timeout=90)
        until(x.exists)
        assert p.stats()["stages"]["hold"]["in_flight"] == 1
        p.abort("x1")
        values = [item.value for _ in range(2) for item in p.take("out", 1, timeout=90)]
        assert set(values) == {"bb", f"part of {x}"}
        p.shutdown()
    assert run.wait(90) == 0


def test_killed_workers_of_a_function_give_their_items_back(run_file, tmp_path):
    run = run_file(f"""
        name: killed
        roles: {{mortal: {{function: pipeline_functions.die_once, world: 2, policy: restart_rank, command: [{sys.executable}, -m, troupe.worker]}}}}
        streams: {{in: {{}}, out: {{sink: true}}}}
        stages: {{work: {{role: mortal, in: in, out: out, in_flight: 4}}}}
    """)
    with troupe.Pipeline.attach("killed") as p:
        p.put_many("in", [[i, str(tmp_path)] for i in range(100)], timeout=90)
        p.drain(timeout=60)
        assert sorted(item.value for item in all_of(p, "out")) == list(range(100))
        stats = p.stats()
        assert stats["stages"]["work"]["lost"] >= 3 and stats["dead"] == 0 and len(os.listdir(tmp_path)) == 3
        p.shutdown()
    assert run.wait(90) == 0


def test_the_declaration_is_checked_as_a_whole():
    with pytest.raises(troupe.InvalidError) as err:
        troupe.Pipeline.check(
            "bad",
            {"in": Stream(items=0), "lost": {}},
            {
                "f": Stage(pipeline_functions.double, "method", in_="in", out="nowhere"),
                "g": {"in": "in"},
                "h": Stage("role", in_="in", group={"first": 0}),
            },
        )
    text = str(err.value)
    for part in (
        "a bound of zero",
        "nowhere",
        "no stage reads",
        "is a function, which has no methods",
        "the stage has no role",
        "has no method",
    ):
        assert part in text, text
    troupe.Pipeline.check("good", {"in": {}}, {"f": Stage(pipeline_functions.double, in_="in")})
    with pytest.raises(troupe.InvalidError, match="a function"):
        troupe.Pipeline.check(
            "bad", {"in": {}}, {"f": {"function": pipeline_functions.double, "role": "r", "in": "in"}}
        )


def test_replicas_are_declared():
    with pytest.raises(troupe.InvalidError, match="replicas"):
        troupe.Pipeline("many", {"in": {}}, {"f": Stage(pipeline_functions.double, in_="in")}, replicas=0)
