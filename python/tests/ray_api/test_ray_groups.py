"""Actors that are ranks of one role, calls to all of them, and placement groups that are held together. They are
Troupe's own: adapters use them."""

import asyncio
import ctypes
import os

import numpy as np
import pytest

from ray_api.raytest import REAL, Counted, eventually, module, ray, roles

if REAL:
    pytest.skip("Ray has no groups", allow_module_level=True)

from troupe.ray import _forming, _group_call


class Plain:
    def __init__(self):
        self.seen = []

    def see(self, value):
        self.seen.append(value)
        return self.seen

    def where(self):
        return os.environ["RANK"], os.getpid(), ray.get_runtime_context().get_actor_name()

    def double(self, array):
        return array * 2

    def fail(self):
        raise KeyError("no such thing")

    def hold_interpreter(self):
        ctypes.PyDLL(None).sleep(60)


class Async(Plain):
    async def see(self, value):
        return super().see(value)


def make(cls, count, **options):
    with _forming.forming():
        return [
            ray.remote(cls)
            .options(
                name=f"{cls.__name__}-{r}-{os.urandom(4).hex()}",
                num_cpus=0,
                runtime_env={"env_vars": {"RANK": str(r)}},
                **options,
            )
            .remote()
            for r in range(count)
        ]


def call_all(actors, method, *args):
    return _group_call.call(actors, method, [(args, {})] * len(actors))


@pytest.fixture(scope="module")
def group(session):
    return make(Plain, 4)


def test_actors_of_a_group_are_ranks_of_one_role(group):
    told = ray.get(call_all(group, "where"))
    assert [rank for rank, _, _ in told] == ["0", "1", "2", "3"]
    assert len({pid for _, pid, _ in told}) == 4
    name = told[2][2]
    assert ray.get(ray.get_actor(name).where.remote()) == told[2]
    assert len({r.partition("@")[0] for r in roles(group)}) == 1
    assert [r.partition("@")[2] for r in roles(group)] == ["0", "1", "2", "3"]


def test_what_several_ranks_get_is_encoded_once(group):
    ray.get(call_all(group, "where"))
    everyone = Counted()
    assert [v[-1] for v in ray.get(call_all(group, "see", everyone))] == ["value"] * 4
    assert everyone.encoded == 1
    shards = [Counted(), Counted()]
    ray.get(_group_call.call(group, "see", [((shards[r // 2],), {}) for r in range(4)]))
    assert [s.encoded for s in shards] == [1, 1]


@pytest.mark.parametrize("cls", [Plain, Async])
def test_calls_to_all_and_to_one_keep_one_order(session, cls):
    actors = make(cls, 2)
    last = []
    for i in range(5):  # the first of them before the actors have started
        call_all(actors, "see", i)
        last = [a.see.remote(f"{r}-{i}") for r, a in enumerate(actors)]
    late = session.put(9)
    assert ray.get(last) == [[v for i in range(5) for v in (i, f"{r}-{i}")] for r in range(2)]
    assert [v[-1] for v in ray.get(call_all(actors, "see", late))] == [9, 9]


def test_values_and_errors_of_each_rank(group):
    arrays = [np.full(300_000, float(r)) for r in range(4)]
    refs = _group_call.call(group, "double", [((a,), {}) for a in arrays])
    assert [float(ray.get(r)[-1]) for r in reversed(refs)] == [6.0, 4.0, 2.0, 0.0]
    shared = ray.put(arrays[3])
    assert [float(v[0]) for v in ray.get(call_all(group, "double", shared))] == [6.0] * 4
    assert float(ray.get(group[0].double.remote(refs[1]))[0]) == 4.0
    with pytest.raises(KeyError, match="no such thing"):
        ray.get(call_all(group, "fail"))

    async def gather():
        return await asyncio.gather(*call_all(group, "where"))

    assert len(asyncio.run(gather())) == 4


def test_one_that_is_killed_leaves_the_others(session):
    actors = make(Plain, 3)
    pids = [pid for _, pid, _ in ray.get(call_all(actors, "where"))]
    ray.kill(actors[1])
    refs = call_all(actors, "where")
    assert [ray.get(refs[0])[1], ray.get(refs[2])[1]] == [pids[0], pids[2]]
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(refs[1])
    actors[2].hold_interpreter.remote()
    ray.kill(actors[2])
    eventually(lambda: not os.path.exists(f"/proc/{pids[2]}"), "a process that does not answer is killed")
    os.kill(pids[0], 9)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actors[0].where.remote())
        ray.get(actors[0].where.remote())


def test_actors_without_handles_end(session):
    actors = make(Plain, 2)
    pids = [pid for _, pid, _ in ray.get(call_all(actors, "where"))]
    del actors
    eventually(lambda: not any(os.path.exists(f"/proc/{p}") for p in pids), "the actors end")


def test_a_call_that_cannot_be_sent_holds_up_no_other(session):
    """The calls of async actors are begun in the order of their numbers; one that was not sent leaves no gap."""
    group = make(Async, 2)
    assert ray.get(call_all(group, "see", 1)) == [[1], [1]]
    for ref in call_all(group, "\ud800"):
        with pytest.raises(Exception, match="surrogate"):
            ray.get(ref, timeout=90)
    assert ray.get(call_all(group, "see", 2), timeout=90) == [[1, 2], [1, 2]]
    assert ray.get([actor.see.remote(3) for actor in group], timeout=90) == [[1, 2, 3], [1, 2, 3]]


def test_a_group_that_is_not_complete_is_none(session):
    with pytest.raises(ValueError, match="already taken"), _forming.forming():
        one = ray.remote(Plain).options(name="taken", num_cpus=0, runtime_env={"env_vars": {"RANK": "7"}}).remote()
        ray.remote(Plain).options(name="taken", num_cpus=0).remote()
    assert ray.get(one.where.remote())[0] == "7"
    assert "@" not in roles([one])[0]


def test_placement_groups_are_held_together_or_not_at_all(session):
    placement_group, remove = module("util").placement_group, module("util").remove_placement_group

    def gang():
        with _forming.reserving(2):
            return [placement_group([{"GPU": 1}]) for _ in range(2)]

    one = placement_group([{"GPU": 1}])
    assert one.wait(90)
    first = gang()
    assert not first[0].wait(0.1) and not first[1].wait(0)
    assert ray.available_resources()["GPU"] == 1
    remove(one)
    assert all(g.wait(90) for g in first)
    second = gang()
    remove(first[0])
    assert not second[0].wait(0.1) and not second[1].wait(0)
    remove(first[1])
    assert all(g.wait(90) for g in second)
    third = gang()
    remove(third[0])
    assert not third[1].wait(0.1)
    for g in second:
        remove(g)
    assert third[1].wait(90), "it does not wait for one that was removed"
    remove(third[1])
