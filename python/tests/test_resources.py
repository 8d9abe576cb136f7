"""Shares of devices, CPUs, memory, reservations with bundles, and settings that make no sense."""

import threading

import pytest

import stage
import troupe
from troupe import Cluster, Reservation, WorkerConfig


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"world_sizes": 2}, "no field 'world_sizes'; did you mean 'world_size'"), ({"world_size": 2.5}, "world_size=2.5"), ({"world_size": "4"}, "world_size='4'"),
        ({"world_size": True}, "world_size=True"), ({"max_concurrency": -5}, "max_concurrency=-5"), ({"restarts": -1}, "restarts=-1"),
        ({"start_timeout": float("nan")}, "start_timeout=nan"), ({"num_gpus_per_worker": 1.5}, "whole number of devices, or less than one"),
        ({"num_gpus_per_worker": 0.0001}, "thousandths"), ({"num_cpus_per_worker": -1}, "num_cpus_per_worker=-1"),
        ({"memory_per_worker": "4 elephants"}, "memory_per_worker='4 elephants'"), ({"strategy": "PAK"}, "strategy='PAK'"), ({"ordered": 1}, "ordered=1"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(session, fields, words):
    with pytest.raises(troupe.InvalidError, match=words):
        WorkerConfig(**fields)
    if "world_sizes" not in fields:
        with pytest.raises(troupe.InvalidError, match=words):
            Cluster("refused", stage.Given, config={"world_size": 1, **fields}, worker_args=(1,))


def test_shares_of_a_device(session):
    free = troupe.available_resources()
    with Cluster("shares", stage.Stage, config=WorkerConfig(world_size=4, num_gpus_per_worker=0.5, strategy="STRICT_PACK")) as c:
        assert troupe.available_resources()["GPU"] == free["GPU"] - 2
        assert len({tuple(d) for d in c.rank2devices.values()}) == 2, "two to a device"


def test_cpus_memory_and_gpu_actors(session):
    free = troupe.available_resources()
    a = troupe.actor(stage.Stage, num_gpus=1, num_cpus=0.5, memory="1MiB", policy="restart_rank", restarts=1)
    now = troupe.available_resources()
    assert (now["GPU"], now["CPU"], now["memory"]) == (free["GPU"] - 1, free["CPU"] - 0.5, free["memory"] - (1 << 20))
    assert len(a.cluster.rank2devices[0]) == 1
    troupe.kill(a)


def test_a_reservation_of_bundles(session):
    free = troupe.available_resources()["GPU"]
    with Reservation([{"GPU": 2, "CPU": 0.1}] * 3, strategy="STRICT_PACK", name="held-bundles") as r:
        assert troupe.available_resources()["GPU"] == free - 6 and len(set(r.nodes)) == 1 and r.id == "held-bundles"
        with Cluster("on_all", stage.Stage, r) as c:
            assert c.world_size == 3 and all(len(d) == 2 for d in c.rank2devices.values())
            everything = c.rank2devices
        with Cluster("on_some", stage.Stage, r, WorkerConfig(bundles=[2, 0])) as c:
            assert [c.rank2devices[0], c.rank2devices[1]] == [everything[2], everything[0]]
        with pytest.raises(troupe.InvalidError, match="there is no bundle 3"):
            Cluster("on_none", stage.Stage, r, WorkerConfig(bundles=[3]))
    assert troupe.available_resources()["GPU"] == free
    with pytest.raises(troupe.InvalidError, match=r"bundles\[0\] has no resource 'GPUs'; did you mean 'GPU'"):
        Reservation([{"GPUs": 1}])


def test_a_reservation_waits(session):
    total = int(troupe.available_resources()["GPU"])
    first = Reservation([{"GPU": 1}] * total)
    with pytest.raises(troupe.Error):
        Reservation([{"GPU": 1}])
    releasing = threading.Timer(0.5, first.release)
    releasing.start()
    with Reservation([{"GPU": 1}], wait=20) as second:
        assert second.nodes
    releasing.join()
