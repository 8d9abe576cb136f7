"""multiprocessing.Pool, joblib and ActorGroup on actors."""

import os
import time

import joblib
import pytest

from ray_api.raytest import module, ray

Pool, TimeoutError = module("util.multiprocessing").Pool, module("util.multiprocessing").TimeoutError


@pytest.fixture
def pool(session):
    with Pool(2) as pool:
        yield pool
    pool.join()


def half(x):
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x // 2


def test_a_pool_maps_in_the_processes_of_its_actors(pool):
    found = pool.map(lambda i: (i, os.getpid()), range(40))
    assert [i for i, _ in found] == list(range(40))
    assert len({pid for _, pid in found}) == 2 and os.getpid() not in {pid for _, pid in found}
    assert pool.apply(divmod, (7, 2)) == (3, 1) and pool.starmap(divmod, [(7, 2), (9, 3)]) == [(3, 1), (3, 0)]
    assert pool.apply(dict, kwds={"a": 1}) == {"a": 1}
    with pytest.raises(ValueError, match="3 is odd"):
        pool.map(half, [2, 3])


def test_a_pool_gives_each_result_of_imap_or_its_exception(pool):
    results = pool.imap(half, iter(range(6)), chunksize=3)
    found = [results.next() for _ in range(6)]
    assert found[::2] == [0, 1, 2] and all(isinstance(e, ValueError) for e in found[1::2])
    with pytest.raises(StopIteration):
        results.next()
    assert sorted(pool.imap_unordered(half, [0, 2, 4])) == [0, 1, 2]
    with pytest.raises(TypeError, match="not iterable"):
        pool.imap(half, 3)


def test_callbacks_and_time_outs(pool):
    told = []
    pool.apply_async(half, (8,), callback=told.append).wait(60)
    pool.map_async(half, [1, 3], error_callback=lambda e: told.append(type(e))).wait(60)
    assert told[0] == 4 and issubclass(told[1], ValueError)
    slow = pool.apply_async(time.sleep, (600,))
    with pytest.raises(TimeoutError):
        slow.get(0.05)
    pool.terminate()  # ends the actor that sleeps
    slow.wait(60)
    assert not slow.successful()


def test_the_initializer_and_the_limit_of_tasks(session, tmp_path):
    def mark(folder):
        (folder / str(os.getpid())).touch()

    with Pool(1, initializer=mark, initargs=(tmp_path,), maxtasksperchild=2) as pool:
        assert len(list(tmp_path.iterdir())) == 1
        pids = [pool.apply(os.getpid) for _ in range(4)]
    pool.join()
    assert pids[0] == pids[1] != pids[2] == pids[3] and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match="CPUs"):
        Pool(1000)


def test_joblib(session):
    module("util.joblib").register_ray()
    with joblib.parallel_backend("ray", n_jobs=2):
        found = joblib.Parallel()(joblib.delayed(lambda i: (i, os.getpid()))(i) for i in range(20))
    assert [i for i, _ in found] == list(range(20)) and os.getpid() not in {pid for _, pid in found}
    with pytest.raises(ValueError, match="3 is odd"), joblib.parallel_backend("ray", n_jobs=2):
        joblib.Parallel()(joblib.delayed(half)(i) for i in (2, 3))


class Member:
    def __init__(self, start):
        self.total = start

    def add(self, x):
        self.total += x
        return self.total

    def get_actor_metadata(self):
        return os.getpid()


@pytest.mark.filterwarnings("ignore:.*ActorGroup")
def test_a_group_calls_all_its_actors(session):
    group = module("util.actor_group").ActorGroup(Member, num_actors=2, num_cpus_per_actor=0, init_args=(5,))
    assert ray.get(group.add.remote(1)) == [6, 6] and len(set(group.actor_metadata)) == len(group) == 2
    group.remove_actors([0])
    group.add_actors(1)
    assert ray.get(group.add.remote(1)) == [7, 6]
    with pytest.raises(TypeError, match=r"add\.remote"):
        group.add(1)
    group.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        group.add.remote(1)
    group.start()
    assert ray.get(group.add.remote(1)) == [6, 6]
    group.shutdown(0)
