"""Workers with a credential of their own instead of the head's token: calls go as always, everything else is refused."""

import json
import subprocess

from troupe import _core

DRIVER = """
    import json
    import numpy as np
    import troupe, worker_classes
    with troupe.init():
        config = troupe.WorkerConfig(world_size=2)
        with troupe.Cluster("confined", worker_classes.Hostile, worker_config=config) as cluster:
            big = np.arange(1 << 20)
            assert all((answer == big).all() for answer in cluster.echo(big))
            print(json.dumps(cluster.attack()))
            assert cluster.rank_of() == [0, 1]
"""


def test_confined_workers(script, tmp_path):
    up = [_core.program_path(), "up", "--json", "--listen", "127.0.0.1:0", "--store", str(tmp_path / "store")]
    up += ["--gpus", "sim:1x2", "--with-stdin", "--confine-workers"]
    with subprocess.Popen(up, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
        said = json.loads(head.stdout.readline())
        access = {"TROUPE_URL": said["url"], "TROUPE_TOKEN_FILE": said["token_file"], "TROUPE_FINGERPRINT": ""}
        done = script(DRIVER, env={**access, "TROUPE_NAMESPACE": "confined"})
        head.stdin.close()
    for tried, refused in json.loads(done.stdout):
        assert refused == tried
