"""Whether rollouts lose a group, train one twice, or generate a finished turn again.

A head, two processes that run the rollouts (one stands by), rollout workers, reward workers, and a driver that puts
prompts and trains. Every two seconds one of them is killed and started again. Each generated turn, each finished turn
and each trained group is a line in a file.

    .venv/bin/python benchmarks/python/soak_rollouts.py --seconds 300
"""

import argparse
import collections
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

COMMON = """
import os, sys, threading, time, troupe
DIR = os.environ["DIR"]
PROMPTS, SIBLINGS, TURNS = (int(n) for n in os.environ["SHAPE"].split())
def note(name, *words):
    fd = os.open(f"{DIR}/{name}", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    os.write(fd, (" ".join(str(w) for w in (time.time_ns(), *words)) + "\\n").encode())
    os.fsync(fd)
    os.close(fd)
def lines(name):
    try:
        return [line.split() for line in open(f"{DIR}/{name}")]
    except FileNotFoundError:
        return []
def begin():
    while True:
        try:
            return troupe.init(os.environ["HEAD"], "soak")
        except troupe.Error:
            time.sleep(0.2)  # the head is being killed
begin()
"""

ENGINE = """
while True:
    try:
        r = troupe.Rollouts("soak", siblings=SIBLINGS, turns=TURNS, fields=["reward"], open=PROMPTS)
        break
    except troupe.Error:
        time.sleep(0.2)
threading.Event().wait()
"""

ROLLOUT = """
r = troupe.Rollouts.attach("soak")
for sample in r.samples():
    for turn in sample:
        name = (sample.group, sample.index, turn.index)
        note("generated", *name, sample.attempt)
        time.sleep(0.002)
        tokens = [sample.prompt, sample.index, turn.index]
        # every other turn is larger than what its event can hold
        if turn.finish(tokens=tokens, logprobs=b"x" * (200 + 20_000 * (turn.index % 2))):
            note("finished", *name, sample.attempt)
"""

REWARD = """
r = troupe.Rollouts.attach("soak")
while True:
    with r.scoring("reward", 8) as samples:
        for sample in samples:
            assert [turn["tokens"] for turn in sample.turns] == [[sample.prompt, sample.index, i] for i in range(TURNS)]
            r.set(sample, reward=float(sample.index))
"""

DRIVER = """
r = troupe.Rollouts.attach("soak")
def put():
    number = r.stats()["numbers"].get("data", 0)
    while not os.path.exists(f"{DIR}/enough") or number % PROMPTS:
        number += 1
        r.put(number, number=number, source="data")
    note("put", number)
threading.Thread(target=put, daemon=True).start()
known = {int(words[1]) for words in lines("trained")}  # the trainer's checkpoint
version = r.stats()["version"]
while True:
    batch = r.batch(groups=4, timeout=1) or r.batch(groups=1, timeout=1)
    if batch is None:
        continue
    for group in batch:
        assert [sample.fields["reward"] for sample in group.samples] == [float(i) for i in range(SIBLINGS)]
        for sample in group.samples:
            assert [turn["tokens"] for turn in sample.turns] == [[group.prompt, sample.index, i] for i in range(TURNS)]
        if group.id not in known:  # otherwise this step is in the checkpoint, and was not marked before the driver died
            note("trained", group.id, group.prompt)
            known.add(group.id)
    batch.done()
    version += 1
    r.set_version(version)
"""


class Trial:
    def __init__(self, root: pathlib.Path, shape: tuple[int, int, int], workers: int) -> None:
        self.root, self.store, self.shape = root, root / "store", shape
        self.troupe = str(pathlib.Path(__file__).parents[2] / "bin" / "troupe")
        self.port = 0
        self.start_head()
        codes = [("engine", ENGINE)] * 2 + [("rollout worker", ROLLOUT)] * workers + [("reward worker", REWARD)] * 2
        self.codes = [*codes, ("driver", DRIVER)]
        self.processes = [self.start(kind, code) for kind, code in self.codes]
        self.kills: collections.Counter[str] = collections.Counter()
        self.in_memory = [0, 0]  # groups and turns that a driver with its state in memory would have lost

    def start_head(self) -> None:
        command = [self.troupe, "up", "--json", "--store", str(self.store), "--listen", f"127.0.0.1:{self.port}"]
        with open(self.root / "head.log", "a") as errors:
            self.head = subprocess.Popen([*command, "--gpus", "none"], stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.head.stdout is not None
        said = json.loads(self.head.stdout.readline())
        self.port = int(said["url"].rsplit(":", 1)[1])

    def start(self, kind: str, code: str) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "DIR": str(self.root),
            "SHAPE": " ".join(map(str, self.shape)),
            "HEAD": f"127.0.0.1:{self.port}",
            "TROUPE_TOKEN_FILE": str(self.store / "token"),
        }
        with open(self.root / f"{kind}.log", "ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-c", COMMON + code], env=env, stdout=subprocess.DEVNULL, stderr=errors
            )

    def fault(self, kind: str, rnd: random.Random) -> None:
        self.kills[kind] += 1
        if kind == "head":
            self.head.kill()
            self.head.wait()
            self.start_head()
            return
        i = rnd.choice([i for i, (name, _) in enumerate(self.codes) if name == kind])
        self.processes[i].kill()
        self.processes[i].wait()
        if kind == "driver":
            trained = {words[1] for words in self.lines("trained")}
            lost = [words for words in self.lines("finished") if words[1] not in trained]
            self.in_memory[0] += len({words[1] for words in lost})
            self.in_memory[1] += len(lost)
        self.processes[i] = self.start(*self.codes[i])

    def revive(self) -> None:
        """Starts what ended by itself: it met an error that its code does not expect while others died."""
        for i, p in enumerate(self.processes):
            if p.poll() is not None:
                self.kills[f"{self.codes[i][0]} that ended by itself"] += 1
                self.processes[i] = self.start(*self.codes[i])

    def lines(self, name: str) -> list[list[str]]:
        path = self.root / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def stop(self) -> None:
        for p in self.processes:
            p.kill()
            p.wait()
        self.head.terminate()
        self.head.wait(60)

    def result(self, number: int) -> dict[str, object]:
        trained = [int(words[2]) for words in self.lines("trained")]
        finished: dict[tuple[str, ...], int] = {}
        for words in self.lines("finished"):
            finished.setdefault(tuple(words[1:4]), int(words[0]))
        generated = self.lines("generated")
        again = [words for words in generated if int(words[0]) > finished.get(tuple(words[1:4]), 1 << 63)]
        return {
            "prompts": number,
            "trained": len(trained),
            "groups_lost": len(set(range(1, number + 1)) - set(trained)),
            "groups_trained_twice": len(trained) - len(set(trained)),
            "turns_finished": len(finished),
            "turns_cut_short": len(generated) - len(finished),
            "finished_turns_generated_again": len(again),
            "kills": dict(self.kills),
            "a_driver_in_memory_would_have_lost": {"groups": self.in_memory[0], "finished_turns": self.in_memory[1]},
        }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=300)
    options.add_argument("--every", type=float, default=2, help="seconds between two kills")
    options.add_argument("--prompts", type=int, default=64, help="groups that are open at once")
    options.add_argument("--siblings", type=int, default=8)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--workers", type=int, default=3)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--drain", type=float, default=600, help="seconds for the rest, after the last kill")
    given = options.parse_args()
    rnd = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="soak-rollouts-") as folder:
        root = pathlib.Path(folder)
        trial = Trial(root, (given.prompts, given.siblings, given.turns), given.workers)
        try:
            kinds: list[str] = []
            end = time.monotonic() + given.seconds
            while time.monotonic() < end:
                time.sleep(given.every)
                kinds = kinds or rnd.sample(sorted({name for name, _ in trial.codes} | {"head"}), 5)
                trial.fault(kinds.pop(), rnd)
                trial.revive()
            (root / "enough").touch()
            end = time.monotonic() + given.drain
            while True:  # the driver says how many it put; then each of them is trained, or is lost
                put = trial.lines("put")
                number = int(put[-1][1]) if put else 0
                if (put and len({words[2] for words in trial.lines("trained")}) >= number) or time.monotonic() > end:
                    break
                time.sleep(0.2)
                trial.revive()
        finally:
            trial.stop()
        result = trial.result(number)
        print(json.dumps(result, indent=2))
        bad = [name for name in result if name.endswith(("lost", "twice", "again")) and isinstance(result[name], int)]
        failed = not number or any(result[name] for name in bad)
        if failed:
            for log in sorted(root.glob("*.log")):
                print(f"--- {log.name}\n" + log.read_text()[-4000:], file=sys.stderr)
        return int(failed)


if __name__ == "__main__":
    sys.exit(main())
