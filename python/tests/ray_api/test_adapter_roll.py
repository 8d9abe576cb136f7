"""troupe.adapters.roll with a stand-in of ROLL: real workers, real calls. `make adapters-check` runs ROLL's own tests
with the adapter."""

import os

import pytest

from ray_api.raytest import REAL, Counted, ray, roles

if REAL:
    pytest.skip("the adapters run with troupe.ray", allow_module_level=True)


@pytest.fixture(scope="module")
def cluster(session, frameworks):
    from roll.distributed.executor.worker import Worker

    from troupe.adapters.roll import TroupeCluster, TroupeResourceManager

    class Actor(Worker):
        def __init__(self, worker_config):
            super().__init__(worker_config)
            self.started_with = dict(os.environ)

        def where(self):
            return self.started_with["RANK"], self.started_with["MARK"], self.worker_config["device"], self.master

        def see(self, value):
            return value

    manager = TroupeResourceManager(2, 1)
    config = {"world_size": 2, "device_mapping": [0, 1], "system_envs": {"MARK": "m"}}
    yield TroupeCluster("actor", Actor, manager, config)
    manager.destroy_placement_group()


def test_a_cluster_is_one_role_with_the_address_of_rank_0(cluster):
    master = (cluster.master_addr, cluster.master_port)
    assert cluster.execute_all_sync("where") == [("0", "m", 0, master), ("1", "m", 1, master)]
    assert [r.partition("@")[2] for r in roles(cluster.workers)] == ["0", "1"]
    assert len({r.partition("@")[0] for r in roles(cluster.workers)}) == 1
    assert ray.get_actor("actor-1") == cluster.workers[1]


def test_what_several_ranks_get_is_encoded_once(cluster):
    everyone = Counted()
    assert cluster.execute_all_sync("see", [everyone] * 2) == ["value"] * 2
    assert everyone.encoded == 1
    assert cluster.execute_all_sync("see", value=[1, 2]) == [1, 2]


def test_a_cluster_travels_to_other_workers(cluster):
    """As an argument: its calls there are those of the role, too."""

    @ray.remote(num_cpus=0)
    def call(cluster):
        return cluster.execute_all_sync("see", [5, 6])

    assert ray.get(call.remote(cluster)) == [5, 6]
