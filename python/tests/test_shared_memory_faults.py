"""Processes that share memory are killed, stopped and forked while large values are on their way: no byte is wrong,
every call ends, and nothing is left behind. TROUPE_SHM_ROUNDS sets the number of rounds (make shm-faults)."""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory between processes needs Linux")

ROUNDS = int(os.environ.get("TROUPE_SHM_ROUNDS", "4"))

SETUP = """
    import os, random, signal, sys, time
    import numpy as np
    import troupe

    MIB = 1 << 20
    PATIENCE = 60

    def array(n, mib=3):
        return np.arange(mib * MIB // 8, dtype="u8") * np.uint64(n + 1)

    def right(x, n):
        return bool((x == array(n)).all())

    class Worker:
        kept = None
        child = 0
        def pid(self): return os.getpid()
        def check(self, x, n):
            assert right(x, n), "a wrong byte in an argument"
            return x
        def make(self, n): return array(n)
        def empty(self, n):
            x = troupe.empty(3 * MIB // 8, "u8")
            x[:] = array(n)
            return x
        def keep(self, x, n): self.kept = x, n
        def kept_right(self): return right(*self.kept)
        def fork(self, x, n, seconds):
            "A child, as a DataLoader has them, reads the array after this process has dropped it."
            assert self.child == 0
            self.child = os.fork()
            if self.child == 0:
                end = time.monotonic() + seconds
                good = right(x, n)
                while good and time.monotonic() < end:
                    good = right(x, n)
                os._exit(0 if good else 1)
        def join(self):
            code, self.child = os.waitpid(self.child, 0)[1], 0
            return code

    def calls(handle, n=6):
        "Calls that are under way, with what each has to give."
        out = []
        for _ in range(n):
            k = random.randrange(1000)
            how = random.randrange(3)
            out.append((handle.check.remote(array(k), k) if how == 0 else handle.make.remote(k) if how == 1 else handle.empty.remote(k), k))
        return out

    def ended(under_way, lost):
        "Every call ends; a value is right. An error is allowed where a process was lost."
        for future, k in under_way:
            try:
                x = future.result(PATIENCE)
            except troupe.TimedOutError:
                raise
            except troupe.Error:
                if not lost:
                    raise
            else:
                assert right(x, k), "a wrong byte in a result"
                x[:] = 0
"""

IN_SESSION = """
    rounds, seed = int(sys.argv[1]), int(sys.argv[2])
    random.seed(seed)
    with troupe.init(gpus="none"):
        a, b = troupe.actor(Worker), troupe.actor(Worker)
        reader = troupe.actor(Worker)
        reader.keep(array(7), 7)
        for n in range(rounds):
            how = ("kill", "stop", "fork", "stop all")[n % 4]
            pid = a.pid()
            if how == "kill":  # while it sends and receives
                under_way = calls(a)
                time.sleep(random.random() * 0.03)
                os.kill(pid, signal.SIGKILL)
                ended(under_way, lost=True)
                a = troupe.actor(Worker)
            elif how == "stop":
                under_way = calls(a, 3)
                time.sleep(random.random() * 0.02)
                os.kill(pid, signal.SIGSTOP)
                under_way += calls(a, 2)
                ended(calls(b), lost=False)
                os.kill(pid, signal.SIGCONT)
                ended(under_way, lost=False)
            elif how == "fork":
                a.fork(array(n), n, 0.3)
                for _ in range(3):
                    ended(calls(a, 3) + calls(b, 3), lost=False)
                assert a.join() == 0, "a forked child saw a wrong byte"
            else:
                pids = [pid, b.pid(), reader.pid()]
                under_way = calls(a, 3) + calls(b, 3)
                for p in pids:
                    os.kill(p, signal.SIGSTOP)
                time.sleep(random.random() * 0.1)
                for p in pids:
                    os.kill(p, signal.SIGCONT)
                ended(under_way, lost=False)
            ended(calls(b, 2), lost=False)
            assert reader.kept_right(), "a wrong byte in a kept array"
    print("whole")
"""

TO_BE_KILLED = """
    with troupe.init(gpus="none") as session:
        a, b = troupe.actor(Worker), troupe.actor(Worker)
        ended(calls(a) + calls(b), lost=False)
        print("ready", session.head.process.pid, flush=True)
        while True:
            try:
                ended(calls(a) + calls(b), lost=False)
            except troupe.TimedOutError:
                print("not notified", flush=True)
            except troupe.Error as err:
                print("notified", type(err).__name__, flush=True)
                break
"""


@pytest.fixture
def folder():
    path = f"/tmp/troupe-shm-faults-{os.getpid()}"
    before = set(os.listdir("/dev/shm"))
    yield path
    until(lambda: not processes_with(path), 30)
    assert not {n for n in set(os.listdir("/dev/shm")) - before if "troupe" in n}, "nothing is left in /dev/shm"
    shutil.rmtree(path, ignore_errors=True)


def until(holds, patience):
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def processes_with(folder):
    """The processes that have the directory in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                if int(pid) != os.getpid() and f"TROUPE_SHM_DIR={folder}".encode() in f.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:
            pass
    return found


def start(tmp_path, folder, text, *args):
    path = tmp_path / "driver.py"
    path.write_text(
        textwrap.dedent(SETUP) + "\nif __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(text), "    ")
    )
    env = {**os.environ, "TROUPE_SHM": "1", "TROUPE_SHM_DIR": folder, "TROUPE_URL": ""}
    return subprocess.Popen(
        [sys.executable, str(path), *map(str, args)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def left(folder):
    """What dead processes left is removed when the next process opens or leaves the directory."""
    return set(os.listdir(folder)) - {".lock"} if os.path.isdir(folder) else set()


def test_workers_are_killed_stopped_and_forked(tmp_path, folder):
    p = start(tmp_path, folder, IN_SESSION, ROUNDS, random.randrange(1 << 30))
    out, err = p.communicate(timeout=120 + 5 * ROUNDS)
    assert p.returncode == 0 and "whole" in out, f"{out}\n{err}"
    assert not left(folder), "every process has left the directory"


@pytest.mark.parametrize("victim", ["driver", "agent"])
def test_drivers_and_agents_are_killed(tmp_path, folder, victim):
    for _ in range(max(1, ROUNDS // 10)):
        p = start(tmp_path, folder, TO_BE_KILLED)
        word, head = p.stdout.readline().split()
        assert word == "ready"
        time.sleep(random.random() * 0.2)
        if victim == "driver":
            p.kill()
            p.communicate(timeout=90)
        else:
            os.kill(agent_of(int(head)), signal.SIGKILL)
            out, err = p.communicate(timeout=90)
            assert "notified" in out and "not notified" not in out, f"{out}\n{err}"
        until(lambda: not processes_with(folder), 60)
    p = start(tmp_path, folder, IN_SESSION, 1, 1)
    out, err = p.communicate(timeout=90)
    assert p.returncode == 0, f"{out}\n{err}"
    assert not left(folder), "the next process has removed what was left"


def agent_of(head):
    """The process of the head that is the parent of the workers."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                words = f.read().split(b"\0")
            with open(f"/proc/{pid}/stat") as f:
                parent = int(f.read().rsplit(") ")[1].split()[1])
        except OSError:
            continue
        if parent == head and b"agent" in words:
            return int(pid)
    raise AssertionError("there is no agent")
