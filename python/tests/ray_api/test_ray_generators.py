"""Generators of tasks and actors: streams of references."""
# ruff: noqa: UP028  (Ray cannot run a `yield from` over an iterator without send)

import asyncio
import gc
import os
import threading
import time

import numpy as np
import pytest

from ray_api.raytest import REAL, eventually, module, ray

exceptions = module("exceptions")


@ray.remote
def count(n, path=None):
    for i in range(n):
        if path:
            note(path)
        yield i


def note(path):
    with open(path, "a") as f:
        f.write(".")


def noted(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def endless(path):
    """Yields until it is closed, and tells so."""
    try:
        i = 0
        while True:
            note(path)
            time.sleep(0.01)
            yield i
            i += 1
    finally:
        open(path + ".closed", "w").close()


@ray.remote
class Actor:
    def count(self, n, path=None):
        for i in range(n):
            if path:
                note(path)
            yield i

    def endless(self, path):
        yield from endless(path)

    def fail_after(self, n):
        for i in range(n):
            yield i
        raise ValueError("in the middle")

    def exit_after(self, n):
        for i in range(n):
            yield i
        os._exit(1)

    def arrays(self, n):
        array = np.zeros(300_000)
        for i in range(n):
            array[:] = i
            yield array

    def parts(self):
        yield {"ref": ray.put("inside")}
        yield [1, "two", None]

    def plain(self):
        return "plain"

    def pid(self):
        return os.getpid()

    @ray.method(num_returns=2)
    def pair(self):
        yield 1
        yield 2

    @ray.method(_generator_backpressure_num_objects=1)
    def one_by_one(self, n, path):
        for i in range(n):
            note(path)
            yield i

    def consume(self, other, n):
        return [ray.get(r) for r in other.count.remote(n)]

    def hold(self, other, path):
        self.held = other.endless.remote(path)
        return ray.get(next(self.held))


@ray.remote
class Async:
    async def count(self, n, pause=0.0):
        for i in range(n):
            await asyncio.sleep(pause)
            yield i

    def plain_generator(self, n):
        for i in range(n):
            yield i

    async def endless(self, path):
        try:
            i = 0
            while True:
                note(path)
                await asyncio.sleep(0.01)
                yield i
                i += 1
        finally:
            open(path + ".closed", "w").close()

    async def count_noted(self, n, path):
        for i in range(n):
            note(path)
            yield i

    async def fail_after(self, n):
        for i in range(n):
            yield i
        raise ValueError("in the middle")

    async def consume(self, other, n):
        return [await r async for r in other.count.remote(n)]

    async def plain(self):
        return "plain"


@pytest.fixture(scope="module")
def actor(session):
    return Actor.remote()


@pytest.fixture(scope="module")
def async_actor(session):
    return Async.remote()


def outcomes(generator):
    """The values of a generator, and in the place of an error its type and the last line of its text."""
    found = []
    for ref in generator:
        try:
            found.append(ray.get(ref))
        except Exception as err:
            found.append((type(err), str(err).strip().splitlines()[-1]))
    return found


def next_within(generator, seconds=60):
    ready, _ = ray.wait([generator], timeout=seconds)
    assert ready, "no reference in time"
    return next(generator)


def test_a_function_that_yields_gives_a_generator(session, actor, async_actor):
    for generator in (
        count.remote(3),
        count.options(num_returns="streaming").remote(3),
        actor.count.remote(3),
        async_actor.count.remote(3),
        async_actor.plain_generator.remote(3),
        Actor.options(max_concurrency=2).remote().count.remote(3),
    ):
        assert type(generator) is ray.ObjectRefGenerator
        refs = list(generator)
        assert all(type(r) is ray.ObjectRef for r in refs) and len(set(refs)) == 3
        assert ray.get(refs) == [0, 1, 2]
        with pytest.raises(StopIteration):
            next(generator)
    assert list(count.remote(0)) == []


def test_many_values_keep_their_order(session, actor, async_actor):
    for generator in (count.remote(2000), actor.count.remote(2000), async_actor.count.remote(2000)):
        assert ray.get(list(generator)) == list(range(2000))


def test_values_are_those_of_the_moment_of_the_yield(actor):
    got = ray.get(list(actor.arrays.remote(20)))
    assert [(a[0], a[-1], len(a)) for a in got] == [(i, i, 300_000) for i in range(20)]
    first, second = ray.get(list(actor.parts.remote()))
    assert ray.get(first["ref"]) == "inside" and second == [1, "two", None]


def test_references_can_be_passed_on(session, actor):
    @ray.remote
    def double(x):
        return 2 * x

    assert ray.get([double.remote(r) for r in actor.count.remote(3)]) == [0, 2, 4]


def test_a_reference_comes_before_the_generator_has_ended(actor, tmp_path):
    generator = actor.endless.remote(str(tmp_path / "a"))
    assert [ray.get(next(generator)) for _ in range(3)] == [0, 1, 2]
    assert not generator.is_finished() and ray.wait([generator.completed()], timeout=0)[0] == []
    ray.cancel(generator)


def test_an_error_is_the_last_reference(session, actor, async_actor):
    @ray.remote
    def fail_after(n):
        for i in range(n):
            yield i
        raise ValueError("in the middle")

    for generator in (fail_after.remote(2), actor.fail_after.remote(2), async_actor.fail_after.remote(2)):
        values = outcomes(generator)
        assert values[:2] == [0, 1] and len(values) == 3
        assert issubclass(values[2][0], ValueError) and issubclass(values[2][0], exceptions.RayTaskError)
        assert values[2][1].endswith("in the middle")
        assert ray.get(generator.completed()) is None, "the error was an item"
        assert generator.is_finished() and outcomes(generator) == []


def test_an_actor_that_dies_ends_the_stream_with_its_error(session):
    generator = Actor.remote().exit_after.remote(2)
    values = outcomes(generator)
    assert [v[0] if type(v) is tuple else v for v in values[-1:]] == [exceptions.ActorDiedError]
    assert values[:-1] == list(range(len(values) - 1)), "what arrived before"
    with pytest.raises(exceptions.ActorDiedError):
        ray.get(generator.completed())
    assert outcomes(generator) == []


def test_an_actor_that_is_killed_ends_the_wait(session, tmp_path):
    victim = Actor.remote()
    generator = victim.one_by_one.remote(10, str(tmp_path / "a"))
    assert ray.get(next_within(generator)) == 0
    ray.kill(victim)
    values = outcomes(generator)
    assert values[-1][0] is exceptions.ActorDiedError and len(values) <= 3


def test_a_task_whose_worker_died_goes_on_with_the_next_reference(session, tmp_path):
    @ray.remote(max_retries=1)
    def dies_once(path):
        yield 0
        yield 1
        if not os.path.exists(path):
            open(path, "w").close()
            os._exit(1)
        yield 2

    assert outcomes(dies_once.remote(str(tmp_path / "a"))) == [0, 1, 2]


def test_the_generator_is_run_to_its_end_without_a_consumer(session, actor, async_actor):
    for generator in (count.remote(50), actor.count.remote(50), async_actor.count.remote(50)):
        assert ray.get(generator.completed(), timeout=60) is None
        assert generator.next_ready() and not generator.is_finished()
        assert ray.get(list(generator)) == list(range(50))
        assert generator.is_finished() and not generator.next_ready()


def test_backpressure(session, actor, async_actor, tmp_path):
    for i, generator in enumerate(
        (
            count.options(_generator_backpressure_num_objects=2).remote(10, str(tmp_path / "0")),
            actor.count.options(_generator_backpressure_num_objects=2).remote(10, str(tmp_path / "1")),
            async_actor.count_noted.options(_generator_backpressure_num_objects=2).remote(10, str(tmp_path / "2")),
        )
    ):
        path = str(tmp_path / str(i))
        eventually(lambda path=path: noted(path) == 2, "two objects")
        time.sleep(0.5)
        assert noted(path) == 2, "the consumer has taken none"
        assert ray.get(next(generator)) == 0
        eventually(lambda path=path: noted(path) == 3, "one more")
        time.sleep(0.3)
        assert noted(path) == 3
        assert ray.get(list(generator)) == list(range(1, 10))


def test_backpressure_of_one_makes_each_object_when_the_last_was_taken(actor, tmp_path):
    path = str(tmp_path / "a")
    generator = actor.one_by_one.remote(5, path)
    for i in range(5):
        eventually(lambda i=i: noted(path) == i + 1, "the next object")
        assert ray.get(next_within(generator)) == i
    assert list(generator) == []


def test_a_dropped_generator_runs_to_its_end(actor, tmp_path):
    path = str(tmp_path / "a")
    generator = actor.count.options(_generator_backpressure_num_objects=1).remote(20, path)
    next_within(generator)
    del generator
    gc.collect()
    eventually(lambda: noted(path) == 20, "the end of the generator")
    assert ray.get(actor.plain.remote(), timeout=60) == "plain"


def test_cancel(session, actor, async_actor, tmp_path):
    @ray.remote
    def task(path):
        yield from endless(path)

    for i, start in enumerate((task.remote, actor.endless.remote, async_actor.endless.remote)):
        path = str(tmp_path / str(i))
        generator = start(path)
        assert ray.get(next_within(generator)) == 0
        ray.cancel(generator)
        values = outcomes(generator)
        assert issubclass(values[-1][0], exceptions.TaskCancelledError), values[-1]
        eventually(lambda path=path: os.path.exists(path + ".closed"), "the generator is closed")
        ray.cancel(generator)
        assert outcomes(generator) == []
    assert ray.get([actor.plain.remote(), async_actor.plain.remote()], timeout=60) == ["plain", "plain"]


def test_cancel_while_the_consumer_is_behind(session, actor, async_actor, tmp_path):
    @ray.remote(_generator_backpressure_num_objects=1)
    def task(path):
        yield from endless(path)

    starts = (
        task.remote,
        actor.endless.options(_generator_backpressure_num_objects=1).remote,
        async_actor.endless.options(_generator_backpressure_num_objects=1).remote,
    )
    for i, start in enumerate(starts):
        path = str(tmp_path / str(i))
        generator = start(path)
        eventually(lambda path=path: noted(path) == 1, "the first object")
        time.sleep(0.1)
        ray.cancel(generator)
        assert issubclass(outcomes(generator)[-1][0], exceptions.TaskCancelledError)
    assert ray.get([actor.plain.remote(), async_actor.plain.remote()], timeout=60) == ["plain", "plain"]


def test_a_value_that_cannot_be_pickled_is_the_last(session):
    @ray.remote
    def locks():
        yield 1
        yield threading.Lock()
        yield 3

    values = outcomes(locks.remote())
    assert values[0] == 1 and len(values) == 2 and issubclass(values[1][0], TypeError)


def test_wait(session, actor, tmp_path):
    slow, ready = actor.one_by_one.remote(2, str(tmp_path / "a")), ray.put(1)
    found, rest = ray.wait([slow, ready], num_returns=2, timeout=60)
    assert found == [slow, ready] and rest == []
    next(slow), next_within(slow)
    found, rest = ray.wait([slow], timeout=60)
    assert found == [slow], "at its end too"
    assert list(slow) == []
    busy = Actor.remote().endless.remote(str(tmp_path / "b"))
    next_within(busy)
    blocked = actor.count.remote(1, str(tmp_path / "no" / "such"))  # fails
    assert ray.wait([blocked], timeout=60)[0] == [blocked]
    ray.cancel(busy)


def test_wait_times_out(session, tmp_path):
    @ray.remote
    def late(path):
        while not os.path.exists(path):
            time.sleep(0.01)
        yield 1

    generator = late.remote(str(tmp_path / "a"))
    assert ray.wait([generator], timeout=0.1) == ([], [generator])
    assert generator._next_sync(timeout_s=0.1).is_nil() and not generator.next_ready()
    (tmp_path / "a").touch()
    assert ray.get(next_within(generator)) == 1


def test_async_for(session, actor, async_actor):
    async def read(generator):
        return [await ref async for ref in generator]

    async def main():
        found = [await read(count.remote(20)), await read(actor.count.remote(20))]
        return found, await asyncio.gather(*(read(async_actor.count.remote(5, 0.01)) for _ in range(3)))

    found, others = asyncio.run(main())
    assert found == [list(range(20))] * 2 and others == [list(range(5))] * 3


def test_an_actor_consumes_the_generator_of_another(session, actor, async_actor):
    other = Actor.remote()
    assert ray.get(actor.consume.remote(other, 100)) == list(range(100))
    assert ray.get(async_actor.consume.remote(other, 100)) == list(range(100))
    assert ray.get(actor.consume.remote(async_actor, 100)) == list(range(100))


@pytest.mark.skipif(REAL, reason="an actor of Ray runs the generator on")
def test_the_death_of_the_caller_ends_the_generator(session, tmp_path):
    path = str(tmp_path / "a")
    caller, worker = Actor.remote(), Actor.remote()
    assert ray.get(caller.hold.remote(worker, path)) == 0
    ray.kill(caller)
    eventually(lambda: os.path.exists(path + ".closed"), "the generator is closed", 60)
    assert ray.get(worker.plain.remote(), timeout=60) == "plain"


def test_numbers_of_results(session, actor):
    assert ray.get(actor.pair.remote()) == [1, 2]
    assert ray.get(actor.count.options(num_returns=3).remote(3)) == [0, 1, 2]
    assert ray.get(count.options(num_returns=1).remote(1)) == 0

    def plain():
        pass

    with pytest.raises(ValueError, match="can only be used with generator functions"):
        ray.remote(num_returns="streaming")(plain)
    with pytest.raises(ValueError, match="is not allowed"):
        count.options(_generator_backpressure_num_objects=0)


def test_dynamic(session):
    @ray.remote(num_returns="dynamic")
    def dynamic(n):
        for i in range(n):
            yield i
        if n > 2:
            raise ValueError("in the middle")

    ref = dynamic.remote(2)
    assert type(ref) is ray.ObjectRef
    found = ray.get(ref)
    assert isinstance(found, ray.DynamicObjectRefGenerator) and len(found) == 2
    assert [ray.get(r) for r in found] == [0, 1]
    values = outcomes(ray.get(dynamic.remote(3)))
    assert values[:3] == [0, 1, 2] and issubclass(values[3][0], ValueError)


def test_what_a_generator_cannot_do(session, actor):
    generator = actor.count.remote(1)
    with pytest.raises(TypeError, match="Serializing a ObjectRefGenerator is not allowed"):
        actor.consume.remote(generator, 1)
    for name in ("send", "throw"):
        with pytest.raises(NotImplementedError):
            getattr(generator, name)(1)
    with pytest.raises(NotImplementedError):
        generator.close()
    assert ray.get(generator) is generator


def test_references_before_their_values():
    @ray.remote
    def fails():
        yield 1
        raise KeyError("second")

    bulk = module("_private.worker")._wait_generators_bulk
    generator = count.remote(3)
    first = generator._get_next_ref_n(2)
    assert ray.get(first) == [0, 1] and generator._get_next_ref_n(2) == first, "it takes none"
    generator._consume_next_ref_n(2)
    assert ray.get(next(generator)) == 2
    failing = fails.remote()
    [(ready, refs)] = bulk([(failing, [True, False, False])], timeout=60)
    assert ready is failing and ray.get(refs[0]) == 1
    with pytest.raises(KeyError):
        ray.get(refs[1])
    with pytest.raises(exceptions.ObjectRefStreamEndOfStreamError):
        ray.get(refs[2])
    waiting = count.remote(1)
    assert bulk([(generator, [True]), (waiting, [True])], num_return=2, timeout=60)[1][0] is waiting
    with pytest.raises(TypeError):
        bulk([(generator, True)])
