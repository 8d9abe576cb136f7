"""Large objects: put copies, all receivers share one copy, which ends with the last reference or with its owner."""

import contextvars
import gc
import os
import threading
import time

import numpy
import pytest

from ray_api.raytest import REAL, eventually, module, ray


@ray.remote(num_cpus=0)
class Reader:
    def first(self, array):
        return float(array[0])

    def first_inside(self, box):
        return float(ray.get(box["ref"])[0])

    def keep(self, box):
        self.box = box

    def kept(self):
        return float(ray.get(self.box["ref"])[0])

    def give(self):
        return {"ref": ray.put(numpy.full(1 << 18, 7.0))}

    def made(self):
        return numpy.full(1 << 18, 3.0)

    def pid(self):
        return os.getpid()


def kill(actor):
    """Kills an actor and waits for the end of its process."""
    pid = ray.get(actor.pid.remote())
    ray.kill(actor)
    eventually(lambda: not os.path.exists(f"/proc/{pid}"), "the process has ended")
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.pid.remote(), timeout=90)


@ray.remote(num_cpus=0)
class AsyncReader:
    async def first(self, array):
        return float(array[0])

    async def give(self):
        return {"ref": ray.put(numpy.full(1 << 18, 8.0))}


@ray.remote(num_cpus=0)
def first(array):
    return float(array[0])


@pytest.mark.parametrize("length", [8, 2000, 1 << 18])
def test_put_copies(session, length):
    array = numpy.ones(length)
    ref = ray.put(array)
    array[0] = 5
    assert ray.get(ref)[0] == 1.0


def test_large_objects_in_all_places(session):
    ref = ray.put(numpy.full(1 << 18, 2.0))
    reader, other = Reader.remote(), AsyncReader.remote()
    assert (
        ray.get(
            [
                reader.first.remote(ref),
                other.first.remote(ref),
                first.remote(ref),
                reader.first_inside.remote({"ref": ref}),
            ]
        )
        == [2.0] * 4
    )
    given = [ray.get(a.give.remote())["ref"] for a in (reader, other)]
    assert [r[0] for r in ray.get(given)] == [7.0, 8.0]
    assert ray.get(
        [other.first.remote(given[0]), reader.first.remote(given[1]), first.remote(reader.made.remote())]
    ) == [7.0, 8.0, 3.0]
    with pytest.raises(ValueError):
        ray.get(ref)[0] = 1.0  # read-only


def test_result_outlives_its_actor(session):
    reader = Reader.remote()
    ref = reader.made.remote()
    ray.wait([ref])
    other, third = Reader.remote(), Reader.remote()
    ray.get([other.keep.remote({"ref": ref}), third.keep.remote({"ref": ref})])
    assert ray.get(third.kept.remote()) == 3.0
    kill(reader)
    assert ray.get(ref)[0] == 3.0
    assert (
        ray.get([first.remote(ref), other.first.remote(ref), other.kept.remote(), third.kept.remote()], timeout=60)
        == [3.0] * 4
    )
    del ref
    assert ray.get([other.kept.remote(), third.kept.remote()], timeout=60) == [3.0] * 2


@pytest.mark.skipif(REAL, reason="counts the references of Troupe")
def test_results_are_freed_at_once(session):
    """Without a collection of circles, which may come much later."""
    from troupe import _reference

    reader = Reader.remote()
    gc.collect()
    eventually(lambda: _reference.counts()["owned"] == 0, "the objects of earlier tests are freed")
    gc.disable()
    try:
        ref = reader.made.remote()
        assert ray.get(ref)[0] == 3.0
        assert ray.get([first.remote(ref), first.remote(reader.made.remote())]) == [3.0, 3.0]
        assert ray.wait([ref, reader.made.remote()], num_returns=2)[1] == []
        assert _reference.counts()["owned"] > 0
        del ref
        eventually(lambda: _reference.counts()["owned"] == 0, "the results are freed", seconds=5.0)
    finally:
        gc.enable()


@pytest.mark.skipif(REAL, reason="counts the references of Troupe")
def test_result_of_a_killed_actor_is_freed_at_once(session):
    """The driver, which owns the result, has it when its actor is dead, and gives it to another actor."""
    from troupe import _reference

    reader, other = Reader.remote(), Reader.remote()
    ray.get([reader.pid.remote(), other.pid.remote()])
    gc.collect()
    eventually(lambda: _reference.counts()["owned"] == 0, "the objects of earlier tests are freed")
    ref = reader.made.remote()
    assert ray.get(ref)[0] == 3.0
    kill(reader)
    assert ray.get(other.first.remote(ref), timeout=60) == 3.0
    assert _reference.counts()["owned"] > 0
    del ref
    gc.collect()
    eventually(lambda: _reference.counts()["owned"] == 0, "the result is freed", seconds=5.0)


def test_object_ends_with_its_owner(session):
    reader = Reader.remote()
    ref = ray.get(reader.give.remote())["ref"]
    kill(reader)

    def lost():
        try:
            ray.get(ref, timeout=90)
        except ray.exceptions.OwnerDiedError:
            return True
        return False  # Ray has a copy for a moment

    eventually(lost, "the object is lost")


@pytest.mark.skipif(REAL, reason="counts the references of Troupe")
def test_object_is_freed_after_the_last_drop(session):
    from troupe import _reference

    gc.collect()
    eventually(lambda: _reference.counts()["owned"] == 0, "the objects of earlier tests are freed")
    reader = Reader.remote()
    ref = ray.put(numpy.ones(1 << 18))
    ray.get(reader.keep.remote({"ref": ref}))
    del ref
    time.sleep(0.5)  # longer than an object without a holder lasts
    assert ray.get(reader.kept.remote()) == 1.0
    ray.get(reader.keep.remote(None))
    eventually(lambda: _reference.counts()["owned"] == 0, "the object is freed", seconds=5.0)


@pytest.mark.skipif(REAL, reason="counts the references of Troupe")
def test_argument_is_freed_as_soon_as_its_calls_are_over(session):
    """No process but the owner holds it: its memory is there for the next put."""
    from troupe import _reference

    readers = [Reader.remote(), AsyncReader.remote()]
    gc.collect()
    eventually(lambda: _reference.counts()["owned"] == 0, "the objects of earlier tests are freed")
    ref = ray.put(numpy.ones(1 << 18))
    assert ray.get([*(r.first.remote(ref) for r in readers), first.remote(ref)]) == [1.0] * 3
    assert _reference.counts()["owned"] == 1
    del ref
    assert _reference.counts()["owned"] == 0


@pytest.mark.skipif(REAL, reason="looks into Troupe's context of a call")
def test_context_that_outlives_its_call_holds_no_argument(session):
    """A thread or task that a method starts may keep the method's context for ever."""

    @ray.remote(num_cpus=0)
    class Keeper:
        def keep(self, array, other):
            self.context = contextvars.copy_context()
            return float(array[0] + other[0])

        def held(self):
            [task] = [v for v in self.context.values() if hasattr(v, "frame")]
            return task.name, len(task.frame), len(task.deps), len(task.kept)

    keeper = Keeper.remote()
    assert ray.get(keeper.keep.remote(numpy.ones(1 << 18), ray.put(numpy.ones(1 << 18)))) == 2.0
    assert ray.get(keeper.held.remote()) == ("Keeper.keep", 0, 0, 0)


def test_argument_that_is_also_kept(session):
    """Several calls of an actor use an object at the same time; the reference that one of them keeps outlives the
    others."""
    reader = Reader.options(max_concurrency=4).remote()
    ref = ray.put(numpy.full(1 << 18, 5.0))
    calls = [reader.first.remote(ref) for _ in range(20)]
    calls.append(reader.keep.remote({"ref": ref}))
    calls += [reader.first.remote(ref) for _ in range(20)]
    del ref
    assert ray.get(calls, timeout=60) == [5.0] * 20 + [None] + [5.0] * 20
    del calls
    time.sleep(0.5)  # longer than an object without a holder lasts
    assert ray.get(reader.kept.remote(), timeout=60) == 5.0


def test_argument_whose_maker_has_died(session):
    """A second receiver does not wait for the process that had the object when the first one read it."""
    maker, one, two = Reader.remote(), Reader.remote(), Reader.remote()
    ref = maker.made.remote()
    assert ray.get(one.first.remote(ref), timeout=60) == 3.0
    assert ray.get([ref, two.pid.remote()], timeout=60)[0][0] == 3.0
    kill(maker)
    began = time.monotonic()
    assert ray.get(two.first.remote(ref), timeout=60) == 3.0
    assert time.monotonic() - began < 20


def test_argument_of_the_actor_that_owns_it(session):
    owner, other = Reader.remote(), Reader.remote()
    ref = ray.get(owner.give.remote())["ref"]
    assert ray.get([owner.first.remote(ref), other.first.remote(ref), first.remote(ref)], timeout=60) == [7.0] * 3


@ray.remote(num_cpus=0)
def later(value, seconds):
    time.sleep(seconds)
    return value


@ray.remote(num_cpus=0)
def total(array, _=None):
    return float(array.sum())


@ray.remote(num_cpus=0, max_restarts=1, max_task_retries=1)
class Fragile:
    def total(self, array, folder):
        try:
            os.mkdir(folder)
        except FileExistsError:
            return float(array.sum())
        os._exit(1)


def test_arguments_are_those_of_the_moment_of_the_call(session, tmp_path):
    """Also of calls that wait: for a worker, for a reference, for their actor, or for a second attempt."""
    array = numpy.ones(1 << 12)
    reader = Reader.remote()
    fragile = Fragile.remote()
    waiting = later.remote(None, 0.3)
    refs = [
        total.remote(array),
        total.remote(array, waiting),
        reader.first.remote(array),
        fragile.total.remote(array, str(tmp_path / "tried")),
    ]
    array[:] = 0
    assert ray.get(refs) == [4096.0, 4096.0, 1.0, 4096.0]


LOCK = threading.Lock()


class Holder:
    def __init__(self):
        self.inner = {"locks": [1, LOCK]}


def test_what_cannot_be_pickled_is_named(session):
    """The error of a function, a class, an argument or a value says which variable cannot be pickled."""

    @ray.remote
    def closes_over():
        return LOCK

    @ray.remote
    class Actor:
        def __init__(self):
            self.lock = LOCK

        def take(self, value):
            return value

    @ray.remote
    class Taker:
        def __init__(self, value=None):
            pass

        def take(self, value):
            return value

    @ray.remote
    def take(value):
        return value

    taker = Taker.remote()
    for use, what in (
        (lambda: closes_over.remote(), "Could not serialize the function .*closes_over.*cannot pickle .*LOCK"),
        (lambda: Actor.remote(), "Could not serialize the actor class .*Actor.*cannot pickle .*LOCK"),
        (
            lambda: take.remote(LOCK),
            "Could not serialize the argument .*lock.* for a task or actor .*take.*cannot pickle",
        ),
        (
            lambda: taker.take.remote(LOCK),
            "Could not serialize the argument .*lock.* for a task or actor .*Taker.take.*cannot pickle",
        ),
        (lambda: ray.put(LOCK), "Could not serialize the put value .*lock"),
    ):
        with pytest.raises(TypeError, match=f"(?s){what}.*non-serializable"):
            use()
    assert ray.get(taker.take.remote(1)) == 1, "the calls were not sent"
    if not REAL:  # Ray names the whole argument
        with pytest.raises(TypeError, match="path=inner -> 'locks' -> \\[1\\]"):
            taker.take.remote(Holder())
        with pytest.raises(TypeError, match="Could not serialize the argument"):
            Taker.remote(Holder())


def test_inspect_serializability(session, capsys):
    def function():
        return LOCK

    serializable, failures = module("util").inspect_serializability(function, name="function")
    (failure,) = failures
    assert not serializable and failure.obj is LOCK and failure.path == ("function", "LOCK")
    assert "was found to be non-serializable" in capsys.readouterr().out
    assert module("util").inspect_serializability([1, 2]) == (True, set())
