"""Pipelines: items put and taken, stages that are Python's, failures and kills."""

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import numpy as np
import pytest

import conftest
import pipeline_workers
import troupe
from troupe import _core, _seam

SINK = {"sink": True}


@pytest.fixture(scope="module")
def workers_role(session):
    with troupe.Cluster(
        "items", pipeline_workers.ItemWorker, worker_config=troupe.WorkerConfig(world_size=2)
    ) as cluster:
        yield cluster


@pytest.fixture
def line(request):
    """Makes pipelines with names of their own, and closes them."""
    made = []

    def make(streams, stages, **settings):
        made.append(
            troupe.Pipeline(f"{request.node.name}"[:60].replace("[", "-").replace("]", ""), streams, stages, **settings)
        )
        return made[-1]

    yield make
    for p in made:
        p.close()
    for name in {p.name for p in made}:
        troupe.Pipeline.remove(name)


def all_of(p, stream):
    out = []
    while items := p.take(stream, 100, timeout=0):
        out += items
    return out


def until(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_items_go_through_a_stage(line, workers_role):
    p = line(
        {"in": {"items": 10}, "out": SINK},
        {"double": {"role": workers_role, "method": "double", "in": "in", "out": "out"}},
    )
    for i in range(30):  # more than fit: a put waits
        p.put("in", i, key=f"k{i}")
    p.drain(timeout=90)
    got = all_of(p, "out")
    assert sorted(item.value for item in got) == [2 * i for i in range(30)]
    assert {item.key for item in got} == {f"k{i}" for i in range(30)}
    stats = p.stats()
    assert stats["stages"]["double"]["handled"] == 30 and stats["streams"]["out"]["in"] == 30
    with pytest.raises(troupe.ClosedError):
        p.put("in", 1)


def test_none_is_no_output(line, workers_role):
    p = line({"in": None, "out": SINK}, {"odd": {"role": "items", "method": "odd", "in": "in", "out": "out"}})
    p.put_many("in", range(10))
    p.drain(timeout=90)
    assert sorted(item.value for item in all_of(p, "out")) == [1, 3, 5, 7, 9]


def test_a_method_gives_items_to_several_streams(line, workers_role):
    p = line(
        {"in": {}, "left": SINK, "right": SINK},
        {
            "split": {
                "role": workers_role,
                "method": "split",
                "style": "item",
                "in": "in",
                "out": ["left", "right"],
                "stamp": True,
            }
        },
    )
    p.set_version(1.5)
    p.put("in", "a", key="k1", id="one")
    p.drain(timeout=90)
    (left,) = all_of(p, "left")
    assert left.value == "a k1 in 1 1.5" and left.key == "k1" and left.version == 1.5
    right = {repr(item.value): item.key for item in all_of(p, "right")}
    assert right == {"['one']": "k2", "3": "k1"}


def test_a_group_is_a_list_of_items(line, workers_role):
    p = line(
        {"in": {}, "out": SINK},
        {
            "add": {
                "role": workers_role,
                "method": "add",
                "style": "item",
                "in": "in",
                "out": "out",
                "group": {"first": 3, "every": 30},
            }
        },
    )
    for group in ("a", "b"):
        p.put_many("in", [troupe.Item(i, group=group, of=3) for i in range(3)])
    p.drain(timeout=90)
    assert [item.value for item in all_of(p, "out")] == [3, 3]


def test_arrays_travel(line, workers_role):
    p = line({"in": {}, "out": SINK}, {"norm": {"role": workers_role, "method": "norm", "in": "in", "out": "out"}})
    p.put("in", pipeline_workers.array())
    (item,) = p.take("out", timeout=90)
    assert item.value["dtype"] == "float32" and item.value["sum"] == float(pipeline_workers.array().sum())
    assert np.array_equal(item.value["back"], pipeline_workers.array() + 1)


def test_nothing_in_an_item_is_pickled(line, workers_role):
    p = line(
        {"in": {}, "out": SINK},
        {"object": {"role": workers_role, "method": "object", "in": "in", "out": "out", "failures": 1}},
    )
    with pytest.raises(troupe.EncodeError, match="never pickled"):
        p.put("in", lambda: 1)
    smuggled = type(p._codec)(pickle=True).encode(lambda: 1)  # by somebody who does not keep to it

    def letters():
        return p._ask("dead", _seam.pipeline_dead, True, json.loads)

    p._ask("put", _seam.pipeline_put, True, stream="in", items=[{"body": smuggled}], timeout=None)
    p.put("in", 1)  # its output cannot be sent
    until(lambda: len(letters()) == 2)
    reasons = [letter["failures"][0]["error"] for letter in letters()]
    assert all("pickle" in reason for reason in reasons), reasons


def test_a_failure_ends_in_a_dead_letter_with_its_stack(line, workers_role):
    p = line(
        {"in": {}, "out": SINK},
        {"fail": {"role": workers_role, "method": "fail", "in": "in", "out": "out", "failures": 2, "backoff": 0.01}},
    )
    p.put("in", "bad", id="b1")
    p.put("in", "good")
    until(lambda: p.stats()["dead"] == 1)
    (letter,) = p.dead()
    assert (letter["id"], letter["value"], letter["attempts"], letter["reason"]) == ("b1", "bad", 2, "failures")
    assert "bad luck" in letter["failures"][0]["error"]
    assert "raise ValueError" in letter["failures"][0]["stack"]
    assert [item.value for item in p.take("out", 5, timeout=90)] == ["good"]
    assert p.retry_dead(letter["seq"]) == 1
    until(lambda: p.stats()["stages"]["fail"]["dead"] == 2 and len(p.dead()) == 1)  # given up, and stored
    assert p.drop_dead() == 1 and p.dead() == []


def test_a_killed_worker_gives_its_items_back_and_effects_happen_once(line, session, tmp_path):
    config = troupe.WorkerConfig(world_size=2, policy="restart_rank", restarts=20)
    with troupe.Cluster("mortal", pipeline_workers.ItemWorker, worker_config=config) as mortal:
        p = line(
            {"in": {}, "out": SINK},
            {"work": {"role": mortal, "method": "die_once", "style": "item", "in": "in", "out": "out", "in_flight": 4}},
        )
        p.put_many("in", [[i, str(tmp_path)] for i in range(100)])
        p.drain(timeout=60)
        assert sorted(item.value for item in all_of(p, "out")) == list(range(100))
        assert len(os.listdir(tmp_path)) == 3  # 7, 47 and 87 were somebody's last
        stats = p.stats()
        assert stats["stages"]["work"]["lost"] >= 3 and stats["dead"] == 0
        assert stats["stages"]["work"]["in_flight"] == 0
        p.close()


def test_priorities_pause_and_resume(line, workers_role):
    p = line(
        {"in": {"priorities": 2}, "out": SINK},
        {"double": {"role": workers_role, "method": "double", "workers": 1, "in": "in", "out": "out"}},
    )
    p.pause("double")
    p.put("in", 1)
    p.put("in", 2, priority=1)
    assert p.stats()["stages"]["double"]["paused"] and p.take("out", timeout=0) == []
    p.resume("double")
    p.drain(timeout=90)
    assert [item.value for item in all_of(p, "out")] == [4, 2]
    with pytest.raises(troupe.NotFoundError, match="has no stage"):
        p.pause("duble")


def test_an_aborted_item_hands_back_what_it_has(line, session):
    with troupe.Cluster("async", pipeline_workers.Async, worker_config=troupe.WorkerConfig(world_size=1)) as cluster:
        p = line(
            {"in": {}, "out": SINK},
            {
                "gen": {
                    "role": cluster,
                    "method": "generate",
                    "style": "item",
                    "abort": "abort",
                    "in": "in",
                    "out": "out",
                    "in_flight": 2,
                }
            },
        )
        p.put("in", "x", id="x1")
        until(lambda: p.stats()["stages"]["gen"]["in_flight"] == 1)
        p.abort("x1")
        assert [item.value for item in p.take("out", timeout=90)] == ["part of x"]
        p.close()


def test_items_that_are_not_dealt_with_go_back(line, workers_role):
    p = line({"in": {}, "out": SINK}, {"double": {"role": workers_role, "method": "double", "in": "in", "out": "out"}})
    p.put("in", 1)
    with pytest.raises(KeyError), p.taking("out", timeout=90) as items:
        raise KeyError(items[0].value)
    assert [item.value for item in p.take("out", timeout=90)] == [2]


def test_it_goes_on_where_it_was(line, workers_role):
    declared = (
        {"in": {}, "out": SINK},
        {"double": {"role": workers_role, "method": "double", "in": "in", "out": "out"}},
    )
    with line(*declared) as p:
        p.pause("double")
        p.put_many("in", [1, 2])
    p = line(*declared)
    p.resume("double")
    p.drain(timeout=90)
    assert sorted(item.value for item in all_of(p, "out")) == [2, 4]


def test_what_was_removed_is_gone(workers_role):
    declared = (
        {"in": {}, "out": SINK},
        {"double": {"role": workers_role, "method": "double", "in": "in", "out": "out"}},
    )
    with troupe.Pipeline("gone", *declared) as p:
        p.put("in", 1)
        p.drain(timeout=90)
        with pytest.raises(troupe.RefusedError, match="shut it down first"):
            troupe.Pipeline.remove("gone")
    troupe.Pipeline.remove("gone")
    with pytest.raises(troupe.NotFoundError, match="there is no pipeline gone"):
        troupe.Pipeline.remove("gone")
    with troupe.Pipeline("gone", *declared) as p:
        assert p.take("out", timeout=0) == []
    troupe.Pipeline.remove("gone")


def test_another_process_puts_takes_and_gives_verbs(line, workers_role, script, session):
    p = line({"in": {}, "out": SINK}, {"double": {"role": workers_role, "method": "double", "in": "in", "out": "out"}})
    out = script(
        f"""
        import troupe
        p = troupe.Pipeline.attach({p.name!r})
        p.put("in", 21, key="k", timeout=90)
        p.set_version(2)
        with p.taking("out", 5, timeout=90) as items:
            print([(i.value, i.key) for i in items], p.version)
        print(p.take("out", timeout=0), p.stats()["streams"]["out"]["items"])
        p.put("in", "back", timeout=90)
        try:
            with p.taking("out", timeout=90) as items:
                raise KeyError
        except KeyError:
            print([i.value for i in p.take("out", timeout=90)])  # at once
        try:
            troupe.Pipeline.attach("nobody")
        except troupe.NotFoundError as err:
            print(err)
        p.shutdown()
        """,
        env={"TROUPE_NAMESPACE": session.namespace},
    ).stdout
    lines = out.splitlines()
    assert lines[0] == "[(42, 'k')] 2.0" and lines[1] == "[] 0"
    assert lines[2] == "['backback']" and "does not run" in lines[3]
    with pytest.raises(troupe.ClosedError):
        until(lambda: p.stats() is None)


def test_a_file_has_roles_of_python_classes(session):
    text = f"""
        name: file
        roles: {{filed: {{python: pipeline_workers.Plain, command: [{sys.executable}, -m, troupe.worker], config: {{by: 3}}}}}}
        streams: {{in: {{}}, out: {{sink: true}}}}
        stages: {{times: {{role: filed, method: times, style: item, in: in, out: out}}}}
    """
    env = {
        **os.environ,
        "TROUPE_URL": session.url,
        "TROUPE_TOKEN_FILE": session.head.token_file,
        "TROUPE_FINGERPRINT": session.head.fingerprint,
        "TROUPE_NAMESPACE": session.namespace,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
        f.write(textwrap.dedent(text))
        f.flush()
        run = subprocess.Popen(
            [_core.program_path(), "run", f.name, "--json"],
            env={k: v for k, v in env.items() if v},
            cwd=conftest.HERE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            seen = []
            while not (seen and '"event":"pipeline"' in seen[-1]):
                seen.append(run.stdout.readline())
                assert seen[-1], seen
            with troupe.Pipeline.attach("file") as p:
                p.put("in", 5, timeout=90)
                assert [item.value for item in p.take("out", timeout=90)] == [15]
                p.shutdown()
            assert run.wait(90) == 0
        finally:
            run.kill()
            run.communicate()


def test_every_mistake_is_said(workers_role):
    with pytest.raises(troupe.InvalidError) as err:
        troupe.Pipeline(
            "bad",
            {"in": {"itms": 3}, "lost": {}},
            {"s": {"role": workers_role, "method": "double", "in": "in", "out": "nowhere"}, "t": {"in": "in"}},
        )
    text = str(err.value)
    assert (
        'unknown field "itms"' in text
        and "nowhere" in text
        and "lost" in text
        and "line" not in text.replace("pipeline", "")
    ), text


def test_the_example_ends_by_itself(tmp_path):
    path = os.path.join(conftest.ROOT, "examples", "pipelines", "rollout.py")
    out = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
    ).stdout
    assert "0 dead letters, 0 left in the streams" in out, out


@pytest.mark.parametrize("busy", [False, True])
def test_a_pipeline_whose_role_died_says_which_and_of_what(session, line, busy):
    with troupe.Cluster("mortal", pipeline_workers.ItemWorker, worker_config=troupe.WorkerConfig(world_size=1)) as role:
        pid = role.workers[0].pid()
        stages = {"one": troupe.Stage(role, "hold" if busy else "double", in_="in", out="out")}
        p = line({"in": troupe.Stream(), "out": troupe.Stream(sink=True)}, stages)
        if busy:
            p.put("in", 1)
            until(lambda: p.stats()["stages"]["one"]["in_flight"] == 1, 40)
        before = time.time()
        os.kill(pid, signal.SIGKILL)
        until(lambda: "death" in p.stats()["stages"]["one"], 40)
        if not busy:
            p.put("in", 1)
        for handle in (p, troupe.Pipeline.attach(p.name)):
            began = time.monotonic()
            with pytest.raises(
                troupe.WorkerLostError, match="(?s)stage one has no workers: role mortal died at .*SIGKILL"
            ):
                handle.drain(timeout=60)
            assert time.monotonic() - began < 30, "it is said at once"
            stage = handle.stats()["stages"]["one"]
            death = stage["death"]
            assert stage["workers"] == 0 and death["role"] == "mortal" and "SIGKILL" in death["cause"]
            assert (
                before - 1 < datetime.datetime.fromisoformat(death["at"][:19] + "+00:00").timestamp() < time.time() + 1
            )
        table = command(session, "pipeline", "top", p.name, "--once")
        assert "dead" in table and "role mortal died" in table and "SIGKILL" in table
        (told,) = json.loads(command(session, "pipeline", "top", p.name, "--once", "--json"))["stages"]
        assert told["death"]["role"] == "mortal" and "SIGKILL" in told["death"]["cause"]


def command(session, *args):
    """What the program prints."""
    head = session.head
    env = {
        **os.environ,
        "TROUPE_URL": head.url,
        "TROUPE_TOKEN_FILE": head.token_file,
        "TROUPE_FINGERPRINT": head.fingerprint,
    }
    done = subprocess.run([_core.program_path(), *args], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_stage_of_a_method_that_does_not_exist_is_refused_when_it_is_declared(workers_role):
    for declare in (
        lambda: troupe.Stage(workers_role, "duble", in_="in", out="out"),
        lambda: troupe.Stage(workers_role, "double", in_="in", out="out", abort="duble"),
        lambda: troupe.Pipeline.check(
            "p", STREAMS, {"one": {"role": workers_role, "method": "duble", "in": "in", "out": "out"}}
        ),
        lambda: troupe.Pipeline("p", STREAMS, {"one": troupe.Stage("items", "duble", in_="in", out="out")}),
    ):
        with pytest.raises(
            troupe.InvalidError, match=r"(?s)role items .*has no method .duble..*did you mean .?double"
        ) as caught:
            declare()
        assert "hold" in str(caught.value), "the methods that it has are named"


STREAMS = {"in": {}, "out": SINK}
