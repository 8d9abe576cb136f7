"""Drivers with the credential of one namespace instead of the head's token."""

import json
import os
import subprocess

import pytest

from troupe import _core

DRIVER = """
    import json
    import numpy as np
    import troupe, resized, worker_classes
    with troupe.init() as session:
        assert session.namespace == "red", session.namespace
        with troupe.Cluster("pool", resized.Pool, worker_config=troupe.WorkerConfig(world_size=2)) as pool:
            pool.load(7)
            assert not resized.check(pool)
            pool.resize(3)
            assert not resized.check(pool) and pool.world_size == 3
            pool.resize(1)
        config = troupe.WorkerConfig(world_size=2)
        with troupe.Cluster("hostile", worker_classes.Hostile, worker_config=config) as cluster:
            big = np.arange(1 << 20)
            assert all((answer == big).all() for answer in cluster.echo(big))
            value = troupe.put(big)
            assert all((answer == big).all() for answer in cluster.echo(value))
            assert (troupe.get(value) == big).all()
            attack = cluster.attack()
        print(json.dumps(attack))
"""

STORES = """
    import os
    import numpy as np
    import troupe, pipeline_workers

    def all_of(p):
        out = []
        while items := p.take("out", 100, timeout=0):
            out += [item.value for item in items]
        return out

    with troupe.init(working_dir=os.getcwd()) as session:
        with troupe.Cluster("items", pipeline_workers.ItemWorker, worker_config=troupe.WorkerConfig(world_size=2)) as items:
            assert all(folder != os.getcwd() for folder in items.execute_all_sync("folder"))
            streams = {"in": {}, "out": {"sink": True}}
            stages = {"double": {"role": items, "method": "double", "in": "in", "out": "out"}}
            with troupe.Pipeline("line", streams, stages) as p:
                p.pause("double")
                p.put_many("in", list(range(200)))
                p.put("in", np.ones(500_000))
            with troupe.Pipeline("line", streams, stages) as p:
                p.resume("double")
                p.drain(timeout=90)
                small, large = [], []
                for value in all_of(p):
                    (large if isinstance(value, np.ndarray) else small).append(value)
                assert sorted(small) == list(range(0, 400, 2)) and large[0].sum() == 1_000_000, (small, large)
            troupe.Pipeline.remove("line")
        with troupe.Rollouts("r", siblings=2, turns=1) as r:
            r.put({"text": "why?"}, number=1)
            for _ in range(2):
                sample = r.take(timeout=60)
                for turn in sample:
                    assert turn.finish(tokens=np.arange(100_000))
            with r.batch(groups=1, timeout=60) as batch:
                sums = [t["tokens"].sum() for g in batch for s in g.samples for t in s.turns]
            assert sums == [np.arange(100_000).sum()] * 2
        troupe.Rollouts.remove("r")
"""

RAY = """
    import os
    import numpy as np
    import troupe.ray as ray

    @ray.remote
    def double(x):
        return 2 * x

    @ray.remote
    def nested(n):
        return sum(ray.get([double.remote(i) for i in range(n)]))

    @ray.remote(num_gpus=1)
    class Counter:
        def __init__(self):
            self.n = 0
        def add(self, array):
            self.n += int(array.sum())
            return self.n
        def secrets(self):
            return os.environ.get("TROUPE_TOKEN", ""), os.environ.get("TROUPE_TOKEN_FILE", "")

    ray.init(address=os.environ["TROUPE_URL"])
    assert ray.get([double.remote(i) for i in range(20)]) == list(range(0, 40, 2))
    assert ray.get(nested.remote(5)) == 20
    counter = Counter.options(name="one").remote()
    big = ray.put(np.ones(500_000))
    assert ray.get([counter.add.remote(big) for _ in range(3)]) == [500_000, 1_000_000, 1_500_000]
    assert ray.get(ray.get_actor("one").add.remote(big)) == 2_000_000
    group = ray.util.placement_group([{"CPU": 1, "GPU": 1}])
    ray.get(group.ready())
    ray.util.remove_placement_group(group)
    ray.shutdown()
"""


@pytest.fixture
def head(tmp_path):
    up = [_core.program_path(), "up", "--json", "--listen", "127.0.0.1:0", "--store", str(tmp_path / "store")]
    with subprocess.Popen(
        [*up, "--gpus", "sim:1x4", "--with-stdin"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield json.loads(process.stdout.readline())
        process.stdin.close()


@pytest.fixture
def team(head):
    """The environment of a driver with the credential of namespace red."""
    access = {"TROUPE_URL": head["url"], "TROUPE_TOKEN_FILE": head["token_file"], "TROUPE_FINGERPRINT": ""}
    new = [_core.program_path(), "auth", "new", "team", "--namespace", "red"]
    made = subprocess.run(new, env={**os.environ, **access}, check=True, capture_output=True, text=True, timeout=120)
    return {**access, "TROUPE_TOKEN_FILE": "", "TROUPE_TOKEN": made.stdout.strip(), "TROUPE_NAMESPACE": "red"}


def test_a_driver_with_the_credential_of_a_team(script, team):
    done = script(DRIVER, timeout=300, env=team)
    for tried, refused in json.loads(done.stdout):
        assert refused == tried


def test_pipelines_rollouts_and_folders_of_a_team(script, team):
    script(STORES, timeout=300, env=team)
    events = subprocess.run(
        [_core.program_path(), "events", "--json"],
        env={**os.environ, **team},
        check=True,
        capture_output=True,
        text=True,
    )
    assert events.stdout and all(json.loads(line)["namespace"] == "red" for line in events.stdout.splitlines())


def test_a_program_for_ray_of_a_team(script, team):
    script(RAY, timeout=300, env=team)
