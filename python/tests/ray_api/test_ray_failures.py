"""Restarts of actors, retries of calls and tasks, cancellation, names after death, exit_actor. Also passes against
Ray."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ray_api.raytest import NAME, REAL, eventually, module, ray


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self):
        self.value = 0

    def add(self):
        self.value += 1
        return self.value

    def value(self):  # the attribute has the same name
        return self.value


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, started=None):
        self.calls = 0
        if started is not None:
            ray.get(started.add.remote())

    def call(self):
        self.calls += 1
        return self.calls

    def pid(self):
        return os.getpid()

    def restarted(self):
        return ray.get_runtime_context().was_current_actor_reconstructed

    def die_until(self, counter, times):
        count = ray.get(counter.add.remote())
        if count <= times:
            os._exit(1)
        return count

    def raise_until(self, counter, times):
        count = ray.get(counter.add.remote())
        if count <= times:
            raise KeyError(count)
        return count


def dead(actor):
    try:
        ray.get(actor.pid.remote(), timeout=90)
    except ray.exceptions.RayActorError as err:
        return not isinstance(err, ray.exceptions.ActorUnavailableError)
    return False


def test_a_dead_worker_is_not_given_to_the_retry(session, tmp_path):
    @ray.remote(max_retries=1)
    def dies_once(path):
        if not os.path.exists(path):
            open(path, "w").close()
            os._exit(1)
        return path

    for round in range(15):
        paths = [str(tmp_path / f"{round}-{i}") for i in range(4)]
        assert ray.get([dies_once.remote(path) for path in paths]) == paths


def test_attributes_do_not_hide_methods(session):
    counter = Counter.remote()
    ray.get(counter.add.remote())
    assert ray.get(counter.value.remote()) == 1


def test_an_actor_is_restarted_as_often_as_it_may(session):
    started = Counter.remote()
    actor = Worker.options(max_restarts=1, max_task_retries=-1).remote(started)
    assert ray.get([actor.call.remote() for _ in range(3)]) == [1, 2, 3]
    assert not ray.get(actor.restarted.remote())
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    assert ray.get(actor.call.remote(), timeout=90) == 1
    assert ray.get(actor.restarted.remote())
    assert ray.get(started.value.remote()) == 2
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.ActorDiedError, match="worker process has died"):
        ray.get(actor.call.remote(), timeout=90)


def test_calls_are_retried_after_a_restart(session):
    counter = Counter.remote()
    actor = Worker.options(max_restarts=-1, max_task_retries=2).remote()
    assert ray.get(actor.die_until.remote(counter, 2), timeout=90) == 3
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.die_until.options(max_task_retries=0).remote(counter, 4), timeout=90)


def test_kill_with_a_restart(session):
    started = Counter.remote()
    actor = Worker.options(max_restarts=1, max_task_retries=-1).remote(started)
    before = ray.get(actor.pid.remote())
    ray.kill(actor, no_restart=False)
    eventually(lambda: ray.get(actor.pid.remote(), timeout=90) != before, "the actor is restarted")
    ray.kill(actor)
    eventually(lambda: dead(actor), "the actor is dead")


def test_exceptions_are_retried(session):
    counter = Counter.remote()
    actor = Worker.options(max_task_retries=2).remote()
    assert ray.get(actor.raise_until.options(retry_exceptions=[KeyError]).remote(counter, 2)) == 3
    with pytest.raises(KeyError):
        ray.get(actor.raise_until.remote(counter, 5))
    with pytest.raises(KeyError):
        ray.get(actor.raise_until.options(retry_exceptions=[ValueError]).remote(counter, 6))
    assert ray.get(counter.value.remote()) == 5

    @ray.remote(max_retries=2, retry_exceptions=True)
    def task(counter, times):
        count = ray.get(counter.add.remote())
        if count <= times:
            raise ValueError(count)
        return count

    assert ray.get(task.remote(counter, 7)) == 8
    with pytest.raises(ValueError):
        ray.get(task.remote(counter, 100))


def test_the_name_of_a_crashed_actor_is_free_without_handles(session):
    actor = Worker.options(name="crashed").remote()
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    eventually(functools.partial(dead, actor), "the actor is dead")
    with pytest.raises(ValueError):
        Worker.options(name="crashed").remote()
    del actor

    def create():
        try:
            return Worker.options(name="crashed").remote()
        except ValueError:
            return None

    found = []
    eventually(lambda: found.append(create()) or found[-1] is not None, "the name is free")
    ray.kill(found[-1])


def test_exit_actor_ends_it_although_caught(session):
    @ray.remote(num_cpus=0, max_restarts=-1)
    class Exits:
        def leave(self):
            try:
                ray.actor.exit_actor()
            except SystemExit:
                pass

        def pid(self):
            return os.getpid()

    @ray.remote(num_cpus=0, max_restarts=-1)
    class ExitsAsync:
        async def leave(self):
            try:
                ray.actor.exit_actor()
            except ray.exceptions.AsyncioActorExit:
                pass

        async def pid(self):
            return os.getpid()

    for cls in (Exits, ExitsAsync):
        actor = cls.remote()
        ray.get(actor.pid.remote())
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.leave.remote(), timeout=90)
        with pytest.raises(ray.exceptions.RayActorError, match="exit_actor|requested to exit"):
            ray.get(actor.pid.remote(), timeout=90)


def test_cancel_reaches_what_a_task_called(session):
    @ray.remote(num_cpus=0)
    class Sleeper:
        def __init__(self):
            self.cancelled = 0

        async def sleep(self):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

        async def count(self):
            return self.cancelled

    sleeper = Sleeper.remote()
    counter = Counter.remote()

    @ray.remote(num_cpus=0)
    def outer(sleeper, counter):
        ref = sleeper.sleep.remote()
        ray.get(counter.add.remote())
        return ray.get(ref)

    ref = outer.remote(sleeper, counter)
    eventually(lambda: ray.get(counter.value.remote()) == 1, "the task has called")
    time.sleep(0.2)  # the call of the sleeper has begun
    ray.cancel(ref)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(ref, timeout=90)
    eventually(lambda: ray.get(sleeper.count.remote()) == 1, "the call of the task was cancelled")


def test_a_borrower_cancels(session):
    @ray.remote(num_cpus=0)
    class Sleeper:
        async def sleep(self):
            await asyncio.sleep(60)

    @ray.remote(num_cpus=0)
    def cancel(refs):
        ray.cancel(refs[0])

    sleeper = Sleeper.remote()
    ref = sleeper.sleep.remote()
    ray.get(cancel.remote([ref]))
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(ref, timeout=90)


@pytest.mark.skipif(REAL, reason="it looks into the process that owns the object")
def test_a_dead_borrower_holds_nothing(session, monkeypatch):
    from troupe.ray import _objects, _state

    @ray.remote(num_cpus=0)
    class Holder:
        def hold(self, refs):
            self.refs = refs

    monkeypatch.setattr(_objects, "_BORROWER_CHECK", 0.2)
    store = _state.require().store
    dying, living = Holder.remote(), Holder.remote()
    of_both, of_dying = ray.put("both"), ray.put("dying")
    ray.get([dying.hold.remote([of_both, of_dying]), living.hold.remote([of_both])])
    both, alone = of_both.hex(), of_dying.hex()
    del of_both, of_dying
    eventually(
        lambda: len(store.borrowed.get(both, ((), ()))[1]) == 2 and alone in store.borrowed, "both have borrowed"
    )
    ray.kill(dying)
    eventually(lambda: alone not in store.borrowed, "the object that the dead one had is free")
    time.sleep(0.5)  # two looks at the living one
    assert len(store.borrowed[both][1]) == 1
    ray.get(living.hold.remote([]))
    eventually(lambda: both not in store.borrowed, "the living one has given its object back")


def test_a_sync_method_sees_that_it_was_cancelled(session):
    @ray.remote(num_cpus=0)
    class Loop:
        def run(self, counter):
            ray.get(counter.add.remote())
            deadline = time.monotonic() + 30
            while not ray.get_runtime_context().is_canceled() and time.monotonic() < deadline:
                time.sleep(0.01)
            ray.get(counter.add.remote())

    counter = Counter.remote()
    loop = Loop.remote()
    ref = loop.run.remote(counter)
    eventually(lambda: ray.get(counter.value.remote()) == 1, "the method runs")
    ray.cancel(ref)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(ref, timeout=90)
    assert ray.get(counter.value.remote()) == 2


def test_a_call_behind_a_busy_event_loop_is_cancelled(session, tmp_path):
    @ray.remote(num_cpus=0)
    class Blocking:
        async def block(self, path):
            while not os.path.exists(path):
                time.sleep(0.01)  # the event loop runs nothing else

        async def ping(self):
            return "pong"

    actor = Blocking.remote()
    assert ray.get(actor.ping.remote()) == "pong"
    for i in range(4):
        gate = tmp_path / str(i)
        blocked, queued = actor.block.remote(str(gate)), actor.ping.remote()
        ray.cancel(queued)
        with pytest.raises(ray.exceptions.TaskCancelledError):
            ray.get(queued, timeout=60)
        gate.touch()
        ray.get(blocked)
    assert ray.get(actor.ping.remote()) == "pong"


def test_the_error_of_a_lost_owner_keeps_its_type_as_an_argument(session):
    @ray.remote(num_cpus=0)
    class Owner:
        def put(self):
            return ray.put(np.zeros(1 << 18)), os.getpid()

    @ray.remote(num_cpus=0)
    class Reader:
        def read(self, array):
            return array.sum()

    @ray.remote(num_cpus=0)
    class AsyncReader:
        async def read(self, array):
            return array.sum()

    owner, readers = Owner.remote(), [Reader.remote(), AsyncReader.remote()]
    ref, pid = ray.get(owner.put.remote())
    ray.kill(owner)
    eventually(lambda: not os.path.exists(f"/proc/{pid}"), "the process of the owner has ended")
    for reader in readers:
        with pytest.raises(ray.exceptions.OwnerDiedError):
            ray.get(reader.read.remote(ref), timeout=60)


_HEAD_DIES = """
import os, signal, troupe.ray as ray
from troupe.ray import _control, cluster_utils
_control._PATIENCE = 0.5
cluster = cluster_utils.Cluster()
head = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)
for pid in reversed(cluster_utils._tree(head.process.pid)):
    os.kill(pid, signal.SIGKILL)
for ask in (ray.nodes, lambda: ray.get_actor("nobody"), ray.cluster_resources):
    try:
        ask()
    except ray.exceptions.RayError as err:
        print("RayError", flush=True)
"""


@pytest.mark.skipif(REAL, reason="Ray's driver ends itself when its head is gone")
def test_the_error_of_a_head_that_is_gone_is_one_of_ray(tmp_path):
    env = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    program = subprocess.Popen([sys.executable, "-c", _HEAD_DIES], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert [program.stdout.readline() for _ in range(3)] == ["RayError\n"] * 3
    finally:
        program.kill()
        program.wait()


def test_threads_of_a_worker_are_its_cpus(session):
    @ray.remote(num_cpus=2)
    def threads():
        return os.environ.get("OMP_NUM_THREADS")

    if "OMP_NUM_THREADS" not in os.environ:
        assert ray.get(threads.remote()) == "2"


def test_shutdown_method(session, tmp_path):
    @ray.remote(num_cpus=0)
    class Ends:
        def __init__(self, path):
            self.path = path

        def ready(self):
            return True

        def __ray_shutdown__(self):
            with open(self.path, "w") as f:
                f.write("ended")

    for how in ("terminate", "scope"):
        path = tmp_path / how
        actor = Ends.remote(str(path))
        ray.get(actor.ready.remote())
        if how == "terminate":
            actor.__ray_terminate__.remote()
        del actor
        eventually(lambda path=path: path.exists() and path.read_text() == "ended", how)


def test_a_class_that_makes_others_of_its_kind(session):
    @ray.remote(num_cpus=0)
    class Node:
        def child(self):
            self.made = Node.remote()
            return self.made

        def name(self):
            return "node"

    node = Node.remote()
    child = ray.get(node.child.remote())
    assert ray.get(child.name.remote()) == "node"


def test_what_a_task_made_outlives_its_worker_s_work(session):
    @ray.remote(num_cpus=0, num_gpus=1)
    def make():
        actor = Worker.remote()
        return [ray.put("value"), actor, os.getpid()]

    @ray.remote(num_cpus=0, num_gpus=1)
    def pid():
        return os.getpid()

    ref, actor, made_by = ray.get(make.remote())
    assert ray.get(pid.remote()) != made_by  # a task with devices has a process of its own
    deadline = time.monotonic() + 3  # workers without work end after one second
    while time.monotonic() < deadline:
        assert ray.get(actor.call.remote()) > 0
        time.sleep(0.2)
    assert ray.get(ref) == "value"


def test_any_exception_of_a_task_is_its_error(session):
    class Odd(BaseException):
        pass

    @ray.remote(num_cpus=0)
    def fail():
        raise Odd("odd")

    with pytest.raises(ray.exceptions.RayTaskError, match="odd"):
        ray.get(fail.remote())


def test_wrong_options(session):
    def function():
        pass

    for options, kind in (
        ({"max_retries": 0.5}, TypeError),
        ({"max_retries": -2}, ValueError),
        ({"num_returns": 0.5}, TypeError),
        ({"num_returns": -1}, ValueError),
        ({"num_gpus": 1e-7}, ValueError),
        ({"resources": {"x": 1e-7}}, ValueError),
        ({"max_calls": -1}, ValueError),
        ({"retry_exceptions": 3}, TypeError),
    ):
        with pytest.raises(kind):
            ray.remote(**options)(function)


def test_a_second_driver_on_a_session_of_this_machine(session):
    program = (
        f"import {NAME} as ray\n"
        f"ray.init(address='{session.get_runtime_context().gcs_address}', namespace='second')\n"
        "@ray.remote(num_cpus=0)\n"
        "class A:\n"
        "    def ping(self): return 'pong'\n"
        "a = A.options(name='second', lifetime='detached').remote()\n"
        "print(ray.get(a.ping.remote()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "pong" in done.stdout, done.stderr
    actor = ray.get_actor("second", namespace="second")
    assert ray.get(actor.ping.remote()) == "pong"
    ray.kill(actor)


@ray.remote(num_cpus=0)
def failing(text):
    raise ValueError(text)


@ray.remote(num_cpus=0)
class Failing:
    def fail(self, text):
        raise ValueError(text)

    def ping(self):
        return "pong"


def test_errors_that_nobody_reads_are_reported(session, monkeypatch):
    reported = []
    monkeypatch.setattr(
        module("_private.worker"), "_unhandled_error_handler", lambda error: reported.append(str(error))
    )

    def count(text):
        return sum(text in r for r in reported)

    actor = Failing.remote()
    actor.fail.remote("dropped call")
    failing.remote("dropped task")
    eventually(lambda: count("dropped call") == 1 and count("dropped task") == 1, "both errors are reported")
    ref = actor.fail.remote("read")
    with pytest.raises(ValueError, match="read"):
        ray.get(ref)
    argument = failing.remote("argument")
    with pytest.raises(ValueError, match="argument"):
        ray.get(failing.remote(argument))
    killed = Failing.remote()
    ray.get(killed.ping.remote())
    ray.kill(killed)
    killed.ping.remote()
    del ref, argument
    actor.fail.remote("last")
    eventually(lambda: count("last") == 1, "the last error is reported")
    assert len(reported) == 3, reported


@pytest.mark.skipif(REAL, reason="Ray may report the others of a failed get")
def test_one_error_of_a_get_stands_for_all(session, monkeypatch):
    reported = []
    monkeypatch.setattr(
        module("_private.worker"), "_unhandled_error_handler", lambda error: reported.append(str(error))
    )
    actors = [Failing.remote() for _ in range(3)]
    with pytest.raises(ValueError):
        ray.get([a.fail.remote("together") for a in actors])
    ray.get([a.ping.remote() for a in actors])
    actors[0].fail.remote("last")
    eventually(lambda: any("last" in r for r in reported), "the last error is reported")
    assert len(reported) == 1, reported


def test_wrong_arguments_fail_before_the_call(session):
    @ray.remote(num_cpus=0)
    class Callee:
        def method(self, a, /, b=1, *, c, **rest):
            return a, b, c, rest

        def any(self, *args):
            return args

    @ray.remote(num_cpus=0)
    def calls(method, any, handle):
        raised = []
        for target in (method, handle.method):
            assert ray.get(target.remote(1, c=2, d=3)) == (1, 1, 2, {"d": 3})
            for args, kwargs in (((), {"c": 1}), ((1, 2, 3), {"c": 1}), ((1,), {})):
                try:
                    target.remote(*args, **kwargs)
                except TypeError as error:
                    raised.append(str(error))
        assert tuple(ray.get(any.remote(1, 2, 3))) == (1, 2, 3)
        return len(raised)

    actor = Callee.remote()
    assert ray.get(calls.remote(actor.method, actor.any, actor)) == 6
