"""Workers that are forked from a process which has done their imports."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import troupe


class Probe(troupe.Worker):
    """What a worker sees of itself."""

    def about(self):
        import random

        import numpy

        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "session": os.getsid(0),
            "rank": os.environ["RANK"],
            "marker": os.environ["TROUPE_WORKER"],
            "forked": was_forked(os.getpid()),
            "cwd": os.getcwd(),
            "path": sys.path[0],
            "argv": sys.argv[1:],
            "own": os.environ.get("OWN"),
            "random": (random.random(), float(numpy.random.random())),
            "warm": "warm_module" in sys.modules,
            "shown": f"TROUPE_WORKER={os.environ['TROUPE_WORKER']}".encode()
            in pathlib.Path("/proc/self/environ").read_bytes().split(b"\0"),
            "blas": float((numpy.ones((300, 300)) @ numpy.ones((300, 300)))[0, 0]),
        }

    def leave(self, code):
        sys.exit(code)


def was_forked(pid):
    """The argument of the fork server is erased in its workers."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"\0\0" in file.read()


def pids(cluster):
    return [h.about()["pid"] for h in cluster.workers]


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def servers(agent):
    """The fork servers of an agent."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if (
                name.isdigit()
                and parent_of(name) == agent
                and b"--fork-server" in pathlib.Path(f"/proc/{name}/cmdline").read_bytes()
            ):
                found.append(int(name))
        except OSError:
            continue
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition, what):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def test_a_forked_worker_is_as_a_started_one(session):
    config = troupe.WorkerConfig(
        world_size=4, env={"OWN": "value"}
    )  # two on each node: one alone would not wait for a fork server
    with troupe.Cluster("forked", Probe, worker_config=config) as cluster:
        a, b, *others = (h.about() for h in cluster.workers)
        assert (a["forked"], b["forked"]) == (True, True)
        assert (a["rank"], b["rank"], a["own"]) == ("0", "1", "value")
        assert a["session"] == a["pid"] and a["parent"] == b["parent"] and a["parent"] not in servers(a["parent"])
        assert a["cwd"] == os.getcwd() == a["path"] and a["argv"] == []
        assert a["shown"] and b["shown"] and a["marker"] != b["marker"]
        assert a["random"][0] != b["random"][0] and a["random"][1] != b["random"][1]
        assert a["blas"] == 300
        until(lambda: servers(a["parent"]), "a fork server")
        for server in servers(a["parent"]):
            os.kill(server, signal.SIGKILL)
        until(lambda: not servers(a["parent"]), "the end of the fork servers")
        assert pids(cluster) == [f["pid"] for f in (a, b, *others)]
        with pytest.raises(troupe.WorkerLostError) as lost:
            cluster.workers[1].leave(23)
        assert lost.value.details["exit_code"] == "23"


def test_an_environment_of_its_own_is_set_before_the_interpreter_starts(session):
    with troupe.Cluster(
        "ranks", Probe, worker_config=troupe.WorkerConfig(world_size=2, env=[{"OWN": "a"}, {"OWN": "b"}])
    ) as cluster:
        assert [(h.about()["own"], h.about()["forked"]) for h in cluster.workers] == [("a", False), ("b", False)]


def test_fork_can_be_turned_off(session, monkeypatch):
    monkeypatch.setenv("TROUPE_FORK", "0")
    with troupe.Cluster("plain", Probe, worker_config=troupe.WorkerConfig(world_size=2)) as cluster:
        assert not any(h.about()["forked"] for h in cluster.workers)


def test_warm_modules(session, monkeypatch, tmp_path):
    (tmp_path / "warm_module.py").write_text(
        "import os\nprint('imported by', os.getpid(), flush=True)\nPID = os.getpid()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with troupe.Cluster(
        "warm", Probe, worker_config=troupe.WorkerConfig(world_size=1, warm=["warm_module"])
    ) as cluster:
        about = cluster.workers[0].about()
        assert about["warm"] and about["forked"]
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    with troupe.Cluster(
        "threaded", Probe, worker_config=troupe.WorkerConfig(world_size=1, warm=["threaded"])
    ) as cluster:
        assert not cluster.workers[0].about()["forked"]


def test_a_warm_module_that_fails_is_the_workers_error(session, monkeypatch, tmp_path):
    (tmp_path / "broken_module.py").write_text("def boom():\n    raise ValueError('this module is broken')\nboom()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(troupe.Error) as err:
        troupe.Cluster("broken", Probe, worker_config=troupe.WorkerConfig(world_size=1, warm=["broken_module"]))
    assert isinstance(err.value, ValueError) and "this module is broken" in str(err.value)
    assert "boom()" in f"{err.value}{err.value.remote_traceback}"
    for wrong in ("torch", [1], ["no module"]):
        with pytest.raises(troupe.InvalidError, match="warm="):
            troupe.WorkerConfig(warm=wrong)


def test_everything_ends_with_a_killed_driver(session, tmp_path):
    text = textwrap.dedent("""
        import os, signal, troupe, test_fork
        with troupe.init():
            c = troupe.Cluster("mortal", test_fork.Probe, worker_config=troupe.WorkerConfig(world_size=2))
            found = [h.about() for h in c.workers]
            agent = found[0]["parent"]
            assert all(f["forked"] for f in found), found
            print(agent, *[f["pid"] for f in found], *test_fork.servers(agent), flush=True)
            os.kill(agent, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    env = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}
    here = os.path.dirname(os.path.abspath(__file__))
    out = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=here, env=env, timeout=60)
    found = [int(p) for p in out.stdout.split()]
    assert len(found) == 4, out.stdout
    until(lambda: not any(alive(p) for p in found), "the end of the agent, of the workers and of the fork server")
