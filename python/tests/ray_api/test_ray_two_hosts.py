"""A session over two hosts: `ray start --head` on one, `ray start --address` on the other, which is a network namespace
with a /tmp of its own (two_hosts.py)."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from ray_api.raytest import REAL, eventually, module, ray
from two_hosts import Link

if REAL:
    pytest.skip("Ray's own command starts other processes", allow_module_level=True)


class Command:
    """A `ray start --block` that runs until it is interrupted."""

    def __init__(self, command, env):
        self.process = subprocess.Popen(
            command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self.said = ""
        while "ray stop" not in self.said:
            line = self.process.stdout.readline()
            assert line, f"{command} has ended: {self.said}"
            self.said += line

    def end(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(90)


def start(*arguments):
    return [sys.executable, "-m", "troupe.ray.scripts", "start", "--block", *arguments]


@pytest.fixture(scope="module")
def hosts():
    link = Link()
    head = far = None
    try:
        head = Command(
            start("--head", "--port", "0", "--node-ip-address", link.near, "--num-cpus", "2", "--num-gpus", "0"), {}
        )
        variables, _, printed = head.said.rpartition("ray start --address=")  # the command to run on the other host
        address = printed.partition("\n")[0].strip("'")
        joined = start("--address", address, "--num-cpus=2", "--num-gpus=0", f"--resources={json.dumps({'far': 1})}")
        line = f"{variables.rpartition(chr(10))[2]} exec {shlex.join(link.command(*joined))}"
        far = Command(["sh", "-c", line], {"TROUPE_SHM": "0"} if link.problem else {})
        ray.init(address=address)
        yield link, far
    finally:
        ray.shutdown()
        for command in (far, head):
            if command is not None:
                command.end()
        link.remove()


class Member:
    def where(self):
        return os.readlink("/proc/self/ns/net"), ray.util.get_node_ip_address()

    def listen(self):
        self.server = socket.create_server((ray.util.get_node_ip_address(), 0))
        return self.server.getsockname()[:2]

    def connect(self, address):
        with socket.create_connection(tuple(address), timeout=90) as s:
            return s.getpeername()[0]

    def total(self, array):
        return float(array.sum())

    def ask(self, other):
        """Another actor's value, passed on by its reference alone."""
        return ray.get(other.total.remote(ray.put(np.ones(1 << 19))))


MIB = 1 << 20
SIZE = 32 * MIB


@ray.remote(num_cpus=0, resources={"far": 0.01})
class Far:
    def pid(self):
        return os.getpid()

    def made(self, value):
        return np.full(SIZE, value, np.uint8)

    def inside(self, value):
        return [ray.put(np.full(SIZE, value, np.uint8)), np.full(SIZE, value, np.uint8)]

    def sum(self, *arrays):
        return [int(a.sum(dtype=np.int64)) for a in arrays]

    def got(self, refs):
        return self.sum(*ray.get(refs))


@ray.remote(num_cpus=0)
class Runs:
    def __init__(self):
        self.pids = []

    def add(self, pid):
        self.pids.append(pid)

    def all(self):
        return self.pids


@ray.remote(num_cpus=0, resources={"far": 0.01})
def made(runs, value):
    ray.get(runs.add.remote(os.getpid()))
    return np.full(SIZE, value, np.uint8)


class Counted:
    """Bytes over the link, in both directions, since it was made."""

    def __init__(self, link):
        self.link = link
        self.before = link.crossed() + link.crossed("rx")

    def is_about(self, size):
        return (
            self.link.problem
            or size <= self.link.crossed() + self.link.crossed("rx") - self.before < size * 1.2 + 2 * MIB
        )


def ready(*refs):
    """Waits for results without moving them."""
    assert ray.wait(list(refs), num_returns=len(refs), timeout=60, fetch_local=False)[0] == list(refs)


def test_large_results_stay_on_their_host_until_they_are_read(hosts):
    link, _ = hosts
    maker, taker, runs = Far.remote(), Far.remote(), Runs.remote()
    ray.get([maker.pid.remote(), taker.pid.remote()])
    counted = Counted(link)
    of_actor, of_task = maker.made.remote(1), made.remote(runs, 2)
    ready(of_actor, of_task)
    assert ray.get(taker.sum.remote(of_actor, of_task)) == [SIZE, 2 * SIZE]
    assert ray.get(taker.got.remote([of_actor, of_task])) == [SIZE, 2 * SIZE], "references inside an argument"
    assert ray.get(taker.sum.remote(maker.made.remote(3))) == [3 * SIZE], "an argument that did not exist yet"
    assert counted.is_about(0)
    assert [int(a[-1]) for a in ray.get([of_actor, of_task], timeout=60)] == [1, 2]
    assert counted.is_about(2 * SIZE)
    assert [int(a[-1]) for a in ray.get([of_actor, of_task])] == [1, 2] and counted.is_about(2 * SIZE), "fetched once"
    near = ray.put(np.full(SIZE, 4, np.uint8))
    assert ray.get(taker.got.remote([near])) == ray.get(maker.sum.remote(near)) == [4 * SIZE]
    assert counted.is_about(3 * SIZE), "a value of this host crosses once for all processes of the other"
    kept, array = ray.get(maker.inside.remote(5))
    assert int(array[-1]) == int(ray.get(kept)[-1]) == 5


def test_large_results_outlive_actors_that_end(hosts):
    maker = Far.remote()
    killed = maker.made.remote(1)
    ready(killed)
    ray.kill(maker)
    assert int(ray.get(killed, timeout=60)[-1]) == 1
    dropped = Far.remote().made.remote(2)
    ready(dropped)
    assert int(ray.get(dropped, timeout=60)[-1]) == 2


def test_large_results_that_are_lost_with_their_process(hosts):
    maker, runs, taker = Far.remote(), Runs.remote(), Far.remote()
    of_actor, of_task, once = maker.made.remote(1), made.remote(runs, 2), made.options(max_retries=0).remote(runs, 3)
    ready(of_actor, of_task, once)
    for pid in {ray.get(maker.pid.remote()), *ray.get(runs.all.remote())}:
        os.kill(pid, signal.SIGKILL)
    for lost in (of_actor, once):
        with pytest.raises(ray.exceptions.ObjectLostError):
            ray.get(lost, timeout=60)
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(taker.got.remote([lost]), timeout=60)
        assert isinstance(caught.value.cause, ray.exceptions.ObjectLostError)
    assert ray.get(taker.got.remote([of_task]), timeout=60) == [2 * SIZE], "computed again"
    assert len(ray.get(runs.all.remote())) == 3
    assert int(ray.get(of_task, timeout=60)[-1]) == 2


def test_tasks_actors_and_groups_over_two_hosts(hosts):
    link, far = hosts
    alive = [n for n in ray.nodes() if n["Alive"]]
    assert len({n["NodeManagerAddress"] for n in alive}) == (1 if link.problem else 2)
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD")
    strategies = [
        module("util.scheduling_strategies").PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
        for i in range(2)
    ]
    members = [ray.remote(Member).options(num_cpus=1, scheduling_strategy=s).remote() for s in strategies]
    told = ray.get([m.where.remote() for m in members])
    assert {ip for _, ip in told} == {n["NodeManagerAddress"] for n in alive}
    assert link.problem or told[0][0] != told[1][0], "the actors run on different hosts"
    for one, other in (members, members[::-1]):
        assert ray.get(other.connect.remote(one.listen.remote())) == ray.get(one.where.remote())[1]
        assert ray.get(one.ask.remote(other)) == 1 << 19
    big = ray.put(np.ones(1 << 20))
    assert ray.get([m.total.remote(big) for m in members]) == [1 << 20] * 2

    @ray.remote(num_cpus=0, resources={"far": 0.1})
    def on_the_far_one():
        return os.readlink("/proc/self/ns/net"), np.ones(1 << 19)

    where, array = ray.get(on_the_far_one.remote())
    assert array.sum() == 1 << 19 and (link.problem or where != os.readlink("/proc/self/ns/net"))
    lost = next(m for m, (ns, _) in zip(members, told, strict=True) if ns == where)
    far.end()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(lost.where.remote(), timeout=60)
    eventually(lambda: sum(n["Alive"] for n in ray.nodes()) == 1, "the node is gone")
