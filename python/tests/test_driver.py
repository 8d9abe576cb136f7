"""What a driver serves to its workers."""

import asyncio
import threading
import time

import pytest

import troupe
import worker_classes
from conftest import said
from troupe import register


class Ledger:
    """An object of the driver's."""

    def __init__(self):
        self.entries = []
        self.threads = set()
        self.held = threading.Event()

    def note(self, x):
        self.threads.add(threading.current_thread().name)
        self.entries.append(x)
        return len(self.entries)

    def bad(self):
        raise KeyError("no such account")

    def run(self, function):
        return function(1)

    def hold(self):
        assert self.held.wait(90)
        return "held"

    def leave(self):
        raise SystemExit(3)

    def ask_back(self, worker):
        return worker.echo("from the driver")

    def about(self):
        call = troupe.current_call()
        return [call.method, call.session != "", call.cancelled]

    @register(lane="control")
    def status(self):
        return len(self.entries)


class Board:
    """An object with async methods."""

    def __init__(self):
        self.loops = set()
        self.naps = threading.Event()
        self.cancelled = threading.Event()

    async def note(self, x):
        self.loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return x * 2

    async def nap(self):
        self.naps.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def plain(self):
        self.loops.add(asyncio.get_running_loop())
        return "plain"


@pytest.fixture
def served(session):
    ledger = Ledger()
    handle = troupe.serve(ledger)
    ledger.handle = handle
    yield ledger
    ledger.held.set()
    handle.cluster.shutdown()


@pytest.fixture(scope="module")
def callers(session):
    with troupe.Cluster("callers", worker_classes.Caller, worker_config=troupe.WorkerConfig(world_size=2)) as cluster:
        yield cluster


def test_a_worker_calls_its_driver_while_the_driver_waits_for_it(callers, served):
    assert callers.workers[0].tell("note", "a") == 1, "the driver is blocked in this call, and answers"
    assert callers.execute_all_sync("tell_caller", "note", "b") in ([2, 3], [3, 2])
    assert served.entries == ["a", "b", "b"] and all("troupe-served" in t for t in served.threads)
    assert callers.workers[1].tell("about") == ["about", True, False]


def test_a_driver_that_computes_is_called_too(callers, served):
    f = callers.workers[0].tell.remote("note", 1)
    end = time.monotonic() + 90
    while not served.entries:  # nobody here waits for a completion
        assert time.monotonic() < end
        sum(range(1000))
    assert f.result(90) == 1


def test_the_driver_calls_back_while_it_is_called(callers, served, workers):
    assert callers.workers[0].tell("ask_back", workers.workers[0]) == "from the driver"


def test_exceptions_of_the_driver(callers, served):
    with pytest.raises(troupe.ApplicationError, match="no such account") as e:
        callers.workers[0].tell("bad")
    assert "no such account" in e.value.remote_traceback
    with pytest.raises(troupe.NotFoundError, match="nothing_like_it"):
        callers.workers[0].tell("nothing_like_it")
    with pytest.raises(troupe.Error, match="argument"):
        callers.workers[0].tell("note")
    with pytest.raises(troupe.Error):
        callers.workers[0].tell("leave")
    assert callers.workers[0].tell("note", 1) == 1, "it goes on"


def test_pickles_go_to_what_a_driver_serves_from_every_process_of_the_run(callers, served, script):
    assert callers.workers[0].tell_pickled(4) == 5
    other = script(
        f"""
        import troupe
        troupe.init(namespace="{troupe.init().namespace}")
        handle = troupe.Cluster.attach("{served.handle.cluster.name}").workers[0]
        print(handle.note("plain"), handle.run(lambda x: x + 1))
        """
    )
    assert other.stdout.split() == ["1", "2"]


def test_control_methods_of_a_driver_run_beside_the_others(callers, served):
    held = callers.workers[0].tell.remote("hold")
    until(lambda: served.handle.cluster.info()[0]["calls"])
    assert callers.workers[1].tell("status") == 0
    served.held.set()
    assert held.result(90) == "held"


def test_handles_to_served_objects_are_values_and_have_names(callers, session, workers):
    ledger = Ledger()
    handle = troupe.serve(ledger, name="ledger")
    assert workers.workers[0].forward(handle, "note", 5) == 1 and ledger.entries == [5]
    assert troupe.Cluster.attach("ledger").workers[0].note(6) == 2
    assert handle.note(7) == 3, "and its own driver can call it"
    with pytest.raises(troupe.ExistsError, match="ledger"):
        troupe.serve(ledger, name="ledger")
    handle.cluster.shutdown()
    again = troupe.serve(ledger, name="ledger")
    assert again.note(8) == 4
    again.cluster.shutdown()


def test_a_driver_that_serves_nothing(callers):
    with pytest.raises(troupe.NotFoundError, match="troupe.serve"):
        callers.workers[0].tell("note", 1)
    with pytest.raises(troupe.InvalidError, match="driver itself"):
        troupe.driver()
    with pytest.raises(troupe.InvalidError, match="is a class"):
        troupe.serve(Ledger)


def test_an_object_with_async_methods_has_a_loop_of_its_own(callers, session):
    board = Board()
    handle = troupe.serve(board)
    try:
        assert callers.execute_all_sync("tell", "note", 4) == [8, 8]
        assert callers.workers[0].tell("plain") == "plain" and len(board.loops) == 1
        napping = callers.workers[0].tell.remote("nap")
        # A task that is cancelled before its first step runs nothing of the method.
        assert board.naps.wait(90)
        napping.cancel()
        callers.workers[1].tell("note", 1)
    finally:
        handle.cluster.shutdown()
    assert board.cancelled.wait(90), "its caller gave up, or it ended"


def test_an_asyncio_driver_is_called_on_its_loop(session):
    async def main():
        board = Board()
        handle = troupe.serve(board)
        made = await asyncio.to_thread(
            troupe.Cluster, "loop_callers", worker_classes.LoopCaller, worker_config=troupe.WorkerConfig(world_size=1)
        )
        got = await asyncio.gather(*(made.workers[0].tell.remote("note", n) for n in range(10)))
        assert got == [2 * n for n in range(10)] and board.loops == {asyncio.get_running_loop()}
        await asyncio.to_thread(made.shutdown)
        await asyncio.to_thread(handle.cluster.shutdown)

    asyncio.run(main())


def test_a_loop_that_has_ended_is_said_to_have(callers, session):
    async def main():
        return troupe.serve(Board())

    handle = asyncio.run(main())
    with pytest.raises(troupe.Error, match="event loop that served this has ended"):
        callers.workers[0].tell("note", 1)
    handle.cluster.shutdown()


def test_a_driver_that_is_gone(script, session):
    driver = script(
        """
        import threading
        import worker_classes, troupe

        class Silent:
            def hold(self):
                threading.Event().wait()

        troupe.serve(Silent())
        keeper = troupe.actor(worker_classes.Caller, name="keeper", detached=True)
        asked = keeper.keep.remote("hold")
        import time
        while not troupe.Cluster.attach(f"driver-{troupe.init().session}").info()[0]["calls"]:
            time.sleep(0.01)
        print("held", flush=True)
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        check=False,
    )
    assert driver.stdout.strip() == "held" and driver.returncode == -9
    after = script(
        """
        import troupe
        keeper = troupe.actor("worker_classes.Caller", name="keeper", get_if_exists=True)
        print(keeper.keep("hold")[0])  # after the one that was held has failed
        keeper.cluster.shutdown()
        """,
        timeout=60,
    )
    assert after.stdout.split()[0] in ("WorkerLostError", "NotFoundError", "RefusedError")


def test_the_end_of_a_driver_that_serves(script):
    done = script(
        """
        import threading, time
        import worker_classes, troupe

        class Slow:
            def __init__(self):
                self.began = threading.Event()

            def hold(self):
                self.began.set()
                threading.Event().wait()

        slow = Slow()
        troupe.serve(slow)
        caller = troupe.actor(worker_classes.Caller)
        caller.keep.remote("hold")
        assert slow.began.wait(90)
        print(time.monotonic())
        """
    )
    assert not said(done.stderr) and time.monotonic() - float(done.stdout) < 10, done.stderr


def until(holds, patience=90.0):
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
