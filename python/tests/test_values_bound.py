"""Values of put, and results that workers keep, have a bound of memory: past it they are written to disk, or
refused."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="values are written to disk on Linux alone")

SETUP = """
    import gc, os, sys, time
    import numpy as np
    import troupe

    MB = 1_000_000
    FOLDER = os.environ["TROUPE_VALUES_SPILL"]

    def array(n, mb=20):
        return np.full(mb * MB, n, "u1")

    def files():
        "Values of this process that are in files of the folder."
        with open("/proc/self/maps") as f:
            return sum(f" {FOLDER}/" in line for line in f)

    def until(holds, patience=60.0):
        end = time.monotonic() + patience
        while not holds():
            assert time.monotonic() < end
            time.sleep(0.01)

    class Worker:
        def total(self, x): return int(x.sum(dtype="u8"))
        def make(self, n): return array(n)
        def files(self): return files()
"""


@pytest.fixture
def folder():
    """A folder on a disk: the one for temporary files may be in memory."""
    path = tempfile.mkdtemp(prefix="troupe-spill-", dir="/var/tmp")
    yield path
    assert os.listdir(path) == [], "the files have no names, and end with their processes"
    shutil.rmtree(path)


def start(text, tmp_path, before=None, **env):
    path = tmp_path / "driver.py"
    path.write_text(
        textwrap.dedent(SETUP) + "\nif __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(text), "    ")
    )
    return subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "TROUPE_URL": "", **env},
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=before,
    )


def run(text, tmp_path, **env):
    p = start(text, tmp_path, **env)
    assert p.returncode == 0, f"{p.stdout}\n{p.stderr}"
    return p


def test_values_past_the_bound_are_read_from_disk(tmp_path, folder):
    p = run(
        """
        with troupe.init():
            w = [troupe.actor(Worker) for _ in range(2)]
            refs = [troupe.put(array(n)) for n in range(8)]
            assert files() == 6, files()
            for n, ref in enumerate(refs):
                assert [x.total(ref) for x in w] == [20 * MB * n] * 2
                assert (ref.result() == n).all()
            del refs[4:], ref
            until(lambda: files() == 2)
            del refs[:]
            until(lambda: files() == 0)
            ref = troupe.put(array(3))
            assert files() == 0, "there is room in memory again"
            assert w[0].total(ref) == 60 * MB
        """,
        tmp_path,
        TROUPE_VALUES_LIMIT="50000000",
        TROUPE_VALUES_SPILL=folder,
    )
    assert p.stderr.count("written to disk") == 1, p.stderr


def test_values_past_the_bound_are_refused_with_the_figure(tmp_path):
    run(
        """
        with troupe.init():
            w = troupe.actor(Worker)
            refs = [troupe.put(array(n)) for n in range(2)]
            for _ in range(3):
                try:
                    troupe.put(array(3))
                except troupe.RefusedError as err:
                    text = str(err)
                else:
                    raise AssertionError("not refused")
                assert "50000000" in text and "4000" in text and "TROUPE_VALUES_LIMIT" in text, text
            assert w.total(refs[1]) == 20 * MB
            assert w.total(array(3)) == 60 * MB, "arguments have no bound"
            del refs[0]
            refs.append(troupe.put(array(4)))
            assert w.total(refs[-1]) == 80 * MB
        """,
        tmp_path,
        TROUPE_VALUES_LIMIT="50000000",
        TROUPE_VALUES_SPILL="0",
    )


def test_results_past_the_bound_are_read_from_disk(tmp_path, folder):
    """A worker writes results that it keeps for its caller to disk. When it ends in order, its caller takes them over,
    within its own bound."""
    run(
        """
        with troupe.init():
            role, b = troupe.Cluster("makers", Worker, worker_config=troupe.WorkerConfig(world_size=1)), troupe.actor(Worker)
            a = role.workers[0]
            made = [a.make.remote(n) for n in range(8)]
            troupe.wait(made, num_returns=8)
            assert a.files() == 6, a.files()
            assert files() == 0
            assert [b.total(ref) for ref in made] == [20 * MB * n for n in range(8)]
            role.shutdown()
            assert files() == 6, files()
            assert [b.total(ref) for ref in made] == [20 * MB * n for n in range(8)]
            del made
            until(lambda: files() == 0)
        """,
        tmp_path,
        TROUPE_VALUES_LIMIT="50000000",
        TROUPE_VALUES_SPILL=folder,
    )


def test_results_past_the_bound_are_sent_at_once_without_a_folder(tmp_path):
    """As the argument of another call, such a result is a value of the caller, with the caller's bound."""
    run(
        """
        with troupe.init():
            a, b, c = [troupe.actor(Worker) for _ in range(3)]
            made = [a.make.remote(n) for n in range(6)]
            assert all((f.result() == n).all() for n, f in enumerate(made))
            made = [c.make.remote(n) for n in range(6)]  # of a worker that keeps nothing yet
            troupe.wait(made, num_returns=6)
            assert [b.total(f) for f in made[:4]] == [20 * MB * n for n in range(4)]
            try:
                b.total(made[4])
            except troupe.RefusedError as err:
                assert "TROUPE_VALUES_LIMIT" in str(err)
            else:
                raise AssertionError("not refused")
        """,
        tmp_path,
        TROUPE_VALUES_LIMIT="50000000",
        TROUPE_VALUES_SPILL="0",
    )


def test_a_disk_that_takes_no_more(tmp_path, folder):
    """A file may have 10 MB here: the value is refused with the reason, and smaller ones are not."""
    run(
        """
        import resource
        with troupe.init():
            w = troupe.actor(Worker)
            kept = troupe.put(array(1))
            resource.setrlimit(resource.RLIMIT_FSIZE, (10 * MB, resource.RLIM_INFINITY))
            try:
                troupe.put(array(2))
            except troupe.RefusedError as err:
                assert FOLDER in str(err) and "file too large" in str(err), err
            else:
                raise AssertionError("not refused")
            assert files() == 0
            small = troupe.put(array(3, 6))
            assert files() == 1
            assert (w.total(kept), w.total(small)) == (20 * MB, 18 * MB)
        """,
        tmp_path,
        TROUPE_VALUES_LIMIT="25000000",
        TROUPE_VALUES_SPILL=folder,
    )


@pytest.mark.parametrize("name, value", [("TROUPE_VALUES_LIMIT", "much"), ("TROUPE_VALUES_SPILL", "relative/folder")])
def test_wrong_settings_are_refused(tmp_path, name, value):
    p = start("troupe.init()", tmp_path, **{"TROUPE_VALUES_SPILL": "0", name: value})
    assert p.returncode != 0
    assert name in p.stderr and value in p.stderr, p.stderr


def test_a_killed_process_leaves_no_file(tmp_path, folder):
    p = start(
        """
        import signal
        with troupe.init():
            refs = [troupe.put(array(n)) for n in range(3)]
            assert files() == 3
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
        TROUPE_VALUES_LIMIT="1000000",
        TROUPE_VALUES_SPILL=folder,
    )
    assert p.returncode == -9, p.stderr


LIMIT = 600 << 20  # bytes of the control group


@pytest.fixture
def group():
    """A control group of its own with a limit of memory."""
    folder = memory_group()
    if folder is None:
        pytest.skip(
            "this process may not make a control group with a limit of memory (it is not root, or in a container)"
        )
    yield folder
    procs = pathlib.Path(folder, "cgroup.procs")
    while left := procs.read_text().split():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
    os.rmdir(folder)


def memory_group():
    """Makes a control group, of version 2 or 1, below the one of this process or at the top."""
    with open("/proc/self/cgroup") as f:
        groups = dict(reversed(line.strip().split(":")[1:]) for line in f)
    v1, v2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"
    own = {controllers: path for path, controllers in groups.items()}
    for root, path, file in (
        (v1, own.get("memory", "/"), "memory.limit_in_bytes"),
        (v2, own.get("", "/"), "memory.max"),
        (v2, "/", "memory.max"),
    ):
        folder = os.path.join(root, path.strip("/"), f"troupe-test-{os.getpid()}")
        try:
            os.mkdir(folder)
        except OSError:
            continue
        try:
            with open(os.path.join(folder, file), "w") as f:
                f.write(str(LIMIT))
            return folder
        except OSError:
            os.rmdir(folder)
    return None


def test_values_stay_within_a_control_group(tmp_path, folder, group):
    """Values of three times the memory of the group: the driver is not killed, without a setting, and every value can
    be read."""

    def enter():
        with open(os.path.join(group, "cgroup.procs"), "w") as f:
            f.write("0")

    p = start(
        """
        with troupe.init():
            w = troupe.actor(Worker)
            refs = [troupe.put(array(n, 60)) for n in range(30)]
            assert files() >= 26, files()
            assert [w.total(ref) for ref in refs] == [60 * MB * n for n in range(30)]
        """,
        tmp_path,
        before=enter,
        TROUPE_VALUES_SPILL=folder,
    )
    assert p.returncode == 0, f"{p.returncode}\n{p.stdout}\n{p.stderr}"
