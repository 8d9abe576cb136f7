"""Shares of devices, CPUs, memory, reservations with bundles, and settings that make no sense."""

import threading

import pytest

import troupe
import worker_classes
from troupe import Cluster, Reservation, WorkerConfig


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"world_sizes": 2}, "no field 'world_sizes'; did you mean "
                             "'world_size'"), ({"world_size": 2.5}, "world_size=2.5"), ({"world_size": "4"}, "world_size='4'"),
        ({"world_size": True}, "world_size=True"), ({"max_concurrency": -5}, "max_concurrency=-5"), ({"restarts": -1}, "restarts=-1"),
        ({"start_timeout": float("nan")}, "start_timeout=nan"), ({"num_gpus_per_worker": 1.5}, "whole number of devices, or less than "
                                                                                               "one"),
        ({"num_gpus_per_worker": 0.0001}, "thousandths"), ({"num_cpus_per_worker": -1}, "num_cpus_per_worker=-1"),
        ({"memory_per_worker": "4 elephants"}, "memory_per_worker='4 elephants'"), ({"strategy": "PAK"}, "strategy='PAK'"), ({"ordered": 1}, "ordered=1"),
        ({"resources_per_worker": {"licence": -1}}, r"resources_per_worker\['licence'\]=-1"), ({"resources_per_worker": {"GPU": 1}}, "num_gpus"),
        ({"resources_per_worker": 3}, "resources_per_worker=3 is of type int"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(session, fields, words):
    with pytest.raises(troupe.InvalidError, match=words):
        WorkerConfig(**fields)
    if "world_sizes" not in fields:
        with pytest.raises(troupe.InvalidError, match=words):
            Cluster("refused", worker_classes.Given, config={"world_size": 1, **fields}, worker_args=(1,))


def test_shares_of_a_device(session):
    free = troupe.available_resources()
    with Cluster(
        "shares",
        worker_classes.BasicWorker,
        config=WorkerConfig(world_size=4, num_gpus_per_worker=0.5, strategy="STRICT_PACK"),
    ) as c:
        assert troupe.available_resources()["GPU"] == free["GPU"] - 2
        assert len({tuple(d) for d in c.rank2devices.values()}) == 2, "two to a device"


def test_cpus_memory_and_gpu_actors(session):
    free = troupe.available_resources()
    a = troupe.actor(
        worker_classes.BasicWorker, num_gpus=1, num_cpus=0.5, memory="1MiB", policy="restart_rank", restarts=1
    )
    now = troupe.available_resources()
    assert (now["GPU"], now["CPU"], now["memory"]) == (free["GPU"] - 1, free["CPU"] - 0.5, free["memory"] - (1 << 20))
    assert len(a.cluster.rank2devices[0]) == 1
    troupe.kill(a)


def test_a_reservation_of_bundles(session):
    free = troupe.available_resources()["GPU"]
    with Reservation([{"GPU": 2, "CPU": 0.1}] * 3, strategy="STRICT_PACK", name="held-bundles") as r:
        assert troupe.available_resources()["GPU"] == free - 6 and len(set(r.nodes)) == 1 and r.id == "held-bundles"
        with Cluster("on_all", worker_classes.BasicWorker, r) as c:
            assert c.world_size == 3 and all(len(d) == 2 for d in c.rank2devices.values())
            everything = c.rank2devices
        with Cluster("on_some", worker_classes.BasicWorker, r, WorkerConfig(bundles=[2, 0])) as c:
            assert [c.rank2devices[0], c.rank2devices[1]] == [everything[2], everything[0]]
        with pytest.raises(troupe.InvalidError, match="there is no bundle 3"):
            Cluster("on_none", worker_classes.BasicWorker, r, WorkerConfig(bundles=[3]))
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


def test_parts_of_bundles_go_to_actors(session):
    free = troupe.available_resources()
    with Reservation(
        [{"GPU": 0.5, "CPU": 0.1}, {"GPU": 2, "CPU": 0.2}, {"CPU": 0.1}], name="parts", strategy="STRICT_PACK"
    ) as r:
        held = troupe.available_resources()
        share = troupe.actor(worker_classes.BasicWorker, reservation=r, bundle=0)  # all of it
        halves = [troupe.actor(worker_classes.BasicWorker, num_gpus=0.5, reservation=r, bundle=1) for _ in range(2)]
        whole = troupe.actor(worker_classes.BasicWorker, num_gpus=1, reservation=r)  # of any bundle: only 1 has room
        assert troupe.available_resources() == held, "what a bundle provides is counted once"
        devices = [a.cluster.rank2devices[0] for a in (share, *halves, whole)]
        assert all(len(d) == 1 for d in devices)
        assert devices[1] == devices[2] != devices[3]
        assert {a.cluster.worker2nodes[a.name] for a in (share, *halves, whole)} == set(r.nodes)
        with Cluster(
            "share_of_bundle", worker_classes.BasicWorker, r, WorkerConfig(bundles=[2])
        ) as c:  # without devices: on the node of its bundle
            assert list(c.worker2nodes.values()) == [r.nodes[2]]
        troupe.kill(halves[0])
        with Cluster(
            "half_of_bundle", worker_classes.BasicWorker, r, WorkerConfig(bundles=[1], num_gpus_per_worker=0.5)
        ) as c:
            assert c.rank2devices[0] == devices[2]
        for make, words in (
            (
                lambda: Cluster("two_shares", worker_classes.BasicWorker, r, WorkerConfig(bundles=[0, 1])),
                "shares of devices",
            ),
            (lambda: troupe.actor(worker_classes.BasicWorker, reservation=r), "give bundle="),
            (lambda: troupe.actor(worker_classes.BasicWorker, bundle=0), "none is given"),
            (lambda: troupe.actor(worker_classes.BasicWorker, reservation=r, bundle=7), "no bundle 7"),
            (lambda: troupe.actor(worker_classes.BasicWorker, reservation="parts", bundle=0), "type str"),
        ):
            with pytest.raises(troupe.InvalidError, match=words):
                make()
        with pytest.raises(troupe.Error, match="bundle"):
            troupe.actor(worker_classes.BasicWorker, num_gpus=4, reservation=r, bundle=1)
        for a in (share, halves[1], whole):
            troupe.kill(a)
    assert troupe.available_resources() == free


def test_a_reservation_has_a_name_of_its_run(session, script):
    with Reservation([{"GPU": 1, "CPU": 0.5}] * 2, name="named") as r:
        again = Reservation.attach("named")
        assert (again.nodes, again.bundles) == (r.nodes, [{"GPU": 1.0, "CPU": 0.5}] * 2)
        with Cluster("on_attached", worker_classes.BasicWorker, again, WorkerConfig(bundles=[1])) as c:
            assert len(c.rank2devices[0]) == 1
        with pytest.raises(troupe.InvalidError, match="another process"):
            again.release()
        with pytest.raises(troupe.ExistsError, match=r"holds it since .* `troupe release named`"):
            Reservation([{"GPU": 1}], name="named")
        script("import troupe\nwith troupe.Reservation([{'GPU': 1}], name='named') as r: print(r.id)")  # another run
    with pytest.raises(troupe.NotFoundError, match="named"):
        Reservation.attach("named")


def test_totals_that_a_node_declares(script):
    p = script(
        """
        import troupe
        from worker_classes import BasicWorker

        with troupe.init(resources={"CPU": 100, "GPU": 8, "memory": "64GiB", "licence": 2}):
            print(troupe.cluster_resources())
            a = [troupe.actor(BasicWorker, num_cpus=40, num_gpus=2, resources={"licence": 0.5}) for _ in range(2)]
            print(troupe.available_resources())
            with troupe.Reservation([{"licence": 1, "CPU": 20}]) as r:
                b = troupe.actor(BasicWorker, reservation=r, bundle=0, resources={"licence": 1})
                with troupe.Cluster("c", BasicWorker, r) as c:
                    assert c.world_size == 1
                troupe.kill(b)
            try:
                troupe.actor(BasicWorker, resources={"licence": 3})
            except troupe.Error as err:
                print(err)
        for wrong in ({"GPU": 1.5}, {"CPU": -1}, {"licence": -1}, 7):
            try:
                troupe.init(resources=wrong)
            except troupe.InvalidError as err:
                print(err)
        """,
        env={"TROUPE_URL": "", "TROUPE_TOKEN_FILE": "", "TROUPE_FINGERPRINT": ""},
    )
    lines = p.stdout.splitlines()
    assert lines[0] == str({"CPU": 100.0, "GPU": 8.0, "memory": float(64 << 30), "licence": 2.0})
    assert lines[1] == str({"CPU": 20.0, "GPU": 4.0, "memory": float(64 << 30), "licence": 1.0})
    assert "licence" in lines[2]
    assert [line.split("=")[0] for line in lines[3:]] == [
        "resources['GPU']",
        "resources['CPU']",
        "resources['licence']",
        "resources",
    ]
