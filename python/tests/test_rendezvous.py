"""The store by which ranks of a role find each other: real workers, replaced and added while others wait."""

import os

import pytest

import meeting
import troupe
from troupe import WorkerConfig


@pytest.fixture(scope="module")
def four(session):
    config = WorkerConfig(world_size=4, policy="restart_rank", restarts=100, stop_grace=0.1)
    with troupe.Cluster("meeting", meeting.Meeting, worker_config=config) as cluster:
        yield cluster


def test_ranks_find_each_other(four):
    pids = four.pid()
    for _ in range(3):  # each time they form the group again
        answers = four.addresses()
        for addresses, total, letters, epoch in answers:
            assert addresses == [f"address {rank} of {pid}" for rank, pid in enumerate(pids)]
            assert (total, letters, epoch) == (10, b"xxxx", four.members().epoch)


def test_changes_of_one_rank(four):
    assert four.workers[0].changes() == [b"other", b"a", b"b", True, True, False, False, True]


def test_a_large_value_is_refused(four):
    with pytest.raises(troupe.Error, match=r"has 524289 bytes; one has at most 524288"):
        four.workers[1].large((512 << 10) + 1)


def test_values_that_together_exceed_a_message(four):
    assert four.many(300 << 10) == [[300 << 10] * 4] * 4


def test_a_wait_names_the_ranks_that_have_not_joined(session):
    with troupe.Cluster("three", meeting.Meeting, worker_config=WorkerConfig(world_size=3)) as cluster:
        first, last = cluster.workers[0].wait_for.remote("nothing", 0.0), cluster.workers[2].wait_for.remote("x", 0.0)
        assert first.result(60)[0] == last.result(60)[0] == "TimedOutError"
        kind, _, text, _ = cluster.workers[0].wait_for("nothing", 0.5)
        assert kind == "TimedOutError" and "ranks [1] have not joined" in text and '"nothing"' in text


def test_a_replaced_rank_ends_the_wait_of_the_others(four):
    four.addresses()
    epoch = four.members().epoch
    waiting = [four.workers[rank].wait_for.remote("never", 300) for rank in (0, 1, 3)]
    four.replace(2, "a test")
    for one in waiting:
        kind, left, text, _ = one.result(60)
        assert (kind, left) == ("MembershipChanged", [2]), text
        assert "form it again" in text
    assert four.workers[0].wait_for("late", 1)[0] == "MembershipChanged"
    for addresses, _, letters, now in four.addresses():
        assert addresses[2] == f"address 2 of {four.workers[2].pid()}" and letters == b"xxxx" and now > epoch


def test_ranks_of_a_resized_role_find_each_other(session):
    with troupe.Cluster("resized", meeting.Meeting, worker_config=WorkerConfig(world_size=1)) as cluster:
        for replicas in (3, 2):
            cluster.addresses()
            cluster.resize(replicas)
            answers = cluster.addresses()
            assert [len(addresses) for addresses, *_ in answers] == [replicas] * replicas


def test_a_driver_has_no_ranks_to_find(session):
    with pytest.raises(troupe.InvalidError, match="in workers alone"):
        troupe.rendezvous()


def _torch():
    if not os.environ.get("TROUPE_TEST_TORCH"):
        pytest.importorskip("torch", reason="torch is not installed; pip install torch, and this runs")


def test_gloo(four):
    _torch()
    assert four.all_reduce(timeout=120) == [[6.0, 6.0]] * 4
    assert "world_size=5" in four.of_another_size()[0]
