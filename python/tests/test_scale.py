"""Roles whose number of workers changes while they work, as their handles see them."""

import pickle
import time

import numpy as np
import pytest

import scaled
import troupe
from troupe import Router, Scatter, Stage, Stream


@pytest.fixture
def made(session):
    """Makes clusters that end with the test."""
    all_of_them = []

    def make(name, cls=scaled.Served, world=2, **config):
        cluster = troupe.Cluster(name, cls, None, troupe.WorkerConfig(world_size=world, **config))
        all_of_them.append(cluster)
        return cluster

    yield make
    for cluster in reversed(all_of_them):
        cluster.shutdown()


def until(condition, seconds=40):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def learned(cluster, world):
    """Asserts that a handle knows the size of its role in every respect."""
    assert cluster.world_size == len(cluster.workers) == cluster.dp_size * cluster.tp_size == world
    assert len(cluster.rank2worker) == len(cluster.health()) == len(cluster.info()) == world
    assert f"{world} workers" in repr(cluster)
    assert cluster.get_rank_info(world - 1).rank == world - 1
    assert [w.rank for w in cluster.workers] == list(range(world))


@pytest.mark.parametrize("policy", ["", "restart_rank"])
def test_ranks_that_a_router_adds_are_loaded_and_the_handle_knows_them(made, policy):
    cluster = made(f"routed-{policy or 0}", policy=policy)
    first = cluster.workers[0]
    with Router(cluster, method="answer") as router:
        assert cluster.load(7) == [0, 1]
        for world in (4, 3, 5, 1, 2):
            router.scale(cluster, world)
            learned(cluster, world)
            assert cluster.workers[0] is first
            answers = [f.result(60) for f in [router.call(i, blocking=False) for i in range(8 * world)]]
            assert {weights for _, weights in answers} == {7}
            assert {rank for rank, _ in answers} == set(range(world))
            assert cluster.load(7) == cluster.execute_all_sync("load", 7) == list(range(world))
            assert cluster.execute_rank_zero_sync("load", 7) == 0
            rows = cluster.rows(np.arange(2 * world))
            assert [int(r) for r in rows[:, 1]] == [r for r in range(world) for _ in range(2)]
            cluster.load(7)


def test_ranks_that_a_pipeline_adds_are_loaded(made):
    cluster = made("staged")
    cluster.load(7)
    stages = {"r": Stage(cluster, "answer", in_="asked", out="answered")}
    with troupe.Pipeline("scaled", {"asked": Stream(), "answered": Stream(sink=True)}, stages) as p:
        p.scale("r", 4)
        learned(cluster, 4)
        p.put_many("asked", range(64))
        answers = []
        while len(answers) < 64:
            answers += [item.value for item in p.take("answered", 64, timeout=40)]
        assert {weights for _, weights in answers} == {7}
        assert {rank for rank, _ in answers} == {0, 1, 2, 3}
        assert cluster.load(8) == [0, 1, 2, 3]
        p.scale("r", 2)
        learned(cluster, 2)
        assert cluster.load(9) == [0, 1]
    troupe.Pipeline.remove("scaled")


def test_another_process_scales_a_role_whose_ranks_take_long_to_load(made, tmp_path):
    cluster = made("slow")
    cluster.load({"wait": str(tmp_path / "{}")})
    (tmp_path / "2").touch()
    stages = {"r": Stage(cluster, "answer", in_="asked")}
    with troupe.Pipeline("slow", {"asked": Stream()}, stages) as p:
        elsewhere = troupe.Pipeline.attach("slow")
        growing = elsewhere.scale("r", 3, blocking=False)
        time.sleep(6)  # longer than a request to a pipeline may last
        assert not growing.done() and cluster.world_size == 2
        with pytest.raises(troupe.BusyError, match="being scaled to 3"):
            elsewhere.scale("r", 4)
        (tmp_path / "2").unlink()
        growing.result(60)
        learned(cluster, 3)
        assert p.stats()["stages"]["r"]["workers"] == 3
        with pytest.raises(troupe.InvalidError, match="pause it instead"):
            elsewhere.scale("r", 0)
    troupe.Pipeline.remove("slow")


def test_a_reference_is_loaded_by_added_ranks(made):
    cluster = made("by-reference")
    cluster.load(troupe.put(np.full(100_000, 3, np.float32)))
    with Router(cluster, method="answer") as router:
        router.scale(cluster, 4)
    assert [w.sum() for w in cluster.loaded()] == [300_000.0] * 4


def test_a_size_that_cannot_be_right_is_refused(made):
    cluster = made("refused")
    pairs = made("pairs", tensor_parallel_size=2)
    with Router(cluster, method="answer") as router:
        cluster.shard(Scatter(["a", "b"]))
        with pytest.raises(
            troupe.RefusedError, match="shard is replayed on new ranks, and its last call gave ranks different"
        ):
            router.scale(cluster, 4)
        learned(cluster, 2)
        cluster.options(mode=troupe.Dispatch.ONE_TO_ALL).shard("all")
        cluster.load("not on 3")
        with pytest.raises(troupe.Error, match="(?s)replay of load.*no room for these weights"):
            router.scale(cluster, 4)
        learned(cluster, 2)
        assert cluster.load(1) == [0, 1]
        with pytest.raises(troupe.InvalidError, match="a replica has 2 workers"):
            router.scale(pairs, 3)
        with pytest.raises(troupe.InvalidError, match="workers='3' is of type str"):
            router.scale(pairs, "3")
        router.scale(pairs, 4)
        learned(pairs, 4)
        assert (pairs.dp_size, pairs.tp_size) == (2, 2)
        router.scale(cluster, 3)
        used, unused = cluster.workers[2], troupe.Cluster.attach("refused").workers[2]
        used.pid()
        router.scale(cluster, 2)
        for gone in (used, unused):
            with pytest.raises(troupe.Error, match="no rank 2"):
                gone.pid()
        with pytest.raises(troupe.InvalidError, match="no rank 2"):
            cluster.get_rank_info(2)


def test_handles_elsewhere_learn_the_new_size(made):
    cluster = made("known")
    attached = troupe.Cluster.attach("known")
    asker = made("asker", scaled.Asker, 1).workers[0]
    asker.know(cluster)
    asker.ask()
    late = made("late-asker", scaled.Asker, 1).workers[0]
    late.know(cluster)  # opened after the role has grown
    before = pickle.dumps(cluster)
    with Router(cluster, method="answer") as router:
        for world in (4, 1):
            router.scale(cluster, world)
            until(lambda world=world: attached.world_size == world)
            learned(attached, world)
            assert attached.load(8) == list(range(world))
            for handle in (asker, late):
                until(lambda handle=handle, world=world: handle.ask() == list(range(world)))
                assert tuple(handle.size()) == (world, world)
    stored = pickle.loads(before)
    until(lambda: stored.load(8) == [0])
    learned(stored, 1)
    late.know(cluster)
    assert tuple(late.size()) == (1, 1)


def test_methods_that_report_a_mesh_after_the_role_was_resized(made):
    cluster = made("meshed")
    with Router(cluster, method="answer") as router:
        router.scale(cluster, 4)
        cluster.update_mesh()
        learned(cluster, 4)
        assert cluster.dp_size == 4
