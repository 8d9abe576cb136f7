"""Several nodes: strategies of groups, affinity, nodes that come and go."""

import json
import os
import socket
import subprocess
import sys

import pytest

from ray_api.raytest import REAL, module, ray

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
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
    ray.get(spread.ready(), timeout=90)
    assert len(set(ray.util.placement_group_table(spread)["bundles_to_node_id"].values())) == 2
    packed = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_PACK")
    assert not packed.wait(0.3)  # each node has one CPU left
    ray.util.remove_placement_group(spread)
    assert packed.wait(90)
    assert len(set(ray.util.placement_group_table(packed)["bundles_to_node_id"].values())) == 1
    ray.util.remove_placement_group(packed)
    affinity = strategies.NodeAffinitySchedulingStrategy
    for node in ray.nodes():
        assert (
            ray.get(where.options(scheduling_strategy=affinity(node["NodeID"], soft=False)).remote(), timeout=90)
            == node["NodeID"]
        )
    gone = next(n["NodeID"] for n in ray.nodes() if n["Resources"].get("x"))
    actor = Worker.options(num_cpus=0, resources={"x": 1}).remote()
    assert ray.get(actor.node.remote(), timeout=90) == gone
    nodes.remove_node(other)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.node.remote(), timeout=90)
    assert [n["Alive"] for n in ray.nodes() if n["NodeID"] == gone] == [False]
    with pytest.raises(ray.exceptions.TaskUnschedulableError):
        ray.get(where.options(scheduling_strategy=affinity(gone, soft=False)).remote(), timeout=90)
    assert ray.get(where.options(scheduling_strategy=affinity(gone, soft=True)).remote(), timeout=90) != gone


def test_actors_that_take_nothing_are_spread(nodes):
    nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address)
    nodes.add_node(num_cpus=2)
    workers = [Worker.remote() for _ in range(10)]
    assert len(set(ray.get([w.node.remote() for w in workers], timeout=90))) == 2


def test_labels_choose_nodes(nodes):
    nodes.add_node(num_cpus=1, labels={"region": "us", "ray.io/accelerator-type": "A100"})
    ray.init(address=nodes.address)
    nodes.add_node(num_cpus=2, labels={"region": "eu"})
    nodes.add_node(num_cpus=1)
    by_region = {n["Labels"].get("region", ""): n["NodeID"] for n in ray.nodes()}
    assert set(by_region) == {"us", "eu", ""}
    assert {n["NodeManagerHostname"] for n in ray.nodes()} == {socket.gethostname()}

    def chosen(selector, *others):
        return ray.get(
            where.options(label_selector=selector, fallback_strategy=[{"label_selector": s} for s in others]).remote(),
            timeout=90,
        )

    assert chosen({"ray.io/accelerator-type": "A100"}) == by_region["us"]
    assert chosen({"region": "in(eu, mars)"}) == by_region["eu"]
    assert chosen({"region": "!in(us,eu)"}) == by_region[""]
    assert chosen({"ray.io/node-id": by_region["eu"]}) == by_region["eu"]
    assert chosen({"region": "mars"}, {"region": "venus"}, {"region": "us"}) == by_region["us"]
    assert chosen({"region": "mars"}, {}) in by_region.values()
    never = Worker.options(label_selector={"region": "mars"}).remote()
    assert not ray.wait([never.node.remote()], timeout=0.3)[0]

    def by_labels(**rules):
        strategy = strategies.NodeLabelSchedulingStrategy(rules.get("hard") or {}, soft=rules.get("soft"))
        return ray.get(where.options(scheduling_strategy=strategy).remote(), timeout=90)

    operators = (strategies.Exists(), strategies.DoesNotExist(), strategies.NotIn("us"), strategies.In("us"))
    assert by_labels(hard={"ray.io/accelerator-type": operators[0]}) == by_region["us"]
    assert by_labels(hard={"region": operators[1]}) == by_region[""]
    assert by_labels(hard={"region": operators[2]}) in (by_region["eu"], by_region[""])
    assert by_labels(hard={"region": operators[0]}, soft={"region": operators[3]}) == by_region["us"]
    assert by_labels(soft={"region": strategies.In("mars")}) in by_region.values()
    group = ray.util.placement_group(
        [{"CPU": 1}, {"CPU": 1}], bundle_label_selector=[{"region": "eu"}, {"region": "us"}]
    )
    ray.get(group.ready(), timeout=90)
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
    assert placed == {0: by_region["eu"], 1: by_region["us"]}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"label_selector": {"region": "!!us"}}, "Invalid label selector value"),
        ({"label_selector": {"a/b/c": "us"}}, "Invalid label key name"),
        ({"fallback_strategy": [{}]}, "Empty dictionary"),
        ({"fallback_strategy": [{"memory": 1}]}, "Unsupported option"),
    ],
)
def test_labels_that_cannot_be_say_why(options, error):
    with pytest.raises(ValueError, match=error):
        where.options(**options)


_FIRST = """
import troupe.ray as ray
ray.init("auto", namespace="first")

@ray.remote(num_cpus=0)
class Counter:
    def __init__(self):
        self.count = 0
    def add(self):
        self.count += 1
        return self.count

kept = Counter.options(name="kept", lifetime="detached").remote()
own = Counter.options(name="own").remote()
assert ray.get([kept.add.remote(), own.add.remote()]) == [1, 1]
"""


_SECOND = """
import os, signal, sys
import troupe.ray as ray
ray.init("auto", namespace="second")
kept = ray.get_actor("kept", namespace="first")
print(ray.get(kept.add.remote()))
print([(n["namespace"], n["name"]) for n in ray.util.list_named_actors(all_namespaces=True)])
try:
    ray.get_actor("kept")
except ValueError:
    print("not in this namespace")
@ray.remote(num_cpus=0)
class Own:
    def pid(self):
        return os.getpid()

own = Own.options(name="own").remote()
pid = ray.get(own.pid.remote())
os.kill(int(sys.argv[1]), signal.SIGKILL)
print(ray.get(kept.add.remote(), timeout=90))
print(ray.get(ray.get_actor("own").pid.remote(), timeout=90) == pid == ray.get(own.pid.remote(), timeout=30))

@ray.remote(num_cpus=0)
class Later:
    def one(self):
        return 1

later = Later.options(name="later").remote()
print(ray.get(later.one.remote(), timeout=90))
print(ray.get(ray.get_actor("kept", "first").add.remote(), timeout=90))
ray.kill(kept)
"""


@pytest.mark.skipif(REAL, reason="kills the program of Troupe's head")
def test_detached_actor_outlives_its_driver_and_a_head(tmp_path):
    """A second driver finds the detached actor of the first by its name and namespace; calls, creation and names
    continue after the head was killed while the driver ran, and its own actor is found by name."""
    env = {**os.environ, "RAY_TMPDIR": str(tmp_path), "PYTHONPATH": ROOT}

    def run(*command):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "troupe.ray.scripts", "start", "--head", "--port=0", "--num-cpus=2")
    try:
        run(sys.executable, "-c", _FIRST)
        with open(next(tmp_path.glob("troupe-ray-*/head-*.json"))) as f:
            service = json.load(f)["pid"]
        head = children(service)[0]
        said = run(sys.executable, "-c", _SECOND, str(head))
        assert said.splitlines() == ["2", "[('first', 'kept')]", "not in this namespace", "3", "True", "1", "4"]
        assert children(service) not in ([], [head])
    finally:
        run(sys.executable, "-m", "troupe.ray.scripts", "stop", "--force")


def children(pid):
    """The child processes of a process that run."""
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        found = [int(p) for p in f.read().split()]
    return [
        p
        for p in found
        if os.path.exists(f"/proc/{p}/cmdline") and open(f"/proc/{p}/stat").read().rpartition(")")[2].split()[0] != "Z"
    ]
