"""init, tasks, actors, objects, errors."""

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time

import pytest

from ray_api.raytest import REAL, eventually, module, ray

exceptions = module("exceptions")


@ray.remote
def add(a, b=0):
    return a + b


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self, start=0):
        self.n = start

    def add(self, k=1):
        self.n += k
        return self.n

    def fail(self):
        raise KeyError("absent")

    def pid(self):
        return os.getpid()

    @ray.method(num_returns=2)
    def pair(self):
        return 1, 2


@ray.remote(num_cpus=0)
class Gate:
    def __init__(self):
        self.event = asyncio.Event()

    async def wait(self):
        await self.event.wait()
        return "open"

    async def open(self):
        self.event.set()

    async def ping(self):
        return "pong"


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_tasks_resolve_references_in_arguments(session):
    first = add.remote(1, b=1)
    assert ray.get(add.remote(first, b=ray.put(3))) == 5
    assert ray.get([add.remote(i) for i in range(5)]) == list(range(5))
    assert ray.get([]) == []
    a, b = ray.remote(num_returns=2)(lambda: (1, 2)).remote()
    assert ray.get([b, a]) == [2, 1]


def test_nested_references_stay_references(session):
    @ray.remote
    def inner(box):
        return type(box["ref"]).__name__, ray.get(box["ref"])

    assert ray.get(inner.remote({"ref": ray.put("value")})) == ("ObjectRef", "value")
    with pytest.raises(TypeError):
        ray.put(ray.put(1))


def test_large_values(session):
    numpy = pytest.importorskip("numpy")

    @ray.remote
    def make(n):
        return numpy.arange(n), [ray.put(numpy.ones(n))]

    array, (inner,) = ray.get(make.remote(2_000_000))
    assert array[-1] == 1_999_999 and ray.get(inner).sum() == 2_000_000
    assert (
        ray.get(ray.remote(lambda a, box: a.sum() + ray.get(box[0]).sum()).remote(ray.put(array), [inner]))
        == array.sum() + 2_000_000
    )


def test_error_is_an_instance_of_its_cause(session):
    counter = Counter.remote()
    with pytest.raises(KeyError) as raised:
        ray.get(counter.fail.remote())
    assert isinstance(raised.value, exceptions.RayTaskError) and isinstance(raised.value.cause, KeyError)
    with pytest.raises(KeyError):
        ray.get(add.remote(counter.fail.remote()))
    assert ray.get(counter.add.remote()) == 1


def test_get_and_wait_with_timeouts(session):
    gate = Gate.remote()
    waiting, done = gate.wait.remote(), gate.ping.remote()
    with pytest.raises(exceptions.GetTimeoutError):
        ray.get(waiting, timeout=0.05)
    with pytest.raises(TimeoutError):
        ray.get(waiting, timeout=0)
    assert ray.wait([waiting, done], timeout=20) == ([done], [waiting])
    assert ray.wait([waiting], timeout=0) == ([], [waiting])
    with pytest.raises(ValueError):
        ray.wait([done, done])
    ray.get(gate.open.remote())
    assert ray.get(waiting) == "open"


def test_sync_actor_runs_calls_in_order(session):
    counter = Counter.remote(10)
    assert ray.get([counter.add.remote() for _ in range(50)]) == list(range(11, 61))
    assert ray.get(counter.pair.remote()) == [1, 2]
    assert ray.get(counter.__ray_call__.remote(lambda self, k: self.n + k, 5)) == 65
    assert ray.get(counter.__ray_ready__.remote()) is not False


def test_constructor_error_is_seen_by_the_first_call(session):
    @ray.remote(num_cpus=0)
    class Bad:
        def __init__(self):
            raise RuntimeError("not today")

        def f(self):
            pass

    with pytest.raises(exceptions.RayActorError, match="not today"):
        ray.get(Bad.remote().f.remote())


def test_threads_and_concurrency_groups(session):
    @ray.remote(num_cpus=0, concurrency_groups={"health": 1})
    class Trainer:
        def __init__(self):
            self.event = threading.Event()

        def train(self):
            return self.event.wait(90)

        @ray.method(concurrency_group="health")
        def stop(self):
            self.event.set()
            return "told"

    trainer = Trainer.remote()
    training = trainer.train.remote()
    assert ray.get(trainer.stop.remote()) == "told"
    assert ray.get(training) is True


def test_get_inside_an_async_actor(session):
    @ray.remote(num_cpus=0)
    class Caller:
        async def call(self, counter):
            return ray.get(counter.add.remote()) + await counter.add.remote()

    assert ray.get(Caller.remote().call.remote(Counter.remote())) == 3


def test_references_in_event_loops_and_futures(session):
    counter = Counter.remote()

    async def main():
        return await asyncio.gather(*[counter.add.remote() for _ in range(3)]), await asyncio.wrap_future(
            counter.add.remote().future()
        )

    assert asyncio.run(main()) == ([1, 2, 3], 4)
    assert counter.add.remote().future().result(90) == 5


def test_names(session):
    counter = Counter.options(name="a:b/c 1", get_if_exists=True).remote(5)
    again = Counter.options(name="a:b/c 1", get_if_exists=True).remote(9)
    assert counter == again and ray.get(again.add.remote()) == 6
    assert ray.get_actor("a:b/c 1") == counter
    with pytest.raises(ValueError):
        Counter.options(name="a:b/c 1").remote()
    with pytest.raises(ValueError):
        ray.get_actor("a:b/c 1", namespace="another")
    ray.kill(counter)
    with pytest.raises(exceptions.RayActorError):
        ray.get(counter.add.remote())

    def free():
        try:
            ray.get_actor("a:b/c 1")
        except ValueError:
            return True
        return False

    eventually(free, "the name is free")


def test_handle_that_was_used_ends_at_once(session):
    """Without a collection of circles, which may come much later."""
    counter = Counter.remote()
    pid = ray.get(counter.pid.remote())
    gc.collect()
    gc.disable()
    try:
        del counter
        eventually(lambda: not alive(pid), "the actor ends with its handle")
    finally:
        gc.enable()


def test_last_handle_ends_the_actor_after_its_calls(session):
    counter = Counter.remote()
    pid = ray.get(counter.pid.remote())
    held = [counter]
    calls = [counter.add.remote() for _ in range(20)]
    del counter
    assert ray.get(held[0].add.remote()) == 21
    held.clear()
    eventually(lambda: not alive(pid), "the actor has ended")
    assert ray.get(calls) == list(range(1, 21))


def test_handle_in_a_value_keeps_the_actor(session):
    @ray.remote(num_cpus=0)
    class Holder:
        def take(self, box):
            self.box = box

        def use(self):
            return ray.get(self.box["counter"].add.remote())

    holder, counter = Holder.remote(), Counter.remote()
    ray.get(holder.take.remote({"counter": counter}))
    del counter
    time.sleep(0.5)
    assert ray.get(holder.use.remote()) == 1


def test_killed_process_fails_its_calls(session):
    counter = Counter.remote()
    os.kill(ray.get(counter.pid.remote()), signal.SIGKILL)
    with pytest.raises(exceptions.RayActorError):
        ray.get([counter.add.remote() for _ in range(3)])


def test_task_waiting_in_get_gives_its_cpus_back(session):
    @ray.remote(num_cpus=4)
    def outer():
        return ray.get([add.remote(i) for i in range(3)])

    assert ray.get(outer.remote(), timeout=60) == [0, 1, 2]


def test_cancel(session, tmp_path):
    @ray.remote
    def sleep(path):
        open(path, "w").close()
        while True:
            time.sleep(0.1 if REAL else 600)  # Ray raises the interrupt when a sleep is over; ours ends the sleep

    running = sleep.remote(str(tmp_path / "begun"))
    eventually((tmp_path / "begun").exists, "the task runs")
    ray.cancel(running)
    with pytest.raises((exceptions.TaskCancelledError, exceptions.RayTaskError)):
        ray.get(running, timeout=90)
    done = add.remote(1)
    assert ray.get(done) == 1
    ray.cancel(done)
    gate = Gate.remote()
    waiting = gate.wait.remote()
    ray.get(gate.ping.remote())
    ray.cancel(waiting)
    with pytest.raises((exceptions.TaskCancelledError, exceptions.RayTaskError)):
        ray.get(waiting, timeout=90)


def test_environment_and_devices(session):
    whole = {**os.environ, "TROUPE_RAY": "1", "TROUPE_NAMESPACE": "n"}  # programs pass all that they have

    @ray.remote(num_gpus=1, runtime_env={"env_vars": {**whole, "RANK": "3", "OWN": "x"}})
    class Worker:
        def look(self):
            return os.environ["RANK"], os.environ["OWN"], os.environ["CUDA_VISIBLE_DEVICES"], ray.get_gpu_ids()

    worker = Worker.remote()
    rank, own, visible, ids = ray.get(worker.look.remote())
    assert (rank, own) == ("3", "x") and [str(i) for i in ids] == [visible]
    ray.kill(worker)


def test_decorated_classes_are_introspected(session):
    assert type(Counter).__name__ == "ActorClass(Counter)"
    assert Counter.__ray_metadata__.modified_class.__name__ == "Counter"
    assert {"add", "fail", "remote", "options"} <= set(dir(Counter))
    with pytest.raises(TypeError):
        Counter()
    with pytest.raises(TypeError):
        add(1)
    with pytest.raises(TypeError):

        class Derived(Counter):
            pass


def test_options_are_checked(session):
    for wrong in (
        {"num_cpus": -1},
        {"resources": {"CPU": 1}},
        {"resources": {"GPU": 1}},
        {"nothing": 1},
        {"lifetime": "long"},
    ):
        with pytest.raises(ValueError):
            Counter.options(**wrong)
    with pytest.raises(ValueError):
        Counter.options(get_if_exists=True).remote()
    with pytest.raises(TypeError):
        add.remote(1, 2, 3, 4)


def test_runtime_context(session):
    @ray.remote(num_cpus=0)
    class Look:
        def look(self):
            context = ray.get_runtime_context()
            return context.get_actor_id(), context.get_node_id(), context.get_job_id(), context.worker.mode

    look = Look.remote()
    actor_id, node_id, job_id, mode = ray.get(look.look.remote())
    context = ray.get_runtime_context()
    assert actor_id == look._actor_id.hex() and mode == ray.WORKER_MODE
    assert (node_id, job_id) == (context.get_node_id(), context.get_job_id())


def test_sessions_one_after_another():
    ray.shutdown()
    with pytest.raises(ConnectionError):
        ray.init(address="auto")
    for i in range(2):
        ray.init(address="local", num_cpus=1, include_dashboard=False)
        with pytest.raises(RuntimeError):
            ray.init()
        ray.init(ignore_reinit_error=True)
        assert ray.get(add.remote(i)) == i
        ray.shutdown()
        assert not ray.is_initialized()


def test_session_that_begins_inside_an_event_loop():
    async def main():
        return ray.get(Counter.remote().add.remote())

    os.environ["RAY_ADDRESS"] = "local"
    try:
        assert asyncio.run(main()) == 1
    finally:
        del os.environ["RAY_ADDRESS"]
        ray.shutdown()


PLAIN_VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    2**64,
    2**200,
    0.0,
    -0.0,
    1.5,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "text",
    "Größe",
    "\ud800",
    "\0",
    "x" * 5000,
    b"",
    b"\xff\0",
    b"y" * 5000,
    b"z" * 100_000,
]


@ray.remote(num_cpus=0)
class Echo:
    def __init__(self):
        self.tries = 0

    def echo(self, *args):
        return args[0] if len(args) == 1 else list(args)

    def second_time(self, value):
        self.tries += 1
        if self.tries % 2:
            raise OSError("once more")
        return value


@ray.remote(num_cpus=0)
class AsyncEcho:
    async def echo(self, value):
        return value


@ray.remote(num_cpus=0)
def echo(value):
    return value


def same(a, b):
    return type(a) is type(b) and repr(a) == repr(b)


def test_plain_values_arrive_as_they_were(session):
    """Values of plain types go without a pickle where that is possible, and arrive unchanged whichever way they go."""
    actor, later, threaded = Echo.remote(), AsyncEcho.remote(), Echo.options(max_concurrency=2).remote()
    for value in PLAIN_VALUES:
        shown = repr(value)[:40]
        assert same(ray.get(actor.echo.remote(value)), value), shown
        assert same(ray.get(actor.echo.options(name="named").remote(value)), value), shown
        assert same(ray.get(actor.echo.remote(value, value)), [value, value]), shown
        assert same(ray.get(later.echo.remote(value)), value), shown
        assert same(ray.get(threaded.echo.remote(value)), value), shown
        assert same(ray.get(echo.remote(value)), value), shown
        assert same(ray.get(ray.put(value)), value), shown
        assert same(ray.get(actor.echo.remote(echo.remote(value))), value), shown
        assert same(ray.get(echo.remote(actor.echo.remote(value))), value), shown
        assert same(
            ray.get(actor.second_time.options(max_task_retries=1, retry_exceptions=True).remote(value)), value
        ), shown
        assert same(ray.get(ray.get(echo.remote([actor.echo.remote(value)]))[0]), value), shown


class Text(str):
    pass


class Number(int):
    pass


def test_subclasses_of_plain_types_keep_their_type(session):
    actor = Echo.remote()
    for value in (Text("a"), Number(3)):
        found = ray.get(actor.echo.remote(value))
        assert type(found) is type(value) and found == value


def test_state_of_an_actor_is_a_number(session):
    actor = Echo.remote()
    ray.get(actor.echo.remote(1))
    assert actor._get_local_state() == 2  # alive
    ray.kill(actor)
    eventually(lambda: actor._get_local_state() == 4, "it is dead")


def test_call_that_cannot_be_sent_holds_up_no_other(session):
    """The calls of threaded and async actors are begun in the order of their numbers; one that was not sent leaves no
    gap."""
    for actor in (AsyncEcho.remote(), Echo.options(max_concurrency=2).remote(), Echo.remote()):
        assert ray.get(actor.echo.remote(1)) == 1
        with contextlib.suppress(Exception):  # Ray sends it
            ray.get(actor.echo.options(name="\ud800").remote(2), timeout=90)
        assert ray.get(actor.echo.remote(3), timeout=90) == 3
