"""Names that drivers know from Ray, and how a driver finds a head."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

import troupe
import worker_classes

HERE = os.path.dirname(os.path.abspath(__file__))


@troupe.remote
def square(x):
    return x * x, os.getpid()


@troupe.remote(num_returns=2)
def divide(a, b):
    return a // b, a % b


@troupe.remote
def fails():
    raise LookupError("in a task")


@troupe.remote
def count(n):
    yield from range(n)


@troupe.remote
async def count_async(n):
    for i in range(n):
        await asyncio.sleep(0)
        yield i


@troupe.remote
def fails_after(n):
    yield from range(n)
    raise LookupError("in the middle")


@troupe.remote
class Counter:
    def __init__(self, start, name="none"):
        self.n = start
        self.name = name

    def add(self, k):
        self.n += k
        return [self.n, self.name]


def test_remote_functions_run_on_a_pool(session):
    got = troupe.get([square.remote(i) for i in range(20)], timeout=60)
    assert [x for x, _ in got] == [i * i for i in range(20)] and os.getpid() not in {pid for _, pid in got}
    assert troupe.get(divide.remote(7, 2)) == [3, 1]
    assert troupe.get(square.remote(troupe.get(divide.options().remote(9, 2))[0]))[0] == 16
    with pytest.raises(LookupError):
        fails.remote().result(90)
    with pytest.raises(troupe.InvalidError, match=r"square.remote"):
        square(3)
    with pytest.raises(troupe.InvalidError, match="num_gpus"):
        troupe.remote(num_gpus=1)(lambda: 1)


def test_a_remote_function_that_yields_gives_its_values(session):
    for f in (count, count_async):
        assert list(f.remote(3)) == [0, 1, 2]
        many = [f.remote(50) for _ in range(5)]
        assert [list(m) for m in many] == [list(range(50))] * 5

        async def main(f=f):
            return [x async for x in f.remote(20)]

        assert asyncio.run(main()) == list(range(20))
        with f.remote(1000).result(30) as stream:  # left early
            assert [next(stream), next(stream)] == [0, 1]
    got = []
    with pytest.raises(LookupError, match="in the middle"):
        for x in fails_after.remote(2):
            got.append(x)
    assert got == [0, 1]
    assert square.remote(3).result(30)[0] == 9


def test_remote_classes_are_actors(session):
    a = Counter.options(name="counter").remote(5, name="own")
    assert a.add.remote(2).result(90) == [7, "own"]
    assert troupe.get_actor("counter").add(1) == [8, "own"]
    troupe.kill(a)
    with pytest.raises(troupe.NotFoundError):
        troupe.get_actor("counter")


def test_kill_and_get_actor_name_their_mistakes(session, workers):
    with pytest.raises(troupe.InvalidError, match="one of 2 workers"):
        troupe.kill(workers.workers[0])
    with pytest.raises(troupe.InvalidError, match="role of 2 workers"):
        troupe.get_actor("workers")
    with pytest.raises(troupe.InvalidError, match="name=3"):
        troupe.get_actor(3)


def test_nodes_and_resources(session):
    nodes = troupe.nodes()
    assert len(nodes) == 2 and all(n["alive"] and len(n["devices"]) == 8 for n in nodes)
    total, free = troupe.cluster_resources(), troupe.available_resources()
    assert total["GPU"] == 16 and total["CPU"] >= 1 and total["memory"] > 1 << 20
    with troupe.Cluster(
        "takes", worker_classes.BasicWorker, config=troupe.WorkerConfig(world_size=3, num_gpus_per_worker=1)
    ):
        assert troupe.available_resources()["GPU"] == free["GPU"] - 3
    assert troupe.available_resources()["GPU"] == free["GPU"] and troupe.cluster_resources() == total


@pytest.fixture
def head(tmp_path):
    """A head as `troupe up` starts it, with a home of its own; its address and environment."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}
    env.update(HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path), XDG_RUNTIME_DIR=str(tmp_path))
    program = troupe._core.program_path()
    p = subprocess.Popen(
        [program, "up", "--json", "--listen", "127.0.0.1:0", "--store", str(tmp_path / "store"), "--gpus", "none"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
    )
    url = json.loads(p.stdout.readline())["url"]
    yield url.rpartition("://")[2], env
    p.send_signal(signal.SIGTERM)
    p.wait(90)


ATTACH = """
    import sys, troupe
    with troupe.init(sys.argv[1], namespace="attached") as s:
        print(s.head is None, troupe.actor(dict_of).one())
"""


def attach(address, env):
    text = "class dict_of:\n    def one(self):\n        return 1\n" + textwrap.dedent(ATTACH)
    return subprocess.run([sys.executable, "-c", text, address], capture_output=True, text=True, timeout=60, env=env)


def test_init_finds_the_head_of_this_machine(head):
    address, env = head
    port = address.rpartition(":")[2]
    for given in ("auto", f"localhost:{port}", address, f"nats://{address}"):
        p = attach(given, env)
        assert p.stdout == "True 1\n", (given, p.stderr)


def test_init_auto_says_that_there_is_no_head(tmp_path):
    env = {**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    p = attach("auto", env)
    assert p.returncode == 1 and "no head runs on this machine" in p.stderr and "`troupe up`" in p.stderr, p.stderr
    p = attach("gopher://x:1", env)
    assert "give HOST:PORT" in p.stderr, p.stderr


RELATIVE = """
    import os, sys
    sys.path.insert(0, "lib")
    sys.path.insert(0, "package")
    import own_module
    import troupe
    assert troupe.__file__.startswith(os.path.join(os.getcwd(), "package")), troupe.__file__
    os.chdir({elsewhere!r})
    with troupe.init(gpus="none"):
        print(troupe.actor(own_module.Own).where())
"""


def test_a_worker_finds_modules_that_the_driver_found_by_a_relative_path(tmp_path):
    """Also the package itself, and after the driver has changed its folder."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "lib" / "own_module.py").write_text(
        "import own_helper, troupe\nclass Own:\n    def where(self):\n        return own_helper.NAME, troupe.__file__\n"
    )
    (tmp_path / "lib" / "own_helper.py").write_text("NAME = 'found'\n")
    shutil.copytree(
        os.path.dirname(troupe.__file__),
        tmp_path / "package" / "troupe",
        ignore=shutil.ignore_patterns("__pycache__", "bin"),
    )
    bin_folder = os.path.join(os.path.dirname(troupe.__file__), "bin")
    os.symlink(bin_folder, tmp_path / "package" / "troupe" / "bin")
    text = textwrap.dedent(RELATIVE).format(elsewhere=str(tmp_path / "elsewhere"))
    p = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert p.returncode == 0, p.stderr
    assert "found" in p.stdout and str(tmp_path / "package" / "troupe" / "__init__.py") in p.stdout, p.stdout
