"""troupe.adapters.verl with a stand-in of verl: real workers, real calls. `make adapters-check` runs verl's own tests
with the adapter."""

import os
import time

import pytest

from ray_api.raytest import REAL, Counted, ray, roles

if REAL:
    pytest.skip("the adapters run with troupe.ray", allow_module_level=True)


@pytest.fixture(scope="module")
def verl(frameworks):
    """The adapter in a session of its own; workers find the stand-in by the driver's sys.path."""
    from troupe.adapters import verl

    ray.init(address="local", num_cpus=16, num_gpus=2)
    yield verl
    ray.shutdown()


def one_to_all(function):
    function.mode = "one_to_all"
    return function


def shards(function):
    function.mode = "shards"
    return function


class Actor:
    def __init__(self, base):
        self.base = base

    @one_to_all
    def device(self):
        return os.environ["RANK"], os.environ.get("CUDA_VISIBLE_DEVICES")

    @one_to_all
    def see(self, value):
        return value

    @shards
    def add(self, part):
        return f"{self.base}{part}{os.environ['RANK']}"

    def plain(self, key, value):
        return key, value


@pytest.fixture(scope="module")
def group(verl):
    pool = verl.TroupeResourcePool([2, 2], use_gpu=False)
    yield verl.TroupeWorkerGroup(pool, (ray.remote(Actor), ("x",)), name_prefix="actors")
    pool.release()


def test_a_worker_group_is_one_role(group):
    assert group.add(["a", "b"]) == ["xa0", "xa1", "xb2", "xb3"]
    assert len({r.partition("@")[0] for r in roles(group.workers)}) == 1
    assert ray.get(ray.get_actor("actors:3").device.remote())[0] == "3"


def test_each_shard_is_encoded_once(group):
    group.device()
    everyone, parts = Counted(), [Counted(), Counted()]
    assert group.see(everyone) == ["value"] * 4
    assert group.add(parts) == [f"xvalue{r}" for r in range(4)]
    assert (everyone.encoded, [p.encoded for p in parts]) == (1, [1, 1])


def test_arguments_of_a_method_by_name(group):
    """Lists as long as the group are divided if all arguments are some."""
    assert group.execute_all_sync("plain", [1, 2, 3, 4], value=["a", "b", "c", "d"]) == [
        (1, "a"),
        (2, "b"),
        (3, "c"),
        (4, "d"),
    ]
    assert group.execute_all_sync("plain", [1, 2, 3, 4], value="a") == [([1, 2, 3, 4], "a")] * 4
    assert ray.get(group.execute_all_async("plain", 1, 2)) == [(1, 2)] * 4


def test_spawned_groups_call_the_same_workers(group):
    spawned = group.spawn(["a"])["a"]
    assert type(spawned) is type(group)
    assert roles(spawned.workers) == roles(group.workers)
    assert spawned.add(["a", "b"]) == ["xa0", "xa1", "xb2", "xb3"]


def test_groups_of_a_pool_share_its_devices(verl):
    pool = verl.TroupeResourcePool([2], max_colocate_count=2)
    first, second = (verl.TroupeWorkerGroup(pool, (ray.remote(Actor), ("x",)), name_prefix=f"g{i}") for i in range(2))
    assert first.device() == second.device() == [("0", "0"), ("1", "1")]
    pool.release()
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(1000):  # its actors end soon, not at once
            ray.get(first.workers[0].device.remote())
            time.sleep(0.02)


def test_a_pool_that_can_never_be_had_is_refused(verl):
    with pytest.raises(
        ValueError, match="needs 3 CPU, 3 GPU on one node, which no node has; the nodes have: 16 CPU, 2 GPU"
    ):
        verl.TroupeResourcePool([3]).get_placement_groups()
    with pytest.raises(ValueError, match="needs 3 GPU in all"):
        verl.TroupeResourcePool([1, 1, 1]).get_placement_groups()
