"""Roles that workers create: they work as a driver's do, and end with their creator."""

import os
import signal
import time

import pytest

import nested
import troupe
from troupe import _seam

LIMIT = 60.0  # seconds within which everything ends on a busy machine; on a quiet one it takes a tenth of a second


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def roles(session):
    return {r["name"] for r in session.core.ask(_seam.roles(runtime=session.id)).get()}


def until(condition, limit=90.0):
    """Waits for the condition; the seconds that took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < limit, f"not within {limit} s"
        time.sleep(0.005)
    return time.monotonic() - begun


def ends(session, pids, names):
    until(lambda: not any(map(alive, pids)))
    until(lambda: not roles(session) & set(names))


@pytest.fixture
def middle(session):
    handle = troupe.actor(nested.Middle)
    yield handle
    handle.cluster.shutdown()


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("victim", ["top", "middle", "leaf"])
def test_what_a_killed_worker_created_ends_with_it(session, victim, busy):
    top = troupe.actor(nested.Top, name="top")
    try:
        middle, *leaves = top.grow()
        if busy:
            top.occupy()
        pids = {"top": top.pid(), "middle": middle, "leaf": leaves[0]}
        os.kill(pids[victim], signal.SIGKILL)
        below = {"top": [pids["top"], middle, *leaves], "middle": [middle, *leaves], "leaf": leaves}[victim]
        until(lambda: not any(map(alive, below)))
        above = {"top": [], "middle": [pids["top"]], "leaf": [pids["top"], middle]}[victim]
        assert all(map(alive, above)), "the levels above go on"
        if victim != "leaf":  # a failed role keeps its name while its creator lives
            until(lambda: "leaves" not in roles(session))
    finally:
        top.cluster.shutdown()
    ends(session, [pids["top"], middle, *leaves], ["top", "middle", "leaves"])


def test_what_a_worker_created_ends_when_the_worker_does(session):
    top = troupe.actor(nested.Top, name="top")
    pids = [top.pid(), *top.grow()]
    top.cluster.shutdown()
    assert not any(map(alive, pids)), "shutdown returns when the whole tree is gone"
    assert not roles(session) & {"top", "middle", "leaves"}


def test_a_killed_driver_takes_all_levels_with_it(script, session):
    driver = script(
        """
        import nested, time, troupe
        top = troupe.actor(nested.Top, name="top")
        print(top.pid(), *top.grow(), flush=True)
        time.sleep(60)
        """,
        wait=False,
    )
    try:
        pids = [int(p) for p in driver.stdout.readline().split()]
        assert len(pids) == 4, driver.stderr.read()
        driver.send_signal(signal.SIGKILL)
        driver.wait(90)
        until(lambda: not any(map(alive, pids)))
    finally:
        driver.kill()
        driver.communicate()


def test_devices_and_reservations_of_a_killed_worker_are_free_again(session):
    middle = troupe.actor(nested.Middle, name="holder")
    try:
        middle.grow(num_gpus_per_worker=4)
        middle.reserve(8)
        with pytest.raises(troupe.Error):
            troupe.ResourceManager(num_gpus_per_node=8, num_nodes=2)
        os.kill(middle.pid(), signal.SIGKILL)
        begun = time.monotonic()
        with troupe.ResourceManager(num_gpus_per_node=8, num_nodes=2, wait=20.0):
            assert time.monotonic() - begun < LIMIT
    finally:
        middle.cluster.shutdown()


def test_a_restarted_worker_creates_its_roles_under_the_same_names_again(session):
    middle = troupe.actor(nested.Middle, name="phoenix", policy="restart_rank", restarts=2)
    try:
        first = middle.grow("feathers")
        os.kill(middle.pid(), signal.SIGKILL)
        until(lambda: not any(map(alive, first)))
        middle.cluster.wait_ready(20)
        second = middle.grow("feathers")
        assert not set(first) & set(second)
    finally:
        middle.cluster.shutdown()
    ends(session, second, ["feathers"])


def test_a_role_that_ends_with_the_run_outlives_its_creator(script, session):
    done = script(
        """
        import nested, os, signal, time, troupe
        middle = troupe.actor(nested.Middle)
        pids = middle.grow("keepers", lifetime="run")
        os.kill(middle.pid(), signal.SIGKILL)
        keepers = troupe.Cluster.attach("keepers")
        deadline = time.monotonic() + 10
        while middle.cluster.health()[0]["state"] != "failed" and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)  # longer than the end of roles of a dead worker takes
        assert keepers.execute_all_sync("pid") == pids
        print(*pids)
        """
    )
    assert not any(alive(int(p)) for p in done.stdout.split()), "the driver ends them in order"


def test_values_of_any_kind_travel_between_all_processes_of_a_run(session, middle, workers):
    middle.grow()
    leaf = middle.leaf()
    offset = 5
    assert leaf.apply(lambda x: x + offset, 1) == 6, "from the driver to a worker's worker"
    assert troupe.Cluster.attach("leaves").workers[1].apply(lambda: {1, 2}) == {1, 2}
    other = troupe.actor(nested.Leaf)
    assert other.apply(lambda: leaf.apply(lambda: 1 + 2j)) == 1 + 2j, "from a worker to another's worker"
    other.cluster.shutdown()


def test_another_namespace_has_no_access_to_roles_of_a_run(session, middle, script):
    middle.grow()
    other = script(
        """
        import troupe
        troupe.init(namespace="elsewhere")
        for name in ("leaves",):
            try:
                troupe.Cluster.attach(name)
            except troupe.NotFoundError:
                print("unknown")
        """
    )
    assert other.stdout.split() == ["unknown"]


def test_a_worker_serves_objects(session, middle):
    middle.grow("tellers")
    handle = middle.serve_ledger()
    leaf = middle.leaf()
    assert leaf.tell("note", "from a leaf") == 1, "the workers that it created know it as their driver"
    assert handle.note({1, 2}) == 2
    assert middle.entries() == ["from a leaf", {1, 2}]
    assert middle.beside() == "beside", "its own methods beside the main thread run as before"
    named = middle.serve_ledger("books")
    assert troupe.get_actor("books").note(1) == named.note(2) - 1 == 1


def test_remote_functions_classes_by_value_and_engines_in_a_worker(session, middle):
    assert middle.square([1, 2, 3]) == [1, 4, 9]
    pid, value = middle.by_value()
    assert pid != middle.pid() and value == {1, 2}


def test_an_async_worker_creates_actors(session):
    top = troupe.actor(nested.AsyncTop)
    assert top.ask([2, 1]) == [1, 2]
    top.cluster.shutdown()


def test_shutdown_in_a_worker_ends_what_it_created_and_nothing_else(session, middle):
    pids = middle.grow("short")
    assert middle.end() is True
    assert not any(map(alive, pids)) and "short" not in roles(session)
    middle.grow("short")
