"""Whether a device has one holder, whoever asks.

Roles, Ray actors, tasks and placement groups race for eight simulated devices of one head while the head, its agent and
the drivers are killed. A witness in every worker takes a lock for each half of a device that it holds, which ends with
its process; a lock that is taken already is a violation.

    .venv/bin/python benchmarks/python/one_book.py --seconds 300
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

WITNESS = '''
import fcntl, os, random, time
DIR = os.environ["WITNESS"]

def hold(devices, halves, seconds):
    """Holds devices for a while, and records a violation where another has them."""
    locks = []
    for device in devices:
        got = 0
        for half in (0, 1):
            f = open(f"{DIR}/{device}.{half}", "w")
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                f.close()
                continue
            locks.append(f)
            got += 1
            if got == halves:
                break
        with open(f"{DIR}/{'held' if got == halves else 'violations'}", "a") as out:
            out.write(f"{time.time():.3f} {os.getpid()} {device} {halves}\\n")
    time.sleep(seconds)
    for f in locks:
        f.close()
    return len(locks)
'''

ROLES = """
import os, random, sys, time, troupe, witness
class W(troupe.Worker):
    def work(self, seconds):
        return witness.hold(os.environ["CUDA_VISIBLE_DEVICES"].split(","), 2, seconds)
rnd = random.Random(os.getpid())
while True:
    try:
        with troupe.init(os.environ["HEAD"], "native"):
            while True:
                name = f"r{os.getpid()}-{time.time_ns()}"
                config = troupe.WorkerConfig(world_size=rnd.randint(1, 3), num_gpus_per_worker=1, start_timeout=20)
                with troupe.Cluster(name, W, config=config) as c:
                    c.execute_all_sync("work", rnd.random())
    except Exception as err:
        print("roles:", repr(err)[:200], file=sys.stderr)
        time.sleep(0.5)
"""

RAY = """
import os, random, sys, time, troupe.ray as ray, witness
rnd = random.Random(os.getpid())

@ray.remote
class A:
    def work(self, halves, seconds):
        return witness.hold(ray.get_gpu_ids(), halves, seconds)

@ray.remote(num_gpus=1, max_calls=1)
def task(seconds):
    return witness.hold(ray.get_gpu_ids(), 2, seconds)

def once():
    kind = rnd.randrange(4)
    if kind == 0:
        actors = [A.options(num_gpus=1).remote() for _ in range(rnd.randint(1, 3))]
        ray.get([a.work.remote(2, rnd.random()) for a in actors], timeout=60)
    elif kind == 1:
        actors = [A.options(num_gpus=0.5).remote() for _ in range(rnd.randint(1, 4))]
        ray.get([a.work.remote(1, rnd.random()) for a in actors], timeout=60)
    elif kind == 2:
        ray.get([task.remote(rnd.random()) for _ in range(rnd.randint(1, 4))], timeout=60)
    else:
        group = ray.util.placement_group([{"GPU": 1, "CPU": 0.1}] * rnd.randint(1, 3))
        ray.get(group.ready(), timeout=60)
        where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        a = A.options(num_gpus=1, scheduling_strategy=where).remote()
        ray.get(a.work.remote(2, rnd.random()), timeout=60)
        ray.util.remove_placement_group(group)

import troupe.ray.util.scheduling_strategies
while True:
    try:
        ray.init(os.environ["HEAD"], log_to_driver=False)
        while True:
            once()
    except Exception as err:
        print("ray:", repr(err)[:200], file=sys.stderr)
        ray.shutdown()
        time.sleep(0.5)
"""


class Trial:
    def __init__(self, root: pathlib.Path) -> None:
        self.root, self.store = root, root / "store"
        (root / "witness.py").write_text(WITNESS)
        self.locks = root / "locks"
        self.locks.mkdir()
        self.troupe = str(pathlib.Path(__file__).parents[2] / "bin" / "troupe")
        self.port = 0
        self.start_head()
        self.drivers = [self.driver(code) for code in (ROLES, ROLES, RAY, RAY)]

    def start_head(self) -> None:
        command = [self.troupe, "up", "--json", "--store", str(self.store), "--listen", f"127.0.0.1:{self.port}"]
        path = {"PYTHONPATH": str(self.root), "WITNESS": str(self.locks)}
        with open(self.root / "head.log", "a") as errors:
            self.head = subprocess.Popen(
                [*command, "--gpus", "sim:1x8"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **path},
            )
        assert self.head.stdout is not None
        said = json.loads(self.head.stdout.readline())
        self.port = int(said["url"].rsplit(":", 1)[1])

    def driver(self, code: str) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "WITNESS": str(self.locks),
            "HEAD": f"127.0.0.1:{self.port}",
            "TROUPE_TOKEN_FILE": str(self.store / "token"),
        }
        with open(self.root / "drivers.log", "ab") as errors:
            return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL, stderr=errors)

    def agent(self) -> int:
        """Returns the process of the head's agent; 0: there is none now."""
        for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().split(b"\0")
            except OSError:
                continue
            if words[1:2] == [b"agent"] and str(self.store).encode() in b" ".join(words):
                return int(entry.parent.name)
        return 0

    def fault(self, rnd: random.Random) -> str:
        kind = rnd.choice(["head", "agent", "driver", "driver"])
        if kind == "head":
            self.head.kill()
            self.head.wait()
            time.sleep(rnd.random() * 3)
            self.start_head()
        elif kind == "agent" and (pid := self.agent()):
            os.kill(pid, signal.SIGKILL)
        else:
            i = rnd.randrange(len(self.drivers))
            self.drivers[i].kill()
            self.drivers[i].wait()
            self.drivers[i] = self.driver((ROLES, ROLES, RAY, RAY)[i])
        return kind

    def count(self, name: str) -> int:
        path = self.locks / name
        return len(path.read_text().splitlines()) if path.exists() else 0

    def stop(self) -> None:
        for d in self.drivers:
            d.kill()
            d.wait()
        self.head.terminate()
        self.head.wait(60)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=300)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--every", type=float, default=15, help="seconds between two faults")
    given = options.parse_args()
    rnd = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="one-book-") as folder:
        trial = Trial(pathlib.Path(folder))
        faults: dict[str, int] = {}
        end = time.monotonic() + given.seconds
        try:
            while time.monotonic() < end and not trial.count("violations"):
                time.sleep(min(given.every, max(0.0, end - time.monotonic())))
                if time.monotonic() < end:
                    kind = trial.fault(rnd)
                    faults[kind] = faults.get(kind, 0) + 1
        finally:
            trial.stop()
            result = {"held": trial.count("held"), "violations": trial.count("violations"), "faults": faults}
            print(json.dumps(result), flush=True)
            if result["violations"] or not result["held"]:
                for name in ("drivers.log", "head.log"):
                    sys.stderr.write((trial.root / name).read_text()[-3000:])
    return 1 if result["violations"] or not result["held"] else 0


if __name__ == "__main__":
    sys.exit(main())
