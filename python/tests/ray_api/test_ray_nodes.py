"""Several nodes: strategies of groups, affinity, nodes that come and go."""

import pytest

from ray_api.raytest import module, ray

strategies = module("util.scheduling_strategies")


@ray.remote(num_cpus=0)
class Worker:
    def node(self):
        return ray.get_runtime_context().get_node_id()


@ray.remote(num_cpus=0)
def where():
    return ray.get_runtime_context().get_node_id()


def test_strategies_over_nodes(nodes):
    nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address)
    other = nodes.add_node(num_cpus=2, resources={"x": 1})
    assert len({n["NodeID"] for n in ray.nodes() if n["Alive"]}) == 2
    spread = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD")
    ray.get(spread.ready(), timeout=20)
    assert len(set(ray.util.placement_group_table(spread)["bundles_to_node_id"].values())) == 2
    packed = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_PACK")
    assert not packed.wait(0.3)  # each node has one CPU left
    ray.util.remove_placement_group(spread)
    assert packed.wait(20)
    assert len(set(ray.util.placement_group_table(packed)["bundles_to_node_id"].values())) == 1
    ray.util.remove_placement_group(packed)
    affinity = strategies.NodeAffinitySchedulingStrategy
    for node in ray.nodes():
        assert ray.get(where.options(scheduling_strategy=affinity(node["NodeID"], soft=False)).remote(), timeout=20) == node["NodeID"]
    gone = next(n["NodeID"] for n in ray.nodes() if n["Resources"].get("x"))
    actor = Worker.options(num_cpus=0, resources={"x": 1}).remote()
    assert ray.get(actor.node.remote(), timeout=20) == gone
    nodes.remove_node(other)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.node.remote(), timeout=30)
    assert [n["Alive"] for n in ray.nodes() if n["NodeID"] == gone] == [False]
    with pytest.raises(ray.exceptions.TaskUnschedulableError):
        ray.get(where.options(scheduling_strategy=affinity(gone, soft=False)).remote(), timeout=20)
    assert ray.get(where.options(scheduling_strategy=affinity(gone, soft=True)).remote(), timeout=20) != gone
