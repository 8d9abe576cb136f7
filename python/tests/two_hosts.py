"""Large values between two hosts. The second host is a network namespace behind a link whose bytes are counted, with a
/tmp of its own, where the machine has namespaces; otherwise an agent without the shared memory of the first, and no
bytes are counted."""

import json
import os
import subprocess
import zlib

import numpy as np
import pytest

import troupe
from conftest import ROOT
from troupe import Dispatch, _core, register

# A /tmp of its own that still shows the checkout, which may lie in /tmp.
OWN_TMP = """
root=$1; shift
mount --make-rprivate /
mount --bind "$root" /mnt
mount -t tmpfs tmpfs /tmp
[ -d "$root" ] || { mkdir -p "$root"; mount --move /mnt "$root"; }
exec "$@"
"""
MIB = 1 << 20
SIZE = 16 * MIB


class Worker:
    def make(self, value, n=SIZE):
        return np.arange(n, dtype=np.uint32).astype(np.uint8) + np.uint8(value)

    def crc(self, x):
        return zlib.crc32(x)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def crc_of_all(self, x):
        return zlib.crc32(x)

    def crc_inside(self, values):
        return zlib.crc32(values[0].result())

    def put(self, value):
        return [troupe.put(self.make(value))]

    def host(self):
        return os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/mnt")


def crc(value):
    return zlib.crc32(Worker().make(value))


class Link:
    """The link between the hosts."""

    def __init__(self):
        n = os.getpid() % 200 + 20
        self.name, self.far, self.cable = f"troupepy{n}", f"tp{n}b", f"tp{n}a"
        self.near = f"10.78.{n}.1"
        self.problem = ""
        for words in (
            f"netns add {self.name}",
            f"link add {self.cable} type veth peer name {self.far}",
            f"link set {self.far} netns {self.name}",
            f"addr add {self.near}/24 dev {self.cable}",
            f"link set {self.cable} up",
            f"-n {self.name} addr add 10.78.{n}.2/24 dev {self.far}",
            f"-n {self.name} link set {self.far} up",
            f"-n {self.name} link set lo up",
        ):
            try:
                subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as err:
                self.problem, self.near = f"{err}: {getattr(err, 'stderr', '')}", "127.0.0.1"
                self.remove()
                print("both hosts are this machine, because it gives no namespaces:", self.problem)
                return

    def command(self, *args):
        if self.problem:
            return list(args)
        return ["ip", "netns", "exec", self.name, "sh", "-ec", OWN_TMP, "sh", ROOT, *args]

    def crossed(self, direction="tx"):
        """Bytes that have gone from the first host to the second, or, with "rx", back."""
        if self.problem:
            return 0
        with open(f"/sys/class/net/{self.cable}/statistics/{direction}_bytes") as f:
            return int(f.read())

    def remove(self):
        for words in (f"link del {self.cable}", f"netns del {self.name}"):
            try:
                subprocess.run(["ip", *words.split()], capture_output=True)
            except OSError:
                pass


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    folder, link, joined = tmp_path_factory.mktemp("hosts"), Link(), None
    env = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}
    env.update(XDG_STATE_HOME=str(folder), XDG_RUNTIME_DIR=str(folder))
    program = _core.program_path()
    up = [
        program,
        "up",
        "--json",
        "--listen",
        f"{link.near}:0",
        "--store",
        str(folder / "store"),
        "--gpus",
        "none",
        "--name",
        "near",
        "--with-stdin",
    ]
    head = subprocess.Popen(up, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        said = json.loads(head.stdout.readline())
        with open(said["token_file"]) as f:
            token = f.read().strip()
        far = {
            **env,
            "XDG_STATE_HOME": "/tmp/troupe-far" if not link.problem else str(folder / "far"),
            "TROUPE_TOKEN": token,
        }
        far.update({"TROUPE_SHM": "0"} if link.problem else {"XDG_RUNTIME_DIR": "/tmp"})
        url, fingerprint = said["url"], said.get("fingerprint", "")
        if fingerprint:
            far["TROUPE_FINGERPRINT"] = fingerprint
        joined = subprocess.Popen(
            link.command(program, "join", url, "--gpus", "none", "--name", "far", "--resources", "far=4"),
            env=far,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        subprocess.run([program, "wait", "--nodes", "2", "--timeout", "60s"], env=env, check=True, capture_output=True)
        with troupe.init(url, token=token, fingerprint=fingerprint or None):
            yield link
    finally:
        if joined is not None:
            joined.terminate()
            joined.wait(90)
        head.stdin.close()
        head.wait(90)
        link.remove()


def test_references_between_hosts(link):
    near, far, beside = (troupe.actor(Worker, node=node) for node in ("near", "far", "far"))
    if not link.problem:
        assert all(a != b for a, b in zip(near.host(), far.host(), strict=True)) and far.host() == beside.host()
    before = link.crossed()
    assert far.crc(near.make.remote(1)) == crc(1), "a result of the first host"
    assert near.crc(far.make.remote(2)) == crc(2), "a result of the second"
    assert far.crc(troupe.put(near.make(3))) == crc(3), "a value of the driver"
    if not link.problem:
        assert 2 * SIZE < link.crossed() - before < 2.5 * SIZE, "two of the three went that way"
    before = link.crossed()
    assert beside.crc(far.make.remote(4)) == crc(4)
    assert link.crossed() - before < MIB, "on one host nothing crosses"
    (kept,) = far.put(5)
    assert near.crc_inside([kept]) == beside.crc_inside([kept]) == zlib.crc32(kept.result()) == crc(5), (
        "a value of a worker of the second host"
    )


def test_a_value_crosses_once_for_all_processes_of_a_host(link):
    with troupe.Cluster(
        "ranks", Worker, config=troupe.WorkerConfig(world_size=4, resources_per_worker={"far": 1})
    ) as ranks:
        for value in (Worker().make(6), troupe.put(Worker().make(6))):
            before = link.crossed()
            assert ranks.crc_of_all(value) == [crc(6)] * 4
            if not link.problem:
                assert SIZE < link.crossed() - before < 1.5 * SIZE
