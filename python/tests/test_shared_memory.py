"""Large values on one host lie in shared memory: what arrives is right, writable, private, and leaves nothing
behind."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory between processes needs Linux")

SETUP = """
    import gc, json, os, signal, sys, time
    from collections import OrderedDict
    import numpy as np
    import troupe
    from troupe import Cluster, Dispatch, Scatter, WorkerConfig, register

    MIB = 1 << 20

    def array(n, mib=4):
        return np.arange(mib * MIB // 8, dtype="u8") * np.uint64(n)

    def shared():
        "The segments of other processes that this one has mapped, and its own."
        with open("/proc/self/maps") as f:
            lines = [line for line in f if "memfd:troupe" in line]
        return sum("rw-p" in line for line in lines), sum("rw-s" in line for line in lines)

    def private():
        "MiB of memory of this process alone."
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) >> 10 for line in f if line.startswith("RssAnon"))

    def until(holds, patience=60.0):
        end = time.monotonic() + patience
        while not holds():
            assert time.monotonic() < end
            time.sleep(0.01)

    class Worker:
        kept = None
        def echo(self, x): return x
        def sum(self, x): return int(x.sum())
        def keep(self, x): self.kept = x
        def first(self, x): self.kept = x["small"]
        def kept_sum(self): return int(self.kept.sum())
        def write(self, x):
            x[:] = 7
            return int(x.sum())
        def drop(self): self.kept = None
        def make(self, n, mib=4): return array(n, mib)
        def pid(self): return os.getpid()
        def shared(self): return shared()
        def private(self): return private()
        def shared_memory(self):
            "MiB of other processes' memory that this one has mapped."
            with open("/proc/self/status") as f:
                return next(int(line.split()[1]) >> 10 for line in f if line.startswith("RssShmem"))
        def mappings(self): return shared()[0]
        def collect(self, x):
            self.all = [*getattr(self, "all", []), x["small"]]
            return int(x["small"].sum())
        def collected(self): return [int(x.sum()) for x in self.all[:1200]]
        def lent(self): return shared()[1]
        def make_empty(self, n):
            self.kept = None
            self.kept = troupe.empty((4, 4 * MIB // 8 // 4), "u8")
            self.kept[:] = array(n).reshape(4, -1)
            return self.kept
        def kept_again(self): return self.kept
        def kept_flat(self): return self.kept.reshape(-1)
        def overwrite(self):
            try:
                self.kept[0] = 1
            except ValueError as err:
                return str(err)
        def fork_and_read(self, x):
            "A forked child reads the array after this process has dropped it; what it sees is written to a file."
            path = f"/tmp/troupe-fork-{os.getpid()}"
            want = int(x.sum())
            pid = os.fork()
            if pid == 0:
                try:
                    end = time.monotonic() + 1.5
                    good = True
                    while time.monotonic() < end:
                        good = good and int(x.sum()) == want
                    with open(path, "w") as f:
                        f.write(str(good))
                finally:
                    os._exit(0)
            self.child = pid
            return path
        def join(self):
            os.waitpid(self.child, 0)
            with open(f"/tmp/troupe-fork-{os.getpid()}") as f:
                return f.read()

    class All(troupe.Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def total(self, x): return int(x.sum())
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def write(self, x):
            x[:] = self.rank
            time.sleep(0.1)
            return int(x.sum())
        def shared(self): return shared()
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def keep(self, state): self.state = state
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def kept_right(self): return all((x == i).all() for i, x in enumerate(self.state.values()))
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def private(self): return private()
        def spoil(self): self.state["layer3"][7] = 1
"""


def run(text, tmp_path, timeout=100, **env):
    """Runs a driver with a directory of its own for shared memory; what it printed."""
    path = tmp_path / "driver.py"
    body = textwrap.indent(textwrap.dedent(text), "    ")
    path.write_text(textwrap.dedent(SETUP) + f"\nif __name__ == '__main__':\n{body}")
    folder = env.pop("folder", None) or f"/tmp/troupe-shm-test-{os.getpid()}"
    environ = {**os.environ, "TROUPE_SHM": "1", "TROUPE_SHM_DIR": str(folder), "TROUPE_URL": "", **env}
    p = subprocess.run([sys.executable, str(path)], env=environ, capture_output=True, text=True, timeout=timeout)
    assert p.returncode == 0, f"{p.stdout}\n{p.stderr}"
    if os.path.isdir(folder):
        assert set(os.listdir(folder)) <= {".lock"}, "every process has left the directory"
        shutil.rmtree(folder)
    return p


def test_values_are_right_writable_and_private(tmp_path):
    p = run(
        """
        with troupe.init():
            w = Cluster("v", Worker, worker_config=WorkerConfig(world_size=2)).workers
            x = array(3)
            for n in range(20):
                x[0] = n
                future = w[0].echo.remote(x)
                x[0] = 999  # the caller's array is its own when the call returns
                got = future.result()
                assert got[0] == n and (got[1:] == x[1:]).all() and got.flags.writeable
                got[:] = 1  # what was received is the receiver's own
                assert (w[0].make(n) == array(n)).all()
            assert w[1].write(x) == 7 * len(x) and x[1] == 3
            assert w[1].write(x) == 7 * len(x)
            assert (w[1].echo(x) == x).all()
            print(json.dumps([shared(), w[0].shared()]))
        """,
        tmp_path,
    )
    (driver, worker) = json.loads(p.stdout)
    assert driver[0] > 0 and driver[1] > 0 and worker[0] > 0 and worker[1] > 0, "shared memory was used, both ways"
    assert "shared memory" not in p.stderr


def test_one_argument_for_all_ranks_is_written_once(tmp_path):
    p = run(
        """
        with troupe.init():
            c = Cluster("all", All, worker_config=WorkerConfig(world_size=4))
            x = array(5)
            for _ in range(5):
                assert c.total(x) == [int(x.sum())] * 4
                assert c.write(x) == [r * len(x) for r in range(4)]
            print(shared()[1])
        """,
        tmp_path,
    )
    assert int(p.stdout) <= 2


def test_a_kept_array_is_never_rewritten(tmp_path):
    run(
        """
        with troupe.init():
            w = Cluster("v", Worker, worker_config=WorkerConfig(world_size=2)).workers
            x = array(11)
            w[0].keep(x)
            results = [w[1].make(n) for n in range(12)]
            for n in range(12):
                assert w[0].sum(array(n)) == int(array(n).sum())
                assert w[0].kept_sum() == int(x.sum())
            assert all((r == array(n)).all() for n, r in enumerate(results))
        """,
        tmp_path,
    )


def test_a_stopped_reader_resumes_with_its_bytes(tmp_path):
    run(
        """
        with troupe.init():
            w = Cluster("v", Worker, worker_config=WorkerConfig(world_size=2)).workers
            x = array(11)
            pid = w[0].pid()
            w[0].keep(x)
            for _ in range(3):
                os.kill(pid, signal.SIGSTOP)
                for n in range(5):
                    assert w[1].sum(array(n)) == int(array(n).sum())
                os.kill(pid, signal.SIGCONT)
                assert w[0].kept_sum() == int(x.sum())
        """,
        tmp_path,
    )


def test_a_result_outlives_its_worker(tmp_path):
    run(
        """
        with troupe.init():
            a, b = troupe.actor(Worker), troupe.actor(Worker)
            got = a.make(9)
            os.kill(a.pid(), signal.SIGKILL)
            try:
                while True:
                    a.pid()
            except troupe.Error:
                pass
            for n in range(5):
                assert (b.make(n) == array(n)).all()
            assert (got == array(9)).all()
            got[:] = 1
        """,
        tmp_path,
    )


def test_a_killed_reader_does_not_harm_the_others(tmp_path):
    run(
        """
        with troupe.init():
            b = troupe.actor(Worker)
            for n in range(4):
                a = troupe.actor(Worker)
                a.keep(array(n))
                os.kill(a.pid(), signal.SIGKILL)
                for m in range(6):
                    assert b.sum(array(m)) == int(array(m).sum())
            until(lambda: shared()[1] <= 4)
        """,
        tmp_path,
    )


def test_a_forked_child_keeps_what_it_can_read(tmp_path):
    p = run(
        """
        with troupe.init():
            a, b = troupe.actor(Worker), troupe.actor(Worker)
            a.fork_and_read(array(13))
            for n in range(25):
                assert b.sum(array(n)) == int(array(n).sum())
                assert a.sum(array(n)) == int(array(n).sum())
            print(a.join())
        """,
        tmp_path,
    )
    assert p.stdout.strip() == "True"


@pytest.mark.parametrize(
    "kind, arrays, ranks", [("dict", 64, 3), ("dict", 8, 3), ("dict", 1300, 2), ("OrderedDict", 64, 2)]
)
def test_a_value_of_many_arrays_is_shared(tmp_path, kind, arrays, ranks):
    """256 MiB in arrays of 4 MiB, of an eighth and of 0.2 MiB cost no rank memory of its own. What a rank writes stays
    with it."""
    run(
        f"""
        with troupe.init():
            c = Cluster("s", All, worker_config=WorkerConfig(world_size={ranks}))
            state = {kind}((f"layer{{i}}", np.full((256 << 20) // {arrays} // 4, i, "f4")) for i in range({arrays}))
            before = c.private()
            c.keep(state)
            assert c.kept_right() == [True] * {ranks}
            grown = [b - a for a, b in zip(before, c.private())]
            assert max(grown) < 64, f"MiB of private memory: {{grown}}"
            c.workers[0].spoil()
            assert c.kept_right() == [False] + [True] * {ranks - 1}
        """,
        tmp_path,
    )


@pytest.mark.parametrize("size", [1000, 20_000, 200_000])
def test_small_arrays_do_not_keep_large_bodies(tmp_path, size):
    """An array of 8 KB, 160 KB or 1.6 MB of 40 MB: it stays as it was, and the memory of the rest goes back to its
    owner."""
    run(
        f"""
        with troupe.init():
            a = troupe.actor(Worker)
            for n in range(6):
                a.first({{"small": np.full({size}, n), "large": array(n, 40)}})
                assert a.kept_sum() == {size} * n
            until(lambda: shared()[1] == 0)
            assert a.kept_sum() == {size} * 5
            assert a.shared_memory() < 8, a.shared_memory()
        """,
        tmp_path,
        TROUPE_SHM_KEEP="1",
    )


def test_many_kept_arrays_do_not_use_up_the_mappings(tmp_path):
    """A process can have 65,530 mappings. One that keeps an array of each message has a bounded number of them."""
    run(
        """
        with troupe.init():
            a = troupe.actor(Worker)
            value = {"small": np.ones(4096, "u8"), "large": array(1, 3)}
            for n in range(1200):
                value["small"][:] = n
                a.collect(value)
            until(lambda: a.collect(value) == 4096 * 1199)
            assert a.mappings() < 1100, a.mappings()
            assert a.collected() == [4096 * n for n in range(1200)]
        """,
        tmp_path,
        timeout=300,
    )


def test_a_small_array_does_not_keep_a_large_body_of_the_bus(tmp_path):
    run(
        """
        with troupe.init():
            a = troupe.actor(Worker)
            before = a.private()
            a.first({"small": np.full(20_000, 3), "large": array(1, 200)})
            assert a.kept_sum() == 60_000
            until(lambda: a.private() - before < 64)
            assert a.kept_sum() == 60_000
        """,
        tmp_path,
        TROUPE_SHM="0",
    )


def test_copies_are_private_memory(tmp_path):
    run(
        """
        with troupe.init():
            w = Cluster("v", Worker, worker_config=WorkerConfig(world_size=2))
            got = w.options(copy=True).execute_all_sync("make", 3)
            got.append(w.workers[0].make.options(copy=True)(3))
            got.append(w.workers[0].echo.options(copy=True).remote({"x": [array(3)]}).result()["x"][0])
            gc.collect()
            until(lambda: w.workers[0].lent() == 0)
            assert all((g == array(3)).all() and g.flags.writeable for g in got)
            try:
                w.options(copy=1)
            except troupe.InvalidError as err:
                assert "copy" in str(err)
            else:
                raise AssertionError
        """,
        tmp_path,
        TROUPE_SHM_KEEP="1",
    )


def test_a_result_of_empty_is_not_copied(tmp_path):
    p = run(
        """
        with troupe.init():
            w = Cluster("v", Worker, worker_config=WorkerConfig(world_size=2)).workers
            a = w[0].make_empty(3)
            assert (a == array(3).reshape(4, -1)).all() and a.flags.writeable
            a[:] = 1
            b, c = w[0].kept_again(), w[0].kept_flat()  # the first is mapped here already, the second has another shape
            assert (b == array(3).reshape(4, -1)).all() and (c == array(3)).all()
            assert "read-only" in w[0].overwrite()
            del a, b, c
            for n in range(10):
                assert (w[0].make_empty(n) == array(n).reshape(4, -1)).all()
            print(w[0].shared()[1])
            w[0].drop()
            until(lambda: w[0].shared()[1] == 0)
            assert troupe.empty((2, 0), "f4").shape == (2, 0) and troupe.empty(3).dtype == "f4"
            for wrong in ({"shape": 3, "dtype": "O"}, {"shape": -1}, {"shape": (2, -1)}):
                try:
                    troupe.empty(**wrong)
                except troupe.InvalidError:
                    pass
                else:
                    raise AssertionError(wrong)
        """,
        tmp_path,
        TROUPE_SHM_KEEP="1",
    )
    assert int(p.stdout) <= 3


@pytest.mark.parametrize("env", [{"TROUPE_SHM": "0"}, {"folder": "/proc/nowhere"}, {"TROUPE_SHM_LIMIT": "1000000"}])
def test_nothing_fails_without_shared_memory(tmp_path, env):
    p = run(
        """
        with troupe.init():
            w = Cluster("v", Worker, worker_config=WorkerConfig(world_size=2)).workers
            for n in range(3):
                assert (w[0].echo(array(n)) == array(n)).all()
            print(shared(), w[0].shared())
        """,
        tmp_path,
        **env,
    )
    assert p.stdout.strip() == "(0, 0) (0, 0)"
    if "folder" in env:
        assert p.stderr.count("shared memory is not available") >= 1 and "TROUPE_SHM_DIR" in p.stderr
    else:
        assert "shared memory" not in p.stderr
