"""What the caller of a method that raised can catch and read."""

import asyncio
import builtins
import os
import pickle
import subprocess
import sys
import textwrap

import pytest

import remote_errors
import troupe
from troupe import _errors

HERE = os.path.dirname(os.path.abspath(__file__))


def _is_plain(kind):
    """Whether a name of builtins is an exception that a caller may catch."""
    return isinstance(kind, type) and issubclass(kind, Exception)


@pytest.fixture(scope="module")
def raising(session):
    with troupe.Cluster("raising", remote_errors.Raises, config=troupe.WorkerConfig(world_size=2)) as cluster:
        yield cluster


def test_the_original_type_catches_a_remote_exception(raising):
    with pytest.raises(ValueError) as e:
        raising.workers[0].value_error()
    err = e.value
    assert isinstance(err, troupe.ApplicationError) and err.args == ("bad luck", 7)
    assert (err.role, err.rank, err.method) == ("raising", 0, "value_error")
    assert "ValueError" in str(err).splitlines()[0] and type(err.original) is ValueError and err.__cause__ is None
    again = pickle.loads(pickle.dumps(err))
    assert isinstance(again, ValueError) and again.args == err.args and str(again) == str(err)


@pytest.mark.parametrize("way", ["call", "remote", "all", "await", "get"])
def test_every_way_to_call_raises_the_original_type(raising, way):
    h = raising.workers[1]
    ways = {
        "call": h.key_error,
        "remote": lambda: h.key_error.remote().result(),
        "all": lambda: raising.execute_all_sync("key_error"),
        "await": lambda: asyncio.run(awaited(h.key_error.remote())),
        "get": lambda: troupe.get([h.key_error.remote(), h.key_error.remote()]),
    }
    with pytest.raises(KeyError) as e:
        ways[way]()
    assert e.value.args == ("k",), "unchanged"


async def awaited(future):
    return await future


def test_constructors_attributes_and_causes_survive(raising):
    with pytest.raises(remote_errors.Custom) as e:
        raising.workers[0].chained()
    err = e.value
    assert (err.code, err.hint, err.args) == (5, ["try", "again"], ("code 5",))
    assert type(err.__cause__) is KeyError and err.__cause__.args == ("k",)
    with pytest.raises(FileNotFoundError) as e:
        raising.workers[0].missing_file()
    assert (e.value.errno, e.value.filename) == (2, "/nonexistent/file")


@pytest.mark.parametrize("method", ["no_memory", "no_memory_for_an_array"])
def test_a_lack_of_memory_is_a_memory_error(raising, method):
    with pytest.raises(MemoryError) as e:
        getattr(raising.workers[0], method)()
    err = e.value
    assert isinstance(err, troupe.ApplicationError) and isinstance(err, type(err.original))
    assert isinstance(pickle.loads(pickle.dumps(err)), MemoryError)
    if method == "no_memory_for_an_array":
        assert err.shape == (1 << 45,) and "Unable to allocate" in str(err)


@pytest.mark.parametrize(
    "kind",
    sorted((k for k in vars(builtins).values() if _is_plain(k)), key=lambda k: k.__name__),
    ids=lambda k: k.__name__,
)
def test_every_built_in_exception_is_rebuilt(kind):
    args = ("one", [ValueError("inside")]) if "Group" in kind.__name__ else ("one", 2)
    for raised in (kind, type("Derived", (kind,), {"__module__": __name__})):
        error = _errors.ApplicationError("why", details={"type": raised.__qualname__, "module": raised.__module__})
        made = _errors.with_original(error, _errors._new(raised, args))
        assert isinstance(made, raised) and isinstance(made, troupe.ApplicationError), made
        assert made.args == args and str(made._again()) == str(made)


def test_a_second_hop_keeps_the_type(raising):
    a, b = raising.workers
    with pytest.raises(remote_errors.Custom) as e:
        a.call_and_fail(b, "chained")
    assert e.value.code == 5 and type(e.value.__cause__) is KeyError


def test_what_cannot_be_rebuilt_is_named(raising):
    with pytest.raises(ValueError, match=r"argument 2 of ValueError, a lock, could not be sent") as e:
        raising.workers[0].lock_argument()
    assert e.value.args[0] == "holds a lock"
    with pytest.raises(
        troupe.ApplicationError, match=r"Made: known there \(its type module_of_the_worker.Made is not known here\)"
    ):
        raising.workers[0].unknown_type()
    with pytest.raises(
        troupe.ApplicationError, match="`except Slotted` does not catch this: this class has no subclasses"
    ) as e:
        raising.workers[0].no_subclass()
    assert isinstance(e.value.__cause__, remote_errors.Slotted)


PROGRAM = """
    import remote_errors, troupe

    class Local(troupe.Worker):
        def fail(self):
            self.helper()

        def helper(self):
            raise LookupError("in the worker's code")

    def main():
        with troupe.init(gpus="none"):
            a = troupe.actor(Local)
            a.fail()

    main()
"""


@pytest.mark.parametrize("full", [False, True])
def test_tracebacks_show_the_users_frames(tmp_path, full):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    env = {**os.environ, "PYTHONPATH": HERE, **({"TROUPE_TRACEBACK": "full"} if full else {})}
    p = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, env=env)
    assert p.returncode == 1
    for frame in ("in main", "a.fail()", "in fail", "in helper", 'raise LookupError("in the worker'):
        assert frame in p.stderr, p.stderr
    ours = [line for line in p.stderr.splitlines() if "/troupe/_" in line]
    assert bool(ours) is full, p.stderr
    assert "LookupError: in the worker's code" in p.stderr.splitlines()[-1] or full


@pytest.mark.parametrize("method", ["leave", "leave_in_control", "leave_in_lane", "async leave"])
def test_sys_exit_in_a_method_is_always_the_same_error(session, method):
    cls = remote_errors.RaisesAsync if method.startswith("async") else remote_errors.Raises
    for _ in range(3):
        handle = troupe.actor(cls)
        with pytest.raises(troupe.WorkerLostError) as e:
            handle[method.rpartition(" ")[2]](3)
        assert e.value.exit_code == 3
        handle.cluster.shutdown()


def test_sys_exit_in_a_constructor_is_a_lost_worker(session):
    with pytest.raises(troupe.WorkerLostError, match="nothing to do here") as e:
        troupe.Cluster("exits", remote_errors.Exits, config=troupe.WorkerConfig(world_size=1))
    assert e.value.exit_code == 1
