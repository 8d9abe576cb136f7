"""Exceptions and values that cannot be put into words fail the call, and nothing else."""

import threading

import pytest

import failures
import troupe
from test_pipeline import all_of, line, until  # noqa: F401
from troupe import Stage, Stream

SINK = Stream(sink=True)


def refused(do, says):
    """The error of a call that fails, with a text that all of Python can use."""
    with pytest.raises(troupe.Error) as caught:
        do()
    text = str(caught.value)
    text.encode()
    assert says in text, text[:500]
    assert len(text) < 100_000
    return caught.value


@pytest.fixture(scope="module")
def sync_worker(session):
    with troupe.Cluster("failing", failures.Worker, worker_config=troupe.WorkerConfig(world_size=1)) as cluster:
        yield cluster.workers[0]


@pytest.fixture(scope="module")
def async_worker(session):
    with troupe.Cluster("failing_async", failures.Async, worker_config=troupe.WorkerConfig(world_size=1)) as cluster:
        yield cluster.workers[0]


@pytest.mark.parametrize("kind", failures.KINDS)
@pytest.mark.parametrize("method", ["fail", "fail_in_control", "fail_in_lane", "async fail"])
def test_an_exception_that_cannot_be_said_fails_the_call_alone(sync_worker, async_worker, method, kind):
    worker = async_worker if method.startswith("async") else sync_worker
    error = refused(lambda: getattr(worker, method.rpartition(" ")[2]).remote(kind).result(90), failures.KINDS[kind][1])
    if "own" not in kind:
        assert isinstance(error, troupe.ApplicationError)
        assert "failures.py" in error.remote_traceback, error.remote_traceback
    assert worker.echo.remote("alive").result(90) == "alive"


@pytest.mark.parametrize("kind", ["lone surrogate", "nothing prints", "str exits", "huge", "strange names"])
def test_a_constructor_whose_exception_cannot_be_said(session, kind):
    config = troupe.WorkerConfig(world_size=1)
    refused(
        lambda: troupe.Cluster("unmade", failures.Broken, None, config, worker_args=[kind]), failures.KINDS[kind][1]
    )


def test_an_engine_whose_constructor_cannot_say_why(sync_worker):
    cluster = sync_worker.cluster
    refused(lambda: cluster.create_engine("broken", "failures.Broken", "nothing prints"), "NothingPrints")
    assert sync_worker.echo("alive") == "alive"


def test_a_close_whose_exception_cannot_be_said(session):
    cluster = troupe.Cluster("unclosed", failures.BrokenClose, worker_config=troupe.WorkerConfig(world_size=1))
    assert cluster.workers[0].echo(1) == 1
    cluster.shutdown()


@pytest.mark.parametrize("kind", failures.VALUES)
@pytest.mark.parametrize("method", ["give", "give_in_lane", "async give"])
def test_a_result_that_cannot_be_sent_fails_the_call_alone(sync_worker, async_worker, method, kind):
    worker = async_worker if method.startswith("async") else sync_worker
    refused(lambda: getattr(worker, method.rpartition(" ")[2]).remote(kind).result(90), "cannot be")
    assert worker.echo.remote("alive").result(90) == "alive"


@pytest.mark.parametrize("kind", failures.VALUES)
def test_an_argument_that_cannot_be_sent_is_the_callers_error(sync_worker, kind):
    value = failures.VALUES[kind]()
    with pytest.raises(troupe.EncodeError) as caught:
        sync_worker.take(value)
    str(caught.value).encode()
    assert sync_worker.echo("alive") == "alive"


def test_an_argument_that_cannot_be_read_fails_the_call_alone(sync_worker, async_worker):
    for worker in (sync_worker, async_worker):
        refused(lambda w=worker: w.take.remote(failures.RaisesWhenLoaded()).result(90), "NothingPrints")
        assert worker.echo.remote("alive").result(90) == "alive"


@pytest.mark.parametrize("kind", ["lone surrogate", "nothing prints", "str exits", "huge"])
@pytest.mark.parametrize("served", [failures.Worker, failures.Async])
def test_what_a_driver_serves_survives_an_exception_that_cannot_be_said(sync_worker, served, kind):
    handle = troupe.serve(served())
    try:
        for _ in range(2):
            refused(lambda: sync_worker.tell.remote("fail", kind).result(90), failures.KINDS[kind][1])
        refused(lambda: sync_worker.tell.remote("give", "lone surrogate").result(90), "cannot be")
        assert sync_worker.tell.remote("echo", "alive").result(90) == "alive"
    finally:
        handle.cluster.shutdown()


@pytest.mark.parametrize("n", range(4))
@pytest.mark.parametrize("work", ["function", "async_function", "role"])
def test_a_stage_whose_exception_cannot_be_said(sync_worker, line, work, n):  # noqa: F811
    kind = ["lone surrogate", "nothing prints", "str exits", "huge"][n]

    def function(value):
        if value == 0:
            failures.KINDS[kind][0]()
        return value

    async def async_function(value):
        return function(value)

    if work == "role":
        stage = Stage(sync_worker.cluster, "fail", in_="in", out="out", failures=1)
        p = line({"in": Stream(), "out": SINK}, {"stage": stage})
        p.put("in", kind)
    else:
        stage = Stage(function if work == "function" else async_function, in_="in", out="out", failures=1)
        p = line({"in": Stream(), "out": SINK}, {"stage": stage})
        for i in range(3):
            p.put("in", i)
    p.drain(timeout=90)
    assert [i.value for i in all_of(p, "out")] == ([] if work == "role" else [1, 2])
    dead = p.dead()
    assert len(dead) == 1 and failures.KINDS[kind][1] in str(dead[0]), dead
    assert sync_worker.echo("alive") == "alive"


@pytest.mark.parametrize("served", [failures.Worker, failures.Async])
def test_an_exit_in_what_a_driver_serves_fails_the_call_alone(sync_worker, served):
    handle = troupe.serve(served())
    try:
        refused(lambda: sync_worker.tell.remote("leave", 3).result(90), "3")
        assert sync_worker.tell.remote("echo", "alive").result(90) == "alive"
    finally:
        handle.cluster.shutdown()


def test_an_exit_in_an_async_function_of_a_pipeline_fails_the_item_alone(session, line):  # noqa: F811
    async def work(value):
        if value == 0:
            raise SystemExit(3)
        return value

    p = line({"in": Stream(), "out": SINK}, {"stage": Stage(work, in_="in", out="out", failures=1)})
    for i in range(3):
        p.put("in", i)
    p.drain(timeout=90)
    assert [i.value for i in all_of(p, "out")] == [1, 2]


def test_output_that_is_no_text_is_in_the_error_of_a_lost_worker(session):
    worker = troupe.actor(failures.Unspeakable)
    with pytest.raises(troupe.Error):
        worker.leave(3)
    until(lambda: isinstance(worker.leave.remote(3).exception(15), troupe.WorkerLostError))
    with pytest.raises(troupe.WorkerLostError) as caught:
        worker.leave(3)
    str(caught.value).encode()
    assert caught.value.exit_code == 3
    assert any("last words" in text for text in caught.value.last_lines)


def test_a_callback_error_of_a_made_up_type_does_not_end_the_driver(session, sync_worker):
    """The type of a worker's exception is looked for here, and may do anything when it is made."""
    seen = []

    def call():
        try:
            sync_worker.fail("not to be pickled")
        except BaseException as err:
            seen.append(err)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(90)
    assert [isinstance(e, troupe.ApplicationError) for e in seen] == [True]


def test_a_setting_that_is_no_text_is_named(session, monkeypatch):
    monkeypatch.setenv("ODD", "\udcff")
    config = troupe.WorkerConfig(world_size=1)
    with pytest.raises(troupe.InvalidError, match=r"create: spec\.env\.ODD is not valid text"):
        troupe.Cluster("odd", failures.Worker, worker_config=config)
    monkeypatch.delenv("ODD")
    with pytest.raises(troupe.InvalidError, match="name"):
        troupe.Cluster("o\ud800d", failures.Worker, worker_config=troupe.WorkerConfig(world_size=1))


def test_a_method_name_that_is_no_text_is_refused(sync_worker):
    with pytest.raises(troupe.Error, match="method"):
        sync_worker.cluster.execute_all_sync("o\ud800d")
    assert sync_worker.echo("alive") == "alive"
