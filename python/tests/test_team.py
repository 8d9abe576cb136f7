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


@pytest.fixture
def head(tmp_path):
    up = [_core.program_path(), "up", "--json", "--listen", "127.0.0.1:0", "--store", str(tmp_path / "store")]
    with subprocess.Popen(
        [*up, "--gpus", "sim:1x4", "--with-stdin"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield json.loads(process.stdout.readline())
        process.stdin.close()


def test_a_driver_with_the_credential_of_a_team(script, head):
    access = {"TROUPE_URL": head["url"], "TROUPE_TOKEN_FILE": head["token_file"], "TROUPE_FINGERPRINT": ""}
    new = [_core.program_path(), "auth", "new", "team", "--namespace", "red"]
    team = subprocess.run(new, env={**os.environ, **access}, check=True, capture_output=True, text=True, timeout=120)
    done = script(
        DRIVER,
        timeout=300,
        env={**access, "TROUPE_TOKEN_FILE": "", "TROUPE_TOKEN": team.stdout.strip(), "TROUPE_NAMESPACE": "red"},
    )
    for tried, refused in json.loads(done.stdout):
        assert refused == tried
