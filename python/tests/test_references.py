"""References: values that stay where they are, are fetched by the processes that need them, and are freed when nothing
refers to them."""

import asyncio
import dataclasses
import gc
import os
import pickle
import signal
import time

import numpy as np
import pytest

import troupe
from troupe import _reference

LARGE = 1 << 20


@dataclasses.dataclass
class Box:
    inside: object


class Keeper:
    kept = None

    def make(self, n=LARGE, value=1):
        return np.full(n, value, np.uint8)

    def later(self, seconds, n=LARGE):
        time.sleep(seconds)
        return np.ones(n, np.uint8)

    def size(self, x):
        return int(x.nbytes)

    def sum(self, x, *, scale=1):
        return int(x.sum()) * scale

    def kind(self, x):
        return type(x).__name__

    def echo(self, x):
        return x

    def sums(self, xs):
        return [int(x.result().sum()) for x in xs]

    def boxed(self, box):
        return type(box.inside).__name__, troupe.get(box.inside)

    def put(self, n=LARGE):
        return [troupe.put(np.ones(n, np.uint8))]

    def keep(self, x):
        self.kept = x

    def drop(self):
        self.kept = None

    def kept_sum(self):
        return int(self.kept[0].result(90).sum())

    def fail(self):
        raise LookupError("bad luck")

    def pid(self):
        return os.getpid()

    def through(self, other, seconds):
        """Calls the other worker while that one waits for the result of this call."""
        time.sleep(seconds)
        return other.pid()

    def counts(self):
        return _reference.counts()


class AsyncKeeper:
    async def got(self, xs):
        return [int((await x).sum()) for x in xs]

    async def sum(self, x):
        return int(x.sum())


@pytest.fixture(scope="module")
def pair(session):
    a, b = troupe.actor(Keeper), troupe.actor(Keeper)
    yield a, b
    a.cluster.shutdown()
    b.cluster.shutdown()


def until(holds, patience=90.0):
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


before = {}  # counts at the start of a test: this process keeps the newest version of weights that another test has published


def owned():
    return _reference.counts()["owned"] - before["owned"]


@pytest.fixture(autouse=True)
def nothing_left(session):
    before.update(_reference.counts())
    yield
    gc.collect()  # exceptions refer to the frames that they passed
    until(lambda: owned() <= 0 and _reference.counts()["held"] <= before["held"])


def test_put_and_get(pair):
    a, _ = pair
    for value in (None, 7, [1, {"k": (2,)}], np.arange(10), np.arange(LARGE)):
        ref = troupe.put(value)
        assert isinstance(ref, troupe.Reference) and ref.done()
        got = [ref.result(), troupe.get(ref), troupe.get([ref], 5)[0], asyncio.run(_awaited(ref)), a.echo(ref)]
        assert all(np.array_equal(g, value) if isinstance(value, np.ndarray) else g == value for g in got)
    assert troupe.get(troupe.put(np.zeros(LARGE, np.uint8))).flags.writeable
    with pytest.raises(troupe.InvalidError):
        troupe.put(ref)


async def _awaited(x):
    return await x


def test_a_reference_is_equal_by_its_id_and_can_be_pickled(pair):
    a, _ = pair
    ref, other = troupe.put(1), troupe.put(1)
    same = a.echo([ref])[0]
    assert (
        same == ref and hash(same) == hash(ref) and same.id == ref.id and ref != other and len({ref, same, other}) == 2
    )
    assert int(ref.id, 16) >= 0
    copy = pickle.loads(pickle.dumps(ref))
    assert copy == ref and copy.result() == 1
    _reference._pinned.clear()

    class Odd:  # travels as a pickle
        def __init__(self, ref):
            self.ref = ref

    assert a.echo([Odd(other)])[0].ref.result() == 1


def test_arguments_are_values_and_what_is_inside_them_are_references(pair):
    a, b = pair
    for n in (100, LARGE):
        f = a.make.remote(n)
        assert b.sum(f) == n and b.sum(x=f, scale=2) == 2 * n and b.size(troupe.put(np.ones(n, np.uint8))) == n
        assert b.sums([f, a.make.remote(n, 2), troupe.put(np.ones(n, np.uint8))]) == [n, 2 * n, n]
        assert b.kind(f) == "ndarray" and b.kind([f]) == "list"
        assert f.result().nbytes == n, "and the caller may have it as well"
        assert b.sum(f) == n, "also afterwards"
    name, got = b.boxed(Box(a.make.remote(10)))
    assert name == "Reference" and got.sum() == 10
    got = b.echo({"x": [a.make.remote()]})
    assert b.sum(got["x"][0]) == LARGE


def test_a_call_is_sent_while_its_argument_is_not_there(pair):
    a, b = pair
    began = time.monotonic()
    f = a.later.remote(2)
    g = b.size.remote(f)
    assert time.monotonic() - began > 2 or not f.done(), "neither call waits for the value"
    assert b.size.remote(g_ref := b.make.remote(10)).result() == 10 and g_ref.done(), "in order after that one"
    assert g.result(90) == LARGE and time.monotonic() - began > 2


def test_a_call_that_awaits_its_argument_does_not_block_other_callers(pair):
    """The argument is the result of a call that itself calls the same worker."""
    a, b = pair
    pid = b.pid()
    waiting = b.echo.remote(a.through.remote(b, 0.2))
    assert waiting.result(90) == pid


def test_a_failure_is_that_of_all_that_depends_on_it(pair):
    a, b = pair
    f = a.fail.remote()
    g = b.sum.remote(f)
    for x in (g, b.echo.remote(g), b.echo([f])[0]):
        with pytest.raises(LookupError, match="bad luck"):
            x.result(90)
        with pytest.raises(troupe.ApplicationError, match="bad luck"):
            troupe.get([x, troupe.put(1)], 10)


def test_wait_takes_references_and_futures(pair):
    a, b = pair
    ref, slow = troupe.put(1), a.later.remote(0.5, 10)
    inside = b.echo([slow])[0]
    ready, left = troupe.wait([slow, inside, ref], 1, timeout=90)
    assert ready == [ref] and left == [slow, inside] and not inside.done()
    assert troupe.wait([slow, inside], 2, timeout=90)[1] == [] and inside.done()
    with pytest.raises(troupe.TimedOutError):
        b.echo([a.later.remote(1, 10)])[0].result(0.1)


def test_async_workers(session, pair):
    a, _ = pair
    worker = troupe.actor(AsyncKeeper)
    assert worker.sum(a.make.remote()) == LARGE and worker.got([a.make.remote(), a.make.remote(10)]) == [LARGE, 10]
    worker.cluster.shutdown()


def test_a_future_of_all_ranks(session, pair):
    a, _ = pair
    with troupe.Cluster("many", Keeper, worker_config=troupe.WorkerConfig(world_size=2)) as many:
        f = many.execute_all_async("make", LARGE)
        assert [x.nbytes for x in f.result()] == [LARGE] * 2
        f = many.execute_all_async("make", LARGE)
        assert a.size(f[1]) == LARGE and [x.nbytes for x in a.echo(f)] == [LARGE] * 2
        assert many.execute_all_sync("size", a.make.remote()) == [LARGE] * 2, "one reference for all ranks"


def test_memory_is_freed_with_the_last_reference(pair):
    a, b = pair
    f = a.make.remote()
    f.result()
    assert a.counts()["kept"] > LARGE
    b.keep([f])
    del f
    assert b.kept_sum() == LARGE and a.counts()["kept"] > LARGE, "the other worker refers to it"
    began = time.monotonic()
    b.drop()
    until(lambda: a.counts()["kept"] == 0)
    assert time.monotonic() - began < 8, "sooner than the values of a lost process"
    refs = a.put()
    assert a.counts()["owned"] == 1 and refs[0].result().nbytes == LARGE
    del refs
    until(lambda: a.counts()["owned"] == 0)


class Board:
    """An object that the driver serves."""

    def make(self, n):
        return [troupe.put(np.ones(n, np.uint8)), b"." * n]

    def keep(self, box):
        self.box = box

    def total(self):
        return int(self.box[0].result(90).sum())


class Visitor:
    def made(self, board, n):
        ref, dots = board.make(n)
        return int(ref.result(90).sum()), len(dots)

    def leave(self, board, n):
        """The argument is a reference to a list with a reference in it."""
        board.keep(troupe.put([troupe.put(np.ones(n, np.uint8))]))
        return board.total()

    def counts(self):
        return _reference.counts()


@pytest.mark.parametrize("n", [8, LARGE])
def test_references_of_a_served_object_are_freed(session, n):
    board = Board()
    handle, visitor = troupe.serve(board), troupe.actor(Visitor)
    assert visitor.made(handle, n) == (n, n)
    until(lambda: owned() == 0)
    assert visitor.leave(handle, n) == n
    until(lambda: (c := visitor.counts())["owned"] == 1 and c["kept"] == 0)
    assert board.total() == n, "the driver refers to the inner value alone"
    board.box = None
    until(lambda: visitor.counts()["owned"] == 0)
    visitor.cluster.shutdown()
    handle.cluster.shutdown()


def test_a_cancelled_call_frees_what_it_waited_for(pair):
    a, b = pair
    f = a.later.remote(0.3)
    g = b.size.remote(f)
    g.cancel()
    with pytest.raises(troupe.CancelledError):
        g.result(90)
    assert b.pid() and f.result(90).nbytes == LARGE
    f = a.later.remote(0.2)
    f.cancel()
    with pytest.raises(troupe.CancelledError):
        b.size(f)
    del f, g
    until(lambda: a.counts()["kept"] == 0)
    assert b.counts()["held"] == 0


def test_results_outlive_a_worker_that_ends_in_order(session):
    a = troupe.actor(Keeper)
    f, g = a.make.remote(), a.later.remote(0.1)
    f._wait(5), g._wait(5)
    a.cluster.shutdown()
    assert f.result(90).nbytes == LARGE and g.result(90).nbytes == LARGE


def test_a_killed_worker_takes_its_results_with_it(session, pair):
    _, b = pair
    a = troupe.actor(Keeper)
    f = a.make.remote()
    (ref,) = a.put()
    b.keep([ref])
    f._wait(5)
    os.kill(a.pid(), signal.SIGKILL)
    with pytest.raises(troupe.WorkerLostError, match="SIGKILL|signal|killed"):
        f.result(90)
    with pytest.raises(troupe.WorkerLostError):
        b.size(f)
    with pytest.raises(troupe.WorkerLostError):
        ref.result(90)
    with pytest.raises(troupe.WorkerLostError):
        b.kept_sum()
    b.drop()
    a.cluster.shutdown()


def test_a_killed_holder_refers_to_nothing(session):
    b = troupe.actor(Keeper)
    ref = troupe.put(np.ones(LARGE, np.uint8))
    b.keep([ref])
    del ref
    time.sleep(0.5)
    assert owned() == 1
    os.kill(b.pid(), signal.SIGKILL)
    until(lambda: owned() == 0)
    b.cluster.shutdown()
