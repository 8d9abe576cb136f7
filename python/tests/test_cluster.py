"""A driver and its workers."""

import asyncio
import os
import pathlib
import re
import signal
import threading
import time

import numpy as np
import pytest

import troupe
import worker_classes
from troupe import _seam


def config(n=1, **more):
    return troupe.WorkerConfig(world_size=n, **more)


# Calls.


def test_who_they_are(workers):
    said = workers.execute_all_sync("who")
    assert (
        [w["rank"] for w in said] == [0, 1]
        and {w["world"] for w in said} == {2}
        and said[1]["dp"] == 1
        and said[0]["role"] == "workers"
    )
    assert (workers.world_size, workers.dp_size, workers.tp_size, workers.pp_size, workers.cp_size) == (2, 2, 1, 1, 1)
    assert workers.rank2worker == {0: "workers-0", 1: "workers-1"} and workers.worker2rank["workers-1"] == 1
    assert said[0]["name"] == "workers-0" and set(workers.worker2nodes) == {"workers-0", "workers-1"}
    assert workers.master_addr and workers.master_port and workers.get_rank_info(1).dp_rank == 1
    with pytest.raises(troupe.InvalidError, match="no rank 2"):
        workers.get_rank_info(2)


def test_methods_of_the_class_are_methods_of_the_cluster(workers):
    assert workers.rows([1, 2, 3], factor=2) == [2, 4, 6]
    assert workers.zero(5) == [0, 5]
    assert workers.each([10, 20]) == [[0, 10], [1, 20]]
    batch = workers.scale(troupe.Batch({"x": np.arange(5.0)}, {"step": 1}), by=3.0)
    assert batch["x"].tolist() == [0, 3, 6, 9, 12] and batch.meta["metrics"] == {"loss": [0.0, 1.0]}
    assert workers.echo(1) == [1, 1], "any public method, to all ranks"
    with pytest.raises(AttributeError, match="no method 'ekho'.*rows"):
        workers.ekho()
    with pytest.raises(troupe.NotFoundError, match="_secret"):
        workers.execute_all_sync("_secret")


def test_rank_zero_and_all(workers):
    assert workers.execute_rank_zero_sync("echo", 1, k=2) == [[1], {"k": 2}]
    assert workers.execute_all_sync("echo", {"a": (1, 2)}) == [{"a": (1, 2)}] * 2
    assert workers.execute_all_sync("echo", troupe.Scatter(["x", "y"])) == ["x", "y"]
    assert workers.execute_all_sync("echo", troupe.Scatter(["x", "y"]), 3) == [[["x", 3], {}], [["y", 3], {}]]
    with pytest.raises(troupe.InvalidError, match="one element a rank"):
        workers.execute_all_sync("echo", troupe.Scatter([1]))


def test_a_list_as_long_as_the_world_is_not_scattered_and_warned_of_once(session):
    with troupe.Cluster("listed", worker_classes.BasicWorker, worker_config=config(2)) as c:
        with pytest.warns(UserWarning, match="Scatter"):
            assert c.execute_all_sync("echo", [1, 2]) == [[1, 2], [1, 2]]
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            c.execute_all_sync("echo", [1, 2])


def test_options(workers):
    assert workers.options(collect=False).rows([1, 2, 3]) is None
    assert workers.options(pad=True).rows([1, 2, 3]) == [1, 2, 3]
    assert workers.options(ranks=[1]).echo("x") == ["x"]
    assert workers.options(mode="RANK_ZERO").echo("x") == "x"
    first, second = workers.options(collect_all=True).fail_on(1)
    assert first == 0 and isinstance(second, troupe.ApplicationError)
    assert workers.options(need=1).fail_on(1) == [0]
    with pytest.raises(troupe.TimedOutError):
        workers.options(timeout=0.1).sleep(5)


# Futures.


def test_a_future_is_a_sequence_of_its_ranks(workers):
    f = workers.execute_all_async("sleep", 0.05)
    assert len(f) == 2 and not f[0].done() and f.progress() == {0: False, 1: False}
    assert f.result(90) == [0, 1] and f[1].result() == 1 and f.done() and f.progress() == {0: True, 1: True}
    assert [r.result() for r in f] == [0, 1]
    assert troupe.get([f, [f[0]]]) == [[0, 1], [0]]


def test_waiting_for_some(workers):
    slow, fast = workers.workers[0].sleep.remote(0.3), workers.workers[1].echo.remote(1)
    done, left = troupe.wait([slow, fast], num_returns=1, timeout=90)
    assert done == [fast] and left == [slow]
    assert list(troupe.as_completed([slow, fast])) == [fast, slow]
    ranks = [f.rank for f in troupe.as_completed(workers.execute_all_async("sleep", 0.01))]
    assert sorted(ranks) == [0, 1]
    with pytest.raises(troupe.TimedOutError):
        troupe.get(workers.workers[0].sleep.remote(0.2), timeout=0.01)
    with pytest.raises(troupe.InvalidError):
        troupe.get(3)
    with pytest.raises(troupe.InvalidError):
        troupe.wait([slow], num_returns=2)


def test_a_bar_for_long_waits(workers, monkeypatch, capfd):
    import sys
    import types

    monkeypatch.setitem(sys.modules, "tqdm", None)  # it is not installed
    assert troupe.get(workers.execute_all_async("sleep", 1.2), progress=True) == [0, 1]
    assert re.search(r"troupe: 2 of 2 after \d+ s", capfd.readouterr().err)

    shown = []

    class Bar:
        def __init__(self, total):
            shown.append(total)

        def update(self, n):
            shown.append(n)

        def close(self):
            shown.append("closed")

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    assert workers.execute_all_async("echo", 1).result(progress=True) == [1, 1]
    assert shown == [2, 1, 1, "closed"]
    shown.clear()
    futures = [workers.execute_all_async("echo", 1), workers.workers[0].sleep.remote(60)]
    with pytest.raises(troupe.TimedOutError):
        troupe.get(futures, 0.3, progress=True)
    assert shown == [3, 1, 1, "closed"] and futures[1].cancel()


def test_cancel(workers):
    f = workers.workers[0].sleep.remote(60)
    assert f.cancel()
    with pytest.raises(troupe.CancelledError):
        f.result(90)
    assert f.cancelled() and workers.workers[0].echo(1) == 1


def test_many_in_flight_keep_their_order(workers):
    h = workers.workers[0]
    h.add(-h.add(0))
    futures = [h.add.remote() for _ in range(1000)]
    assert troupe.get(futures, 30) == list(range(1, 1001))


def test_futures_as_arguments(workers):
    a, b = workers.workers
    assert b.echo(a.echo.remote(7)) == 7
    one, two = b.echo([a.echo.remote(1), 2])
    assert isinstance(one, troupe.Reference) and one.result() == 1 and two == 2, "inside a value it is a reference"
    with pytest.raises(troupe.ApplicationError):
        b.echo(a.fail.remote())
    ((ref, eight),) = b.echo({"k": [(a.echo.remote((7,)), 8)]})["k"]
    assert ref.result() == (7,) and eight == 8, "wherever they are"
    assert workers.rows(a.echo.remote([1, 2])) == [1, 2], "and are cut as what they give"
    large = np.arange(50_000)
    got = b.echo({"x": [large, a.echo.remote(large), a.echo.remote("small")]})["x"]
    assert (got[0] == large).all() and (got[1].result() == large).all() and got[2].result() == "small"
    with pytest.raises(troupe.ApplicationError, match="bad luck"):
        b.echo({"k": a.fail.remote()})["k"].result()
    with pytest.raises(troupe.ApplicationError, match="bad luck"):
        troupe.get(b.echo([large, {"k": a.fail.remote()}])[1]["k"])


def test_futures_in_results(workers):
    a, b = workers.workers
    for n in (10, 50_000):
        got = a.nested(b, np.arange(n))
        assert got["list"][0].result() == 1 and got["list"][1] == 2 and got["deep"][0]["x"][0].result() == {3}
        assert (got["array"].result() == np.arange(n)).all()


def test_callbacks(workers):
    seen = threading.Event()
    f = workers.workers[0].echo.remote(1)
    f.add_done_callback(lambda f: seen.set())
    assert f.result(90) == 1 and seen.is_set()


# Values.


def test_arguments_are_taken_as_they_are_when_the_call_is_made(workers):
    for n in (10, 100_000):
        array = np.zeros(n)
        f = workers.workers[0].echo.remote(array)
        array += 1
        got = f.result(90)
        assert got.sum() == 0
        got += 1


def test_a_large_answer_that_is_interrupted_while_it_is_handed_on(workers):
    array = np.arange(1 << 18, dtype="f8")
    future = workers.workers[0].echo.remote(array)
    deliver = future.deliver

    def interrupted(*completion):
        deliver(*completion)
        future.deliver = deliver
        raise KeyboardInterrupt

    future.deliver = interrupted
    with pytest.raises(KeyboardInterrupt):
        future.result()
    others = [workers.workers[0].echo(array + n) for n in range(1, 6)]  # in whatever memory is free
    assert (future.result() == array).all()
    assert all((a == array + n).all() for n, a in enumerate(others, 1))


def test_large_arrays_there_and_back(workers):
    array = np.arange(1 << 20, dtype="f8").reshape(1024, 1024)
    got = workers.workers[0].change(array)
    assert (got == array + 1).all() and got.flags.writeable
    both = workers.rows(np.arange(300_000, dtype="i4"))
    assert (both == np.arange(300_000)).all()


def test_arrays_that_do_not_lie_in_one_piece(workers):
    base = np.arange(2 << 20, dtype="i4").reshape(1024, 2048)
    for array in (
        base.T,
        base[::2, 1::3],
        np.broadcast_to(base[0], (64, 2048)),
        base[::-1],
        base.astype(">i4")[:, ::2],
    ):
        f = workers.workers[0].echo.remote([array, "and more"])
        want = array.astype("i4")
        got, _ = f.result(90)
        assert (got == want).all() and got.flags.writeable
    f = workers.workers[0].echo.remote(base.T)
    base += 1
    assert f.result(90)[0, 0] == 0, "it is taken as it is when the call is made"


def test_pickles_between_a_driver_and_its_workers(workers):
    assert workers.workers[0].type_name(lambda: 1) == "function"
    assert workers.workers[0].echo({1, 2}) == {1, 2}


def test_a_worker_that_would_wait_for_itself_is_told(workers):
    a, b = workers.workers
    for way in ("forward", "call_and_wait"):
        with pytest.raises(
            troupe.RefusedError,
            match=r"echo on the worker's own rank would wait for itself.*'(forward|call).*self.echo",
        ):
            getattr(a, way)(a, "echo", 1)
    with pytest.raises(troupe.RefusedError, match="wait for itself"):
        a.call_all(workers, "echo", 1)
    assert a.forward(b, "echo", 1) == 1 and a.call_and_wait(b, "echo", 1) == [1], "another rank is another worker"
    assert a.forward(a, "status") >= 0, "a control method does not wait"
    a.call_later(a, "echo", 7)
    assert a.had() == 7, "and one that is not waited for has its turn"


def test_handles_are_values(workers):
    a, b = workers.workers
    assert a.forward(b, "echo", 5) == 5
    other = troupe.actor(worker_classes.BasicWorker)
    assert other.call_all(workers, "who")[1]["rank"] == 1
    other.cluster.shutdown()
    same = a.give(b)
    assert isinstance(same, troupe.WorkerHandle) and same.rank == 1 and same.echo(3) == 3
    cluster = a.give(workers)
    assert isinstance(cluster, troupe.Cluster) and cluster == workers and cluster.rows([1, 2]) == [1, 2]


# Errors.


def test_errors_say_who_where_and_what(workers):
    with pytest.raises(troupe.ApplicationError) as e:
        workers.execute_all_sync("fail_on", 1)
    err = e.value
    assert (err.role, err.rank, err.method, err.message) == ("workers", 1, "fail_on", "bad luck") and err.node
    assert str(err).startswith(f"workers[1] fail_on on {err.node}: ValueError: bad luck")
    assert isinstance(err, ValueError) and err.args == ("bad luck",) and type(err.original) is ValueError
    assert "worker_classes.py" in err.remote_traceback and "raise ValueError" in err.remote_traceback
    with pytest.raises(troupe.RefusedError, match="argument"):
        workers.workers[0].add(1, 2, 3)
    with pytest.raises(troupe.EncodeError):
        workers.workers[0].echo(threading.Lock())


def test_timeouts_reach_the_worker(workers):
    began = time.monotonic()
    with pytest.raises(troupe.TimedOutError):
        workers.sleep(600, timeout=0.2)
    assert time.monotonic() - began < 60
    assert workers.echo(1, timeout=90) == [1, 1]
    with pytest.raises(troupe.InvalidError):
        workers.echo(1, timeout=-1)
    left, caller, method, cancelled = workers.options(timeout=600, ranks=[0]).deadline()[0]
    assert 500 < left <= 600 and caller and method == "deadline" and cancelled is False
    assert workers.workers[0].deadline()[0] is None


def test_a_killed_worker_is_known_at_once_with_signal_and_last_lines(session):
    c = troupe.Cluster("doomed", worker_classes.BasicWorker, worker_config=config(2))
    waiting = c.workers[0].sleep.remote(60)
    began = time.monotonic()
    with pytest.raises(troupe.WorkerLostError) as e:
        c.workers[1].kill()
    assert time.monotonic() - began < 30
    assert e.value.signal == "SIGKILL" and e.value.rank == 1 and e.value.role == "doomed"
    with pytest.raises(troupe.WorkerLostError, match="rank 1"):
        waiting.result(90)
    c.shutdown()


def test_sys_exit_in_a_method_ends_the_worker_with_its_code(session):
    c = troupe.Cluster("leaver", worker_classes.BasicWorker, worker_config=config(1))
    with pytest.raises(troupe.Error):
        c.workers[0].leave(3)
    with pytest.raises(troupe.WorkerLostError) as e:
        c.workers[0].echo(1)
    assert e.value.exit_code == 3 and "about to leave" in e.value.last_lines
    c.shutdown()


# Life.


def test_health_while_the_interpreter_lock_is_held(workers):
    held = workers.workers[0].hold_lock.remote(3)

    def runs():  # Python could answer only afterwards, when nothing runs
        return [(c["method"], c["running"]) for c in workers.info()[0]["calls"]] == [("hold_lock", True)]

    until(runs)
    assert workers.health()[0]["state"] == "ready"
    assert held.result(90) == "free"


def test_control_methods_run_beside_work(workers):
    f = workers.workers[0].sleep.remote(0.5)
    assert workers.workers[0].status() >= 0
    assert not f.done()
    f.result(90)


def freeze(pid):
    """Stops a process and waits for that: until the signal has reached a thread, the others go on and answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while any(") T " not in stat.read_text() for stat in pathlib.Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.001)


def test_a_worker_that_is_frozen_and_goes_on(session):
    with troupe.Cluster("frozen", worker_classes.BasicWorker, worker_config=config(1)) as c:
        pid = c.workers[0].pid()
        freeze(pid)
        f = c.workers[0].echo.remote("late")
        with pytest.raises(troupe.TimedOutError):
            f.result(0.3)
        os.kill(pid, signal.SIGCONT)
        assert f.result(90) == "late"


def test_set_env_and_names_from_the_environment(workers):
    env = workers.workers[1].environment(
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "CLUSTER_NAME", "WORKER_NAME", "MASTER_PORT", "PYTHONUNBUFFERED"
    )
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["CLUSTER_NAME"], env["WORKER_NAME"]) == (
        "1",
        "2",
        "0",
        "workers",
        "workers-1",
    )
    assert env["MASTER_PORT"] == str(workers.master_port) and env["PYTHONUNBUFFERED"] == "1"
    workers.execute_all_sync("@set_env", {"TEST_LATE": "a=b,c"})
    assert workers.workers[0].environment("TEST_LATE") == {"TEST_LATE": "a=b,c"}


def test_workers_have_the_drivers_surroundings(workers):
    import sys

    folder, executable, path = workers.workers[0].where()
    assert (
        folder == os.getcwd()
        and os.path.realpath(executable) == os.path.realpath(sys.executable)
        and set(sys.path) - {""} <= set(path)
    )


def test_own_environment_and_protected_names(session):
    with troupe.Cluster("env", worker_classes.BasicWorker, worker_config=config(1, env={"NCCL_DEBUG": "a=b,c"})) as c:
        assert c.workers[0].environment("NCCL_DEBUG") == {"NCCL_DEBUG": "a=b,c"}
    with pytest.raises(troupe.InvalidError, match="MASTER_PORT"):
        troupe.Cluster("env2", worker_classes.BasicWorker, worker_config=config(1, env={"MASTER_PORT": "1"}))
    with pytest.raises(troupe.InvalidError, match="give text"):
        troupe.Cluster("env3", worker_classes.BasicWorker, worker_config=config(1, env={"A": 1}))
    with pytest.raises(troupe.InvalidError, match="own_variables"):
        troupe.actor(worker_classes.BasicWorker, env={"CUDA_VISIBLE_DEVICES": "3"})


def test_settings_of_the_driver_are_those_of_its_workers(session, monkeypatch):
    settings = {"TROUPE_DEVICE": "host", "TROUPE_RECORDER": "100", "TROUPE_VALUES_LIMIT": "100000000"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with troupe.Cluster("settings", worker_classes.BasicWorker, worker_config=config(1)) as c:
        assert c.workers[0].environment(*settings) == settings


def test_a_role_with_variables_of_its_own_gets_no_others(session):
    mine = {"RANK": "5", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "3,4"}
    actor = troupe.actor(worker_classes.BasicWorker, own_variables=True, env=mine, num_gpus=1, policy="restart_rank")
    assert (
        actor.first_environment(
            *mine, "WORLD_SIZE", "LOCAL_RANK", "HIP_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "WORKER_NAME"
        )
        == mine
    )
    with pytest.raises(troupe.WorkerLostError):
        actor.kill()
    assert actor.first_environment(*mine, "WORLD_SIZE") == mine  # those of a restarted worker too
    actor.cluster.shutdown()
    with troupe.Cluster("own_none", worker_classes.BasicWorker, worker_config=config(2, own_variables=True)) as c:
        assert c.workers[1].first_environment(*mine) == {}
    ranks = [{"RANK": str(4 + i), "MASTER_PORT": "29500"} for i in range(2)]
    with troupe.Cluster(
        "own_each", worker_classes.BasicWorker, worker_config=config(2, own_variables=True, env=ranks)
    ) as c:
        assert [w.first_environment(*mine) for w in c.workers] == ranks
    with pytest.raises(troupe.InvalidError, match="env has 2 environments for 3 workers"):
        troupe.Cluster("own_few", worker_classes.BasicWorker, worker_config=config(3, env=ranks, own_variables=True))
    with pytest.raises(troupe.InvalidError, match="one for each rank"):
        troupe.Cluster("own_text", worker_classes.BasicWorker, worker_config=config(1, env=["A=1"]))
    with pytest.raises(troupe.InvalidError, match="TROUPE_X"):
        troupe.actor(worker_classes.BasicWorker, own_variables=True, env={"TROUPE_X": "1"})


# Starting.


def test_classes_by_path_and_with_arguments(session):
    with troupe.Cluster(
        "by_path", "worker_classes.Given", worker_config=config(1), worker_args=(1,), worker_kwargs={"b": {3}}
    ) as c:
        assert c.workers[0].get() == [1, {3}]


@pytest.mark.parametrize(
    ("cls", "kind", "words"),
    [
        ("worker_classes.Broken", RuntimeError, "no engine here"),
        ("worker_classes.Nothing", None, "has no Nothing"),
        ("no_such_module.X", ModuleNotFoundError, "no_such_module"),
        ("broken_syntax.X", SyntaxError, "broken_syntax.py"),
    ],
)
def test_what_keeps_a_class_from_starting_reaches_the_driver(session, tmp_path, monkeypatch, cls, kind, words):
    (tmp_path / "broken_syntax.py").write_text("class X:\n    def broken(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(troupe.Error, match=words) as e:
        troupe.Cluster("never", cls, worker_config=config(2))
    if kind is not None:
        assert (
            e.value.details.get("type") == kind.__name__
            and isinstance(e.value, kind)
            and isinstance(e.value, troupe.ApplicationError)
        )
        assert kind is not RuntimeError or "worker_classes.py" in e.value.remote_traceback
    with pytest.raises(troupe.NotFoundError):
        troupe.Cluster.attach("never")


def test_mistakes_of_the_driver(session):
    for make, words in (
        (lambda: troupe.Cluster("x", worker_classes.BasicWorker), "world_size is not set"),
        (lambda: troupe.Cluster("x", None), "worker_cls"),
        (lambda: troupe.Cluster("x", "nodots", worker_config=config(1)), "no import path"),
        (lambda: troupe.Cluster("x", 3, worker_config=config(1)), "of type int"),
        (lambda: troupe.Cluster("bad name", worker_classes.BasicWorker, worker_config=config(1)), "bad name"),
        (lambda: troupe.Cluster("x", worker_classes.BasicWorker, worker_config=config(3, tensor_parallel_size=2)), "3"),
        (lambda: troupe.ResourceManager(8, 0), "num_nodes=0 must be a whole number"),
    ):
        with pytest.raises(troupe.InvalidError, match=words):
            make()


def test_any_object_is_a_worker_config(session):
    class Mine:
        name = "mine"
        world_size = 2
        tensor_parallel_size = 2
        learning_rate = 0.5

    with troupe.Cluster(worker_cls=worker_classes.BasicWorker, worker_config={"name": "dict", "world_size": 1}) as c:
        assert c.name == "dict"
    with troupe.Cluster(worker_cls=worker_classes.BasicWorker, worker_config=Mine()) as c:
        assert (c.name, c.tp_size, c.dp_size) == ("mine", 2, 1)


def test_close_is_called_when_a_role_ends(session, tmp_path):
    path = tmp_path / "closed"
    with troupe.Cluster("bye", "worker_classes.Bye", worker_config=config(1), worker_args=(str(path),)):
        pass
    assert path.read_text() == "closed"


def test_attach_by_name_and_names_that_are_taken(workers, session):
    again = troupe.Cluster.attach("workers")
    assert again.rows([1, 2]) == [1, 2] and again == workers
    assert again.workers[0].echo({1, 2j}) == {1, 2j}
    with pytest.raises(troupe.ExistsError, match="workers"):
        troupe.Cluster("workers", worker_classes.BasicWorker, worker_config=config(1))
    with pytest.raises(troupe.NotFoundError, match="nobody"):
        troupe.Cluster.attach("nobody")


def test_engines(session):
    with troupe.Cluster("engines", worker_classes.BasicWorker, worker_config=config(2)) as c:
        c.create_engine("first", "worker_classes.Given", 1, b=(2,))
        c.create_engine("second", worker_classes.Given, "x")
        assert c.options(engine="first").get() == [[1, (2,)]] * 2
        assert c.options(engine="second", ranks=[1]).get() == [["x", 2]]
        c.create_engine("loop", "worker_classes.AsyncWorker")
        engine = c.options(engine="loop", ranks=[0])
        naps = [engine.nap(0.2, blocking=False) for _ in range(4)]
        assert max(troupe.get(naps, 10)) == [4], "an async engine runs beside the work, in a worker that is not async"
        assert engine.plain() == [[]] and c.workers[0].echo(1) == 1
        slow = engine.nap(60, blocking=False)
        until(lambda: any(call["method"] == "nap" and call["running"] for call in c.info()[0]["calls"]))
        slow.cancel()
        until(lambda: engine.plain() == [["cancelled"]])
        with pytest.raises(troupe.ExistsError):
            c.create_engine("first", "worker_classes.Given", 1)
        with pytest.raises(troupe.NotFoundError):
            c.options(engine="third").get()


# Devices.


def test_a_resource_manager_and_overlapping_clusters(session):
    with troupe.ResourceManager(num_gpus_per_node=8, num_nodes=2) as rm:
        train = troupe.Cluster(
            "actor_train",
            worker_classes.BasicWorker,
            rm,
            troupe.WorkerConfig(world_size=4, device_mapping=list(range(8)), num_gpus_per_worker=2),
        )
        infer = troupe.Cluster(
            "actor_infer",
            worker_classes.BasicWorker,
            rm,
            troupe.WorkerConfig(world_size=2, device_mapping="list(range(4,12))"),
        )
        assert train.rank2devices[1] == [(0, 2), (0, 3)] and infer.rank2devices == {
            0: [(0, 4), (0, 5), (0, 6), (0, 7)],
            1: [(1, 0), (1, 1), (1, 2), (1, 3)],
        }
        assert train.rank2worker[0] == "actor_train-0-G01"
        seen = train.workers[1].environment("CUDA_VISIBLE_DEVICES")["CUDA_VISIBLE_DEVICES"]
        assert seen == "2,3"
        train.shutdown()
        infer.shutdown()
    began = time.monotonic()
    with pytest.raises(troupe.Error, match="(?i)node"):
        troupe.ResourceManager(num_gpus_per_node=8, num_nodes=9)
    assert time.monotonic() - began < 30


def test_the_world_is_known_from_the_devices(session):
    with troupe.ResourceManager(num_gpus_per_node=8, num_nodes=1) as rm:
        for mapping, more, world in (
            ("list(range(0,4))", {}, 4),
            ("list(range(0,4)) + [6,7]", {"num_gpus_per_worker": 2}, 3),
            ([0, 1], {}, 2),
        ):
            with troupe.Cluster(
                "counted",
                worker_classes.Given,
                rm,
                troupe.WorkerConfig(device_mapping=mapping, **more),
                worker_args=(1,),
            ) as c:
                assert c.world_size == world and len(c.workers) == world, mapping
        for mapping, more, words in (
            (
                "list(range(0,3))",
                {"num_gpus_per_worker": 2},
                "device_mapping has 3 devices, which num_gpus_per_worker 2",
            ),
            (
                "list(range(0,8))",
                {"num_gpus_per_worker": 2, "world_size": 3},
                "device_mapping has 8 devices, but world_size 3 with num_gpus_per_worker 2 needs 6",
            ),
            ("list(range(0,8))", {"world_size": 3}, "device_mapping has 8 devices, which world_size 3"),
            ("a few", {}, "device_mapping"),
        ):
            with pytest.raises(troupe.InvalidError, match=words):
                troupe.Cluster(
                    "counted",
                    worker_classes.Given,
                    rm,
                    troupe.WorkerConfig(device_mapping=mapping, **more),
                    worker_args=(1,),
                )


def test_a_mesh_that_the_workers_learn_late(session):
    with troupe.Cluster("late", worker_classes.Late, worker_config=config(4)) as c:
        assert c.dp_size == 4 and c.rows([1, 2, 3, 4]) == [[0, 0, 1], [1, 0, 2], [2, 0, 3], [3, 0, 4]]
        c.initialize(2)
        assert (c.dp_size, c.tp_size) == (2, 2) and c.get_rank_info(3).dp_rank == 1
        assert c.rows([1, 2, 3, 4]) == [[0, 0, 1], [0, 0, 2], [1, 0, 3], [1, 0, 4]]
        c.initialize(4, blocking=False).result(90)
        assert (c.dp_size, c.tp_size) == (1, 4), "also when the future is waited for"

        async def main():
            await c.execute_all_async("initialize", 1)

        asyncio.run(main())
        assert (c.dp_size, c.tp_size) == (4, 1), "or awaited"
        with pytest.raises(troupe.InvalidError, match="do not agree"):
            c.execute_all_sync("initialize", troupe.Scatter([2, 2, 2, 4]))


# Actors and queues.


def test_actors(session):
    a = troupe.actor(worker_classes.Given, 1, b=3)
    assert a.get() == [1, 3]
    a.cluster.shutdown()
    one = troupe.actor(worker_classes.Given, 5, name="single")
    assert troupe.actor(worker_classes.Given, 6, name="single", get_if_exists=True).get() == [5, 2]
    with pytest.raises(troupe.ExistsError):
        troupe.actor(worker_classes.Given, 6, name="single")
    one.cluster.shutdown()


def test_queues(session, workers):
    q = troupe.Queue(2)
    q.put(1)
    q.put((2, "x"))
    assert q.qsize() == 2
    with pytest.raises(troupe.TimedOutError):
        q.put(3, timeout=0.05)
    assert workers.workers[0].forward(q, "get") == 1
    assert q.get() == (2, "x")
    with pytest.raises(troupe.TimedOutError):
        q.get(timeout=0.05)
    waiting = threading.Timer(0.05, q.put, [9])
    waiting.start()
    assert q.get(timeout=90) == 9

    async def inside():
        await q.aput("in a loop")
        assert await q.aget(5) == "in a loop"
        q.put(1)
        assert q.qsize() == 1 and q.get() == 1

    asyncio.run(inside())
    q.put("last")
    q.close()
    assert q.get() == "last"
    with pytest.raises(troupe.ClosedError):
        q.get()
    with pytest.raises(troupe.ClosedError):
        q.put(1)
    q.shutdown()


# Async workers.


def test_an_async_class(session, workers):
    with troupe.Cluster("loop", "worker_classes.AsyncWorker", worker_config=config(1, max_concurrency=3)) as c:
        h = c.workers[0]
        first = h.initialize.remote()
        notes = [h.note.remote(i) for i in range(10)]
        assert troupe.get(notes, 10) == [True] * 10, "after initialize"
        first.result(90)
        assert h.plain() == list(range(10)), "in order of arrival"
        assert max(troupe.get([h.nap.remote(0.05) for _ in range(6)], 10)) == 3
        slow = h.nap.remote(60)
        assert h.note("between") is True
        slow.cancel()
        with pytest.raises(troupe.CancelledError):
            slow.result(90)
        until(lambda: "cancelled" in h.plain())
        assert h.ask(workers.workers[0], "echo", 4) == 4, "it calls others"


def until(holds, patience=90.0):
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


# Threads and event loops.


def test_many_threads_wait(workers):
    results = {}

    def work(n):
        results[n] = [workers.workers[n % 2].echo(n * 1000 + i) for i in range(50)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(90)
    assert results == {n: [n * 1000 + i for i in range(50)] for n in range(8)}


def test_a_new_event_loop_for_each_call(workers):
    async def one(n):
        return await workers.workers[0].echo.remote(n)

    assert [asyncio.run(one(n)) for n in range(20)] == list(range(20))


def test_two_event_loops_and_two_threads_at_once(workers):
    results = {}

    async def main(n):
        return await asyncio.gather(*(workers.workers[n % 2].echo.remote(i) for i in range(100)))

    def loop(n):
        results["loop", n] = asyncio.run(main(n))

    def plain(n):
        results["plain", n] = [workers.workers[n % 2].echo(i) for i in range(100)]

    threads = [threading.Thread(target=f, args=(n,)) for n in range(2) for f in (loop, plain)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(90)
    assert results == {(kind, n): list(range(100)) for n in range(2) for kind in ("loop", "plain")}


def test_inside_a_running_loop(workers):
    async def main():
        assert workers.rows([1, 2]) == [1, 2] and workers.workers[0].echo(1) == 1
        made = troupe.Cluster("looped", worker_classes.BasicWorker, worker_config=config(1))
        assert await made.workers[0].echo.remote(1) == 1 and made.workers[0].echo.remote(2).result(90) == 2
        made.create_engine("e", "worker_classes.Given", 1)
        made.update_mesh()
        assert len(made.info()) == len(made.health()) == 1
        made.shutdown()
        assert await workers.rows([1, 2], blocking=False) == [1, 2]
        with pytest.raises(troupe.ApplicationError):
            await workers.execute_all_async("fail")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(workers.workers[0].sleep.remote(60), 0.1)
        return await workers.workers[0].echo.remote("free again")

    assert asyncio.run(main()) == "free again"


def test_a_bug_in_the_core_is_an_exception(session):
    with pytest.raises(troupe.InternalError, match="on purpose"):
        session.core.ask(_seam.Request("panic", {})).get(90)
    with pytest.raises(troupe.Error, match="unknown op"):
        session.core.ask(_seam.Request("nonsense", {})).get(90)
    with pytest.raises(troupe.InvalidError, match="malformed call"):
        session.core.send(_Nobody(), lambda token: session.core.lib.troupe_call(token, 1, b"short", 5))


class _Nobody:
    def deliver(self, *args):
        pass


def test_fork_in_a_worker(workers):
    assert workers.workers[0].fork() == 7
    assert workers.workers[0].echo(1) == 1


def test_a_call_that_comes_before_an_async_worker_has_its_loop(session):
    assert troupe.actor(worker_classes.Stalled).ping() == "pong"
