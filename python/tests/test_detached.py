"""Detached roles: they outlive their driver, however it ends, until they are shut down."""

import os
import signal

import pytest

import troupe
import worker_classes

# How a driver may end, as its last lines; SIGINT and SIGKILL are sent to one that waits.
ENDINGS = {
    "normally": "",
    "with sys.exit": "sys.exit(3)",
    "with os._exit": "os._exit(4)",
    "with an exception": "raise RuntimeError('the driver fails')",
    "with shutdown": "troupe.shutdown()",
    "in a session's with": "\n        with troupe.init(): pass",
    "in the role's with": "\n        with handle.cluster: pass",
    "in the role's with, by an exception": "\n        with handle.cluster: raise RuntimeError('the driver fails')",
    "in a call": "handle.sleep.remote(60)",
    "by SIGINT": signal.SIGINT,
    "by SIGTERM": signal.SIGTERM,
    "by SIGKILL": signal.SIGKILL,
}

MADE = {
    "cluster": (
        'troupe.Cluster("kept", worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=2, '
        "num_gpus_per_worker=1, detached=True)).workers[0]"
    ),
    "actor": 'troupe.actor(worker_classes.BasicWorker, name="kept", detached=True)',
    "on a manager": "on_manager()",
}


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("made", "ending"),
    [("cluster", e) for e in ENDINGS] + [("actor", e) for e in ("normally", "by SIGINT")]
    + [("on a manager", "normally"), ("on a manager", "by SIGKILL")],
)  # fmt: skip
def test_a_detached_role_outlives_its_driver(script, made, ending):
    how = ENDINGS[ending]
    signalled = not isinstance(how, str)
    driver = script(
        f"""
        import os, sys, time
        import worker_classes, troupe
        troupe.init(lease=2)
        def on_manager():
            manager = troupe.ResourceManager(num_gpus_per_node=2, num_nodes=1)
            config = troupe.WorkerConfig(device_mapping=[0, 1], detached=True)
            return troupe.Cluster("kept", worker_classes.BasicWorker, manager, config).workers[0]
        handle = {MADE[made]}
        owned = troupe.actor(worker_classes.BasicWorker, name="owned")
        owned.echo(1)
        print(handle.pid(), flush=True)
        {"time.sleep(60)" if signalled else how}
        """,
        wait=False,
    )
    try:
        pid = int(driver.stdout.readline() or 0)
        assert pid, driver.stderr.read()
        if signalled:
            driver.send_signal(how)
        _, err = driver.communicate(timeout=90)
        assert "troupe: at exit" not in err, err
        after = script(
            """
            import time, troupe
            end = time.monotonic() + 80
            while True:  # until the driver's other role is known to be over, and so the driver to be gone
                try:
                    troupe.Cluster.attach("owned")
                except troupe.NotFoundError:
                    break
                except troupe.Error:
                    pass
                assert time.monotonic() < end, "the other role is still there"
                time.sleep(0.05)
            kept = troupe.Cluster.attach("kept")
            print(kept.workers[0].pid())
            print(kept.execute_all_sync("echo", "still here")[0])
            """,
        )
        assert after.stdout.split("\n")[:2] == [str(pid), "still here"], (after.stdout, after.stderr, err)
        assert running(pid)
    finally:
        driver.kill()
        driver.communicate()
        gone = script(
            """
            import troupe
            troupe.Cluster.attach("kept").shutdown()
            try:
                troupe.Cluster.attach("kept")
            except troupe.NotFoundError:
                print("gone")
            """,
            check=False,
        )
    assert gone.stdout.strip() == "gone"
    assert not running(pid)


def test_a_detached_role_needs_a_head_that_outlives_the_driver(session):
    config = troupe.WorkerConfig(world_size=1, detached=True)
    with pytest.raises(troupe.RefusedError, match=r"kept cannot be detached.*private.*`troupe up`"):
        troupe.Cluster("kept", worker_classes.BasicWorker, worker_config=config)
    with pytest.raises(troupe.RefusedError, match=r"`troupe up`"):
        troupe.actor(worker_classes.BasicWorker, detached=True)
    with troupe.Cluster("kept", worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=1)) as cluster:
        assert running(cluster.workers[0].pid())  # nothing of the name is left
        assert os.getpid() != cluster.workers[0].pid()


@pytest.mark.parametrize("lease", [-1, 0.5, 86_401, float("nan"), float("inf"), True, "15", None])
def test_a_lease_is_checked_by_name(lease):
    with pytest.raises(troupe.InvalidError, match=r"lease=.* must be 1 to 86400 seconds, or 0 for the default"):
        troupe.init(lease=lease)
