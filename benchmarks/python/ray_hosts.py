"""Large values of programs on troupe.ray between hosts, and where RAY_PYTHON names an interpreter that has it, on Ray.

    make bench-ray-hosts RAY_PYTHON=/path/to/python        # needs root: it makes network namespaces
    make bench-ray-hosts ROWS=result,forward ROUNDS=5

The driver and the head are on one host, the actors a and b on one each. The systems take turns.
head: MiB over the link of the driver's host in one round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
ROWS = ("result", "put_call", "get_of_put", "forward", "results_8")
PATIENCE = 120.0  # seconds for one round, or for a start

# A /tmp of its own that still shows the checkout, which may lie in /tmp.
OWN_TMP = """
root=$1; shift
mount --make-rprivate /
mount --bind "$root" /mnt
mount -t tmpfs tmpfs /tmp
[ -d "$root" ] || { mkdir -p "$root"; mount --move /mnt "$root"; }
exec "$@"
"""


def drive(address: str, size: int) -> None:
    """Measures rows, whose names come on stdin."""
    import numpy
    import ray

    ray.init(address=address, log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Holder:
        def __init__(self) -> None:
            self.array = numpy.ones(size, numpy.uint8)

        def made(self) -> Any:
            return self.array

        def put(self) -> list[Any]:
            return [ray.put(self.array)]

        def size(self, *arrays: Any) -> int:
            return sum(int(x.nbytes) for x in arrays)

        def got(self, refs: list[Any]) -> tuple[int, float]:
            began = time.perf_counter()
            n = sum(int(x.nbytes) for x in ray.get(refs))
            return n, time.perf_counter() - began

    a, b = (Holder.options(resources={name: 1}).remote() for name in "ab")
    ray.get([a.size.remote(), b.size.remote()])
    own = numpy.ones(size, numpy.uint8)

    def result() -> float:
        return took(lambda: ray.get(a.made.remote()).nbytes, size)

    def put_call() -> float:
        return took(lambda: ray.get(a.size.remote(ray.put(own))), size)

    def get_of_put() -> float:
        n, seconds = ray.get(b.got.remote(ray.get(a.put.remote())))
        assert n == size
        return float(seconds)

    def forward() -> float:
        return took(lambda: ray.get(b.size.remote(a.made.remote())), size)

    def results_8() -> float:
        return took(lambda: sum(x.nbytes for x in ray.get([w.made.remote() for w in (a, b) * 4])), 8 * size)

    rows = {f.__name__: f for f in (result, put_call, get_of_put, forward, results_8)}
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(rows[line.strip()]()), flush=True)
    ray.shutdown()


def took(do: Any, expected: int) -> float:
    began = time.perf_counter()
    got = do()
    seconds = time.perf_counter() - began
    assert got == expected, f"{got} bytes instead of {expected}"
    return seconds


class Hosts:
    """Network namespaces behind a bridge; 0 is the driver's."""

    def __init__(self) -> None:
        self.tag = f"rh{os.getpid() % 10000}"
        self.net = f"10.79.{os.getpid() % 250 + 2}"

    def make(self) -> None:
        ip(f"link add {self.tag}br type bridge", f"link set {self.tag}br up")
        for h in range(3):
            ip(
                f"netns add {self.tag}n{h}",
                f"link add {self.tag}o{h} type veth peer name {self.tag}i{h}",
                f"link set {self.tag}i{h} netns {self.tag}n{h}",
                f"link set {self.tag}o{h} master {self.tag}br",
                f"link set {self.tag}o{h} up",
                f"-n {self.tag}n{h} addr add {self.address(h)}/24 dev {self.tag}i{h}",
                f"-n {self.tag}n{h} link set {self.tag}i{h} up",
                f"-n {self.tag}n{h} link set lo up",
            )

    def address(self, host: int) -> str:
        return f"{self.net}.{host + 1}"

    def on(self, host: int, command: list[str]) -> list[str]:
        own = ["sh", "-ec", OWN_TMP, "sh", ROOT] if host else []
        return ["ip", "netns", "exec", f"{self.tag}n{host}", *own, *command]

    def crossed(self) -> int:
        total = 0
        for way in ("rx_bytes", "tx_bytes"):
            with open(f"/sys/class/net/{self.tag}o0/statistics/{way}") as f:
                total += int(f.read())
        return total

    def remove(self) -> None:
        for words in (*(f"netns del {self.tag}n{h}" for h in range(3)), f"link del {self.tag}br"):
            subprocess.run(["ip", *words.split()], capture_output=True)


def ip(*commands: str) -> None:
    for words in commands:
        subprocess.run(["ip", *words.split()], check=True)


class System:
    """A head, two nodes and a driver."""

    def __init__(self, name: str, python: str, hosts: Hosts, folder: str) -> None:
        self.name, self.python, self.hosts = name, python, hosts
        self.processes: list[subprocess.Popen[bytes]] = []
        self.driver: Any = None
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("TROUPE_", "RAY_"))}
        self.env.update(XDG_STATE_HOME=folder, XDG_RUNTIME_DIR=folder, RAY_TMPDIR=folder)
        self.env.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")

    def begin(self, mib: int) -> None:
        ours = self.name == "troupe.ray"
        start = [self.python, "-m", "troupe.ray.scripts" if ours else "ray.scripts.scripts", "start", "--block"]
        start += ["--num-cpus", "4", "--num-gpus", "0", *([] if ours else ["--disable-usage-stats"])]
        head = ["--head", "--port", "0" if ours else "6399", "--node-ip-address", self.hosts.address(0)]
        printed = self.start(0, [*start, *head, *([] if ours else ["--include-dashboard=false"])])
        address, variables = f"{self.hosts.address(0)}:6399", ""
        if ours:  # it prints the command to run on the other hosts
            variables, _, rest = printed.rpartition("ray start --address=")
            address, variables = rest.partition("\n")[0].strip("'"), variables.rpartition("\n")[2]
        for host, label in ((1, "a"), (2, "b")):
            own = [] if ours else ["--node-ip-address", self.hosts.address(host)]
            self.start(host, [*start, "--address", address, "--resources", json.dumps({label: 1}), *own], variables)
        script = [os.path.abspath(__file__), "--drive", address, "--mib", str(mib)]
        self.driver = self.spawn(0, [self.python, *(["-m", "troupe.ray"] if ours else []), *script], subprocess.PIPE)
        self.line(self.driver, "ready")

    def spawn(self, host: int, command: list[str], stdin: int, variables: str = "") -> subprocess.Popen[bytes]:
        made = subprocess.Popen(
            ["sh", "-c", f"{variables} exec {shlex.join(self.hosts.on(host, command))}"],
            env=self.env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            bufsize=0,  # otherwise select does not see what a buffer has
            cwd=HERE,
            start_new_session=True,
        )
        self.processes.append(made)
        return made

    def start(self, host: int, command: list[str], variables: str = "") -> str:
        """Starts a head or a node, and returns what it has printed when it runs."""
        process = self.spawn(host, command, subprocess.DEVNULL, variables)
        said = ""
        while "ray stop" not in said:
            said += self.line(process, "")
        return said

    def line(self, process: Any, prefix: str) -> str:
        """Returns the next line of output with a prefix."""
        end = time.monotonic() + PATIENCE
        while select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            line = process.stdout.readline().decode()
            if not line:
                raise RuntimeError(f"{self.name}: {shlex.join(process.args)} has ended")
            if line.startswith(prefix):
                return line
        raise RuntimeError(f"{self.name}: {shlex.join(process.args)} says nothing for {PATIENCE:.0f} s")

    def measure(self, row: str) -> tuple[float, float]:
        """The milliseconds of one round, and the MiB over the driver's link."""
        before = self.hosts.crossed()
        self.driver.stdin.write(f"{row}\n".encode())
        seconds = float(self.line(self.driver, ""))
        return seconds * 1e3, (self.hosts.crossed() - before) / (1 << 20)

    def close(self) -> None:
        for process in reversed(self.processes):
            if process is self.driver:
                self.driver.stdin.close()
            else:
                process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, with commas between")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive:
        drive(args.drive, args.mib << 20)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = tempfile.mkdtemp(prefix="rh-")
    hosts = Hosts()
    systems: list[System] = []
    try:
        hosts.make()
        for name, python in (("troupe.ray", sys.executable), ("ray", os.environ.get("RAY_PYTHON"))):
            if python:
                own = os.path.join(folder, name)
                os.mkdir(own)
                systems.append(System(name, python, hosts, own))
                systems[-1].begin(args.mib)
        print(f"{'row':<14}" + "".join(f"{s.name + ' ms':>15}{'worst':>9}{'head':>8}" for s in systems), flush=True)
        for row in args.rows.split(","):
            taken: dict[str, list[tuple[float, float]]] = {s.name: [] for s in systems}
            for round in range(args.rounds + 1):
                for system in systems:
                    found = system.measure(row)
                    if round:  # the first one is not counted
                        taken[system.name].append(found)
            shown = ""
            for s in systems:
                times, mib = zip(*taken[s.name], strict=True)
                shown += f"{statistics.median(times):15.0f}{max(times):9.0f}{statistics.median(mib):8.1f}"
            print(f"{row:<14}{shown}", flush=True)
    finally:
        for system in systems:
            system.close()
        hosts.remove()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
