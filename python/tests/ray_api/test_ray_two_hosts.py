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
        far = Command(["sh", "-c", line], {})
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
