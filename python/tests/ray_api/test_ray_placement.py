"""Placement groups, resources and where things run, as Ray does it."""

import concurrent.futures
import os

import pytest

from ray_api.raytest import REAL, eventually, module, ray

placement_group = module("util.placement_group")
strategies = module("util.scheduling_strategies")


@ray.remote(num_cpus=1)
class Worker:
    def node(self):
        return ray.get_runtime_context().get_node_id()

    def devices(self):
        return (
            ray.get_gpu_ids(),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            ray.get_runtime_context().get_accelerator_ids()["GPU"],
        )

    def assigned(self):
        return ray.get_runtime_context().get_assigned_resources()

    def group(self):
        return placement_group.get_current_placement_group()


@ray.remote(num_cpus=0)
def where():
    return ray.get_runtime_context().get_node_id()


def inside(group, bundle=-1, **options):
    return strategies.PlacementGroupSchedulingStrategy(group, bundle, **options)


def free(name):
    return ray.available_resources().get(name, 0)


def removed(*groups):
    for group in groups:
        ray.util.remove_placement_group(group)
    eventually(lambda: free("CPU") == 4 and free("GPU") == 2 and free("a") == 1, "all resources are free again")


def test_resources(session):
    total = ray.cluster_resources()
    assert (total["CPU"], total["GPU"], total["a"], total["cpu"]) == (4, 2, 1, 3)
    assert total["memory"] > 0 and total["node:__internal_head__"] == 1
    (node,) = ray.nodes()
    assert node["Alive"] and node["Resources"]["GPU"] == 2 and len(node["NodeID"]) == 56
    assert total[f"node:{node['NodeManagerAddress']}"] == 1
    state = module("_private.state")
    assert state.available_resources_per_node()[node["NodeID"]]["CPU"] == free("CPU")


def test_group(session):
    group = ray.util.placement_group([{"CPU": 1, "GPU": 1}, {"CPU": 1, "a": 1}], name="pair", strategy="PACK")
    assert ray.get(group.ready()) == group and group.wait(90)
    assert group.bundle_count == 2 and group.bundle_specs == [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "a": 1.0}]
    assert (free("CPU"), free("GPU"), free("a")) == (2, 1, 0)
    assert "a" not in ray.available_resources()  # of which nothing is left
    table = ray.util.placement_group_table(group)
    assert table["state"] == "CREATED" and table["strategy"] == "PACK" and table["name"] == "pair"
    assert table["bundles"] == {0: {"CPU": 1.0, "GPU": 1.0}, 1: {"CPU": 1.0, "a": 1.0}}
    assert table["bundles_to_node_id"] == dict.fromkeys((0, 1), ray.nodes()[0]["NodeID"])
    assert module("_private.state").state.placement_group_table(group.id) == table
    assert ray.util.placement_group_table()[group.id.hex()]["name"] == "pair"
    assert ray.util.get_placement_group("pair") == group and hash(ray.util.get_placement_group("pair")) == hash(group)
    with pytest.raises(ray.exceptions.RaySystemError):
        ray.util.placement_group([{"CPU": 1}], name="pair")
    removed(group)
    assert ray.util.placement_group_table(group)["state"] == "REMOVED"
    with pytest.raises(ValueError):
        ray.util.get_placement_group("pair")
    with pytest.raises(ray.exceptions.TaskPlacementGroupRemoved):
        ray.get(group.ready(), timeout=90)


def test_module_and_function(session):
    group = ray.util.placement_group([{"CPU": 1}])
    same = placement_group.placement_group([{"CPU": 1}])
    assert isinstance(group, placement_group.PlacementGroup) and ray.get(same.ready()) == same
    removed(group, same)


def test_infeasible_group_waits(session):
    group = ray.util.placement_group([{"CPU": 100}])
    ready, rest = ray.wait([group.ready()], timeout=0.2)
    assert not ready and len(rest) == 1 and not group.wait(0.1)
    table = ray.util.placement_group_table(group)
    assert table["state"] == "PENDING" and table["bundles_to_node_id"] == {0: ""}
    removed(group)


def test_group_waits_for_what_is_busy(session):
    holder = Worker.options(num_cpus=4).remote()
    ray.get(holder.node.remote())
    group = ray.util.placement_group([{"CPU": 1}])
    assert not group.wait(0.2)
    ray.kill(holder)
    assert group.wait(90)
    removed(group)


def test_refused_groups(session):
    for bundles in ([], [{}], [{"CPU": 0}], [{"CPU": "1"}], "CPU", [{1: 1}], ["CPU"]):
        with pytest.raises(ValueError):
            ray.util.placement_group(bundles)
    with pytest.raises(ValueError, match="Invalid placement group strategy"):
        ray.util.placement_group([{"CPU": 1}], strategy="TIGHT")
    with pytest.raises(ValueError, match="lifetime"):
        ray.util.placement_group([{"CPU": 1}], lifetime="forever")


def test_actors_in_bundles(session):
    group = ray.util.placement_group([{"CPU": 2, "GPU": 1}, {"CPU": 1}])
    first = Worker.options(num_gpus=0.5, scheduling_strategy=inside(group, 0)).remote()
    second = Worker.options(num_gpus=0.5, scheduling_strategy=inside(group, 0)).remote()
    (ids, visible, accelerators), other = ray.get([first.devices.remote(), second.devices.remote()])
    assert len(ids) == 1 and visible == str(ids[0]) and accelerators == [str(ids[0])] and other[0] == ids
    assert ray.get(first.assigned.remote()) == {"CPU": 1, "GPU": 0.5}
    assert ray.get(first.group.remote()) == group
    third = Worker.options(scheduling_strategy=inside(group, 0)).remote()  # bundle 0 has no CPU left
    ready, _ = ray.wait([third.node.remote()], timeout=0.3)
    assert not ready
    anywhere = Worker.options(scheduling_strategy=inside(group)).remote()
    assert ray.get(anywhere.node.remote(), timeout=90) == ray.get(first.node.remote())
    ray.kill(first)
    assert ray.get(third.node.remote(), timeout=90)
    removed(group)
    for actor in (second, third, anywhere):
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.node.remote(), timeout=90)


def test_tasks_in_bundles(session):
    group = ray.util.placement_group([{"CPU": 1}])
    assert ray.get(where.options(scheduling_strategy=inside(group, 0)).remote(), timeout=90) == ray.nodes()[0]["NodeID"]
    with pytest.warns(DeprecationWarning, match="placement_group parameter is deprecated"):
        assert ray.get(where.options(placement_group=group).remote(), timeout=90)
    removed(group)


def test_requests_that_no_bundle_holds(session):
    group = ray.util.placement_group([{"a": 1}])
    with pytest.raises(ValueError, match="cannot fit into any bundles"):
        Worker.options(scheduling_strategy=inside(group)).remote()
    with pytest.raises(ValueError, match="bundle index"):
        Worker.options(num_cpus=0, scheduling_strategy=inside(group, 1)).remote()
    actor = Worker.options(num_cpus=0, resources={"a": 1}, scheduling_strategy=inside(group)).remote()
    assert ray.get(actor.node.remote(), timeout=90)
    removed(group)


def test_children_are_captured(session):
    @ray.remote(num_cpus=1)
    def parent():
        child = Worker.remote()
        return ray.get(child.group.remote(), timeout=90)

    group = ray.util.placement_group([{"CPU": 2}])
    assert (
        ray.get(
            parent.options(scheduling_strategy=inside(group, placement_group_capture_child_tasks=True)).remote(),
            timeout=90,
        )
        == group
    )
    assert ray.get(parent.options(scheduling_strategy=inside(group)).remote(), timeout=90) is None
    removed(group)


def test_busy_devices_wait(session):
    first = Worker.options(num_gpus=2).remote()
    assert sorted(ray.get(first.devices.remote())[0]) == [0, 1]
    second = Worker.options(num_gpus=1).remote()
    pending = second.devices.remote()
    assert not ray.wait([pending], timeout=0.3)[0]
    ray.kill(first)
    assert ray.get(pending, timeout=90)[0] == [0]
    ray.kill(second)
    eventually(lambda: free("GPU") == 2, "the devices are free")


def one_group(number):
    """A group whose actor is called, removed before it runs, killed, or not there at all; by number."""
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}] if number % 3 == 0 else [{"CPU": 1}])
    try:
        if number % 4 == 0:
            assert group.wait(60)
            return group
        actor = Worker.options(scheduling_strategy=inside(group, 0)).remote()
        if number % 8 == 1:
            assert ray.get(actor.group.remote(), timeout=60) == group
        elif number % 4 == 2:
            ray.kill(actor)
        call = actor.node.remote()
    finally:
        ray.util.remove_placement_group(group)
    if number % 8 != 1:
        with pytest.raises(ray.exceptions.RayError):
            ray.get(call, timeout=60)
    return group


def test_groups_that_come_and_go_at_once(session):
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        groups = list(threads.map(one_group, range(16)))
    removed()
    assert {ray.util.placement_group_table(g)["state"] for g in groups} == {"REMOVED"}
    group = ray.util.placement_group([{"CPU": 4, "GPU": 2, "a": 1}])
    assert group.wait(90)
    removed(group)


def test_bad_amounts(session):
    with pytest.raises(ValueError):
        Worker.options(resources={"CPU": 1}).remote()
    with pytest.raises(ValueError):
        Worker.options(num_gpus=-1).remote()


def test_gpus_of_a_driver(session):
    assert ray.get_gpu_ids() == []
    assert placement_group.get_current_placement_group() is None


def test_visible_devices_without_devices(session):
    @ray.remote(num_cpus=0)
    def of_task():
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def override(value):
        return {"runtime_env": {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": value}}}

    def seen(value):
        worker = Worker.options(num_cpus=0, **override(value)).remote()
        return ray.get(of_task.options(**override(value)).remote()), ray.get(worker.devices.remote())[1]

    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert seen("0") == (before, before)
    assert seen("1") == ("", "")


@pytest.mark.skipif(REAL, reason="Ray's autoscaler prints it to the terminal")
def test_a_request_that_no_node_can_fulfill_is_warned_of(session, caplog, capfd):
    """Of tasks, actors and groups, in drivers and in actors; not of one that waits for what is busy."""

    @ray.remote(num_cpus=0)
    class Asker:
        def ask(self):
            self.waiting = task.options(resources={"of an actor": 1}).remote()

    @ray.remote(num_cpus=0)
    def task():
        pass

    def warned(amount):
        return sum("No node can fulfill" in r.getMessage() and amount in r.getMessage() for r in caplog.records)

    busy = [Asker.options(num_cpus=4).remote(), Asker.options(num_cpus=4).remote()]
    refs = [task.options(resources={"of a task": 1}).remote() for _ in range(3)]
    large = Asker.options(num_gpus=64).remote()
    group = placement_group.placement_group([{"of a group": 1}])
    asker = Asker.remote()
    ray.get(asker.ask.remote())
    for amount in ("of a task", "'GPU': 64.0", "of a group"):
        eventually(lambda amount=amount: warned(amount), f"a warning about {amount}", 60)
    seen = []
    eventually(
        lambda: seen.append(capfd.readouterr()) or "of an actor" in "".join(s.err + s.out for s in seen),
        "the actor's",
        60,
    )
    assert warned("of a task") == 1, "once for equal requests"
    assert not warned("'CPU': 4.0") and len(busy) == 2
    for ref in refs:
        ray.cancel(ref)
    for actor in (*busy, large, asker):
        ray.kill(actor)
    placement_group.remove_placement_group(group)
