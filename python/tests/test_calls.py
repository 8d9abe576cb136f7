"""Ways to call methods: options, names that collide, several results, timeouts, verbs."""

import os
import re
import threading
import time

import pytest

import remote_errors
import troupe
import worker_classes


@pytest.fixture(scope="module")
def raising(session):
    with (
        pytest.warns(UserWarning, match=r"cluster\['configure'\]") as seen,
        troupe.Cluster("calls", remote_errors.Raises, config=troupe.WorkerConfig(world_size=2)) as cluster,
    ):
        assert "health" in str(seen[0].message)
        yield cluster


def test_methods_of_a_cluster_have_remote_and_options(workers):
    assert workers.rows.remote([1, 2]).result(90) == [1, 2]
    assert workers.echo.options(ranks=[1]).remote(4).result(90) == [4]
    assert workers.echo.options(ranks=[1])(4) == [4] and workers.workers[0].echo.options(timeout=90)(6) == 6
    with pytest.raises(troupe.InvalidError, match="there is no option 'timeot'; did you mean 'timeout'"):
        workers.echo.options(timeot=3)


def test_a_method_named_like_an_attribute_of_the_cluster_can_be_called(raising):
    assert raising["health"]() == ["the worker's own"] * 2
    assert raising.call("health") == ["the worker's own"] * 2
    assert (
        raising.workers[0].health() == "the worker's own"
        and raising.workers[0]["health"].remote().result(90) == "the worker's own"
    )
    assert raising.options(ranks=[1])["health"]() == ["the worker's own"]
    assert len(raising.health()) == 2 and "state" in raising.health()[0], "the cluster's own"


def test_parameters_named_like_settings_of_calls_are_never_swallowed(raising):
    with pytest.raises(troupe.InvalidError, match="timeout= is a parameter of with_timeout and a setting of the call"):
        raising.with_timeout(timeout=3)
    with pytest.raises(troupe.InvalidError, match="blocking= is a parameter"):
        raising.with_timeout(1, blocking=False)
    assert raising["with_timeout"](timeout=3, blocking=False, wait=True) == [[3, False, True]] * 2
    assert raising.with_timeout.remote(timeout=4).result(90) == [[4, "default", None]] * 2
    assert raising.workers[0].with_timeout(timeout=5, wait=1) == [5, "default", 1]
    assert raising.with_timeout.options(timeout=10)(6) == [[6, "default", None]] * 2


def test_num_returns(raising):
    first, second = raising.workers[0].pair.options(num_returns=2).remote()
    assert (first.result(90), second.result(90)) == (1, "two")
    assert troupe.get([second, first], 5) == ["two", 1] and troupe.wait([first, second], 2, 5)[1] == []
    assert raising.workers[1].with_timeout(first)[0] == 1, "as an argument"
    with pytest.raises(troupe.InvalidError, match="num_returns=3, but .* returned a tuple of 2"):
        troupe.get(raising.workers[0].pair.options(num_returns=3).remote(), 5)
    with pytest.raises(troupe.InvalidError, match="num_returns=0"):
        raising.workers[0].pair.options(num_returns=0)


def test_a_timeout_names_the_ranks_that_did_not_answer_and_what_they_do(raising, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    f = raising.wait_on.remote(1, str(first))
    raising.workers[0].pair()
    until(lambda: raising.info()[1]["calls"])
    missing = r"1 of 2 ranks have not answered: rank 1 runs 'wait_on'"
    with pytest.raises(troupe.TimedOutError, match=rf"no result within 0.3 s; .*{missing} for \d+\.\d s"):
        f.result(0.3)
    with pytest.raises(troupe.TimedOutError, match=rf"calls.wait_on; {missing}"):
        troupe.get([f, f], timeout=0.1)
    first.touch()
    assert f.result(90) == [0, 1]
    for timeout in (0.3, 3, 30):  # on a busy machine rank 0 may not have answered, or rank 1 not begun
        with pytest.raises(troupe.TimedOutError) as said:
            raising.wait_on.options(timeout=timeout)(1, str(second))
        if "have not answered: rank 1 runs" in str(said.value):
            break
    second.touch()
    assert re.search(rf"{missing} for \d+\.\d s \(cancelled\)", str(said.value))


def test_progress_names_what_is_missing(raising, capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(troupe._future, "_PROGRESS_EVERY", 0.2)
    told, told_all = [], tmp_path / "told"

    def release():
        until(lambda: told.append(capfd.readouterr().err) or "rank 1 runs 'wait_on'" in "".join(told))
        told_all.touch()

    thread = threading.Thread(target=release)
    thread.start()
    assert troupe.get(raising.wait_on.remote(1, str(told_all)), progress=True) == [0, 1]
    thread.join()


@pytest.mark.parametrize("timeout", ["5", True, [1], -1, float("nan")])
def test_a_timeout_that_is_no_number_is_refused_by_name(workers, timeout):
    f = workers.workers[0].echo.remote(1)
    for call in (
        lambda: workers.echo(1, timeout=timeout),
        lambda: workers.options(timeout=timeout),
        lambda: f.result(timeout),
        lambda: f.exception(timeout),
        lambda: troupe.get(f, timeout),
        lambda: troupe.wait([f], 1, timeout),
        lambda: list(troupe.as_completed([f], timeout)),
        lambda: workers.wait_ready(timeout),
    ):
        with pytest.raises(troupe.InvalidError, match="timeout="):
            call()


def test_wrong_types_of_other_settings(workers):
    for make, words in (
        (lambda: workers.options(collect="no"), "collect='no' must be True or False"),
        (lambda: workers.options(need="2"), "need='2'"),
        (lambda: workers.options(mode="ALL"), "no dispatch mode 'ALL'"),
        (lambda: workers.echo(1, blocking="no"), "blocking='no'"),
        (lambda: workers.echo(1, wait=3), "wait=3"),
        (lambda: troupe.wait([], "1"), "num_returns='1'"),
    ):
        with pytest.raises(troupe.InvalidError, match=words):
            make()


def test_configure_set_env_and_call(raising):
    raising.configure({"lr": 0.1})
    assert raising["configuration"]() == [{"lr": 0.1}] * 2
    with pytest.raises(troupe.InvalidError, match="two names for the same argument"):
        troupe.Cluster(
            "twice",
            worker_classes.BasicWorker,
            config=troupe.WorkerConfig(world_size=1),
            worker_config=troupe.WorkerConfig(world_size=1),
        )
    with troupe.Cluster("envs", worker_classes.BasicWorker, config=troupe.WorkerConfig(world_size=2)) as c:
        c.set_env({"NCCL_DEBUG": "INFO"})
        assert c.environment("NCCL_DEBUG") == [{"NCCL_DEBUG": "INFO"}] * 2
        assert c.call("zero", 3) == [0, 3], "in its own mode"
        with pytest.raises(troupe.InvalidError, match="the value of A"):
            c.set_env({"A": 1})


# Generators.


@pytest.fixture(scope="module")
def streaming(session):
    with troupe.Cluster("streaming", worker_classes.Streams, config=troupe.WorkerConfig(world_size=2)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def async_streaming(session):
    with troupe.Cluster(
        "async_streaming", worker_classes.AsyncStreams, config=troupe.WorkerConfig(world_size=1)
    ) as cluster:
        yield cluster


@pytest.fixture(params=["streaming", "async_streaming"])
def streams(request):
    return request.getfixturevalue(request.param).workers[0]


def until(holds, patience=90.0):
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_generator_methods_stream(streams, streaming):
    import asyncio

    assert list(streams.count(100)) == list(range(100))
    assert list(streams.count(0)) == []
    assert list(streams.count.remote(3)) == [0, 1, 2], "of the future"
    with pytest.raises(ZeroDivisionError):
        list(streams.fail_after.remote(3))
    assert [f.result() for f in streams.produced.remote()] == [3], "a method that yields nothing has futures of ranks"

    async def main():
        return [x async for x in streams.count.remote(50)]

    assert asyncio.run(main()) == list(range(50))
    assert [list(s) for s in streaming.count(3)] == [[0, 1, 2]] * 2, "of every rank"
    assert list(streaming.workers[0].count_in_lane(5)) == [0, 1, 2, 3, 4], "on a thread"


def test_a_stream_is_produced_only_a_little_ahead_of_its_consumer(streams):
    stream = streams.count(10_000)
    assert [next(stream) for _ in range(10)] == list(range(10))
    time.sleep(0.3)
    assert 10 <= streams.produced() <= 10 + 4, "backpressure"
    stream.close()
    until(lambda: streams.closed() >= 1)
    assert list(stream) == [] and streams.produced() <= 14


def test_streams_that_are_left_are_closed(streams):
    before = streams.closed()
    for x in streams.count(1000):
        if x == 3:
            break
    until(lambda: streams.closed() == before + 1)
    with streams.count(1000) as stream:
        next(stream)
    until(lambda: streams.closed() == before + 2)


def test_an_error_in_a_generator_comes_after_its_values(streams):
    got = []
    with pytest.raises(ZeroDivisionError):
        for x in streams.fail_after(3):
            got.append(x)
    assert got == [0, 1, 2]


def test_streams_of_a_served_object(session, streaming):
    handle = troupe.serve(worker_classes.Streams())
    try:
        assert streaming.workers[0].sum_of(handle, 20) == sum(range(20))
    finally:
        handle.cluster.shutdown()


def test_a_lost_worker_ends_its_streams(session):
    handle = troupe.actor(worker_classes.Streams)
    stream = handle.count(10_000)
    next(stream)
    os.kill(handle.pid(), 9)
    with pytest.raises(troupe.WorkerLostError):
        for _ in stream:
            pass
    handle.cluster.shutdown()


def is_another(handle, pid):
    try:
        return handle.pid() != pid
    except troupe.WorkerLostError:  # its end was not seen yet
        return False


def test_a_restarted_worker_has_no_stream_of_the_one_before(session):
    config = troupe.WorkerConfig(world_size=1, policy="restart_rank", restarts=5)
    with troupe.Cluster("restarted_streams", worker_classes.Streams, config=config) as cluster:
        handle = cluster.workers[0]
        before = handle.count(10_000)
        next(before)
        pid = handle.pid()
        os.kill(pid, 9)
        until(lambda: is_another(handle, pid), 60)
        other = handle.count(5)
        with pytest.raises((troupe.WorkerLostError, troupe.ClosedError)):
            for _ in before:
                pass
        assert list(other) == [0, 1, 2, 3, 4]


# Deferred answers.


def test_a_method_answers_later_with_a_future_of_its_own(session, workers):
    handle = troupe.actor(worker_classes.Deferred)
    waiting = [handle.wait_for.remote(i) for i in range(4)]
    handle.resolve(2, "two")
    assert waiting[2].result(90) == "two" and not waiting[0].done()
    handle.break_off(0)
    with pytest.raises(LookupError):
        waiting[0].result(90)
    handle.resolve(1, {1})
    handle.resolve(3, None)
    assert troupe.get(waiting[1:], 10) == [{1}, "two", None]
    assert handle.coroutine(0.05) == "later" and handle.of_another(workers.workers[0], 5) == 5
    handle.cluster.shutdown()


def test_cancelled_calls_of_an_async_worker_are_over(session):
    handle = troupe.actor(worker_classes.AsyncDeferred)
    for i in range(100):
        handle.note.remote(i).cancel()  # some before their first step
    until(lambda: not handle.cluster.info()[0]["calls"])
    handle.cluster.shutdown()


def test_a_thousand_calls_of_an_async_worker_start_in_order_of_arrival(session):
    handle = troupe.actor(worker_classes.AsyncDeferred)
    assert troupe.get([handle.note.remote(i) for i in range(1000)], 30) == list(range(1000))
    assert handle.noted() == list(range(1000))
    assert handle.in_pool() == "from a thread"
    handle.cluster.shutdown()


def test_threads_that_use_a_received_handle_first_reach_their_own_ranks(session):
    """Two openings of one handle must not share their plans: a call would reach another rank."""
    config = troupe.WorkerConfig(world_size=6)
    with troupe.Cluster("asked", worker_classes.BasicWorker, worker_config=config) as asked:
        for i in range(4):
            with troupe.Cluster(
                f"asks{i}", worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=1)
            ) as asks:
                assert asks.workers[0].ranks_by_threads(asked) == [*range(6), *range(6)]
