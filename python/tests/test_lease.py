"""A driver that is killed: what it held is free at once, not when its lease has expired."""

import signal
import time

import pytest

import troupe

HELD = {
    "a role": """
        config = troupe.WorkerConfig(world_size=2, num_gpus_per_worker=8)
        cluster = troupe.Cluster("holder", worker_classes.BasicWorker, worker_config=config)
        print(len(cluster.workers), flush=True)
    """,
    "a reservation": """
        manager = troupe.ResourceManager(num_gpus_per_node=8, num_nodes=2)
        print(manager.num_nodes, flush=True)
    """,
    "a role on a reservation": """
        manager = troupe.ResourceManager(num_gpus_per_node=8, num_nodes=2)
        cluster = troupe.Cluster("holder", worker_classes.BasicWorker, manager, troupe.WorkerConfig(device_mapping=list(range(16)), num_gpus_per_worker=8))
        print(len(cluster.workers), flush=True)
    """,
}


@pytest.mark.parametrize("held", HELD)
def test_a_killed_driver_holds_its_devices_no_longer(script, session, held):
    driver = script(
        f"""
        import time
        import worker_classes, troupe
        troupe.init(lease=600)
        {HELD[held].strip()}
        time.sleep(600)
        """,
        wait=False,
    )
    try:
        assert driver.stdout.readline().strip() == "2", driver.stderr.read()
        with pytest.raises(troupe.Error):  # they are all held
            troupe.ResourceManager(num_gpus_per_node=8, num_nodes=2)
        driver.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        driver.wait(90)
        with troupe.ResourceManager(num_gpus_per_node=8, num_nodes=2, wait=90.0):
            took = time.monotonic() - killed
        assert took < 60, f"the devices were free after {took:.1f} s"
    finally:
        driver.kill()
        driver.communicate()


def test_a_reservation_that_comes_too_late_leaves_nothing_behind(session):
    """The hold that was noted for it is removed although its time is over: the error says nothing of that."""
    with troupe.ResourceManager(num_gpus_per_node=8, num_nodes=2), pytest.raises(troupe.TimedOutError) as caught:
        troupe.ResourceManager(num_gpus_per_node=8, num_nodes=2)
    assert "bucket" not in str(caught.value)
