"""The vectors of the dispatch modes: Python with Python, and a Python driver with Go workers. The third way round, a Go
driver with Python workers, is in cmd/libtroupe."""

import json
import os
import shutil
import subprocess

import pytest

import conftest
import troupe
import worker_classes

FOLDER = os.environ.get("TROUPE_VECTORS") or os.path.join(conftest.ROOT, "dispatch", "testdata", "vectors")
with open(os.path.join(FOLDER, "dispatch.json")) as f:
    VECTORS = json.load(f)

_clusters = {}


def make(session, mesh, world):
    """One cluster for all vectors of a shape."""
    key = (mesh["tp"], mesh["pp"], mesh["cp"], world)
    if key not in _clusters:
        config = troupe.WorkerConfig(
            world_size=world,
            tensor_parallel_size=mesh["tp"],
            pipeline_parallel_size=mesh["pp"],
            context_parallel_size=mesh["cp"],
        )
        _clusters[key] = troupe.Cluster(
            f"vectors-{len(_clusters)}", worker_classes.Vector, worker_config=config, worker_args=("", {})
        )
    return _clusters[key]


@pytest.fixture(scope="module", autouse=True)
def clean(session):
    yield
    for cluster in _clusters.values():
        cluster.shutdown()
    _clusters.clear()


def check(vector, call, seen):
    """Holds what happened against a vector."""
    if "error" in vector:
        with pytest.raises(troupe.InvalidError, match=vector["error"]):
            call()
        assert not any(seen()), "the call must be refused before anything is sent"
        return
    assert call() == vector["result"]
    got = seen()
    parts = vector["parts"] + [None] * (vector["world"] - len(vector["parts"]))
    assert [c[0][0] if c else None for c in got] == parts
    if "data_ranks" in vector:
        assert [r for r, c in enumerate(got) if c and c[0][1]] == vector["data_ranks"]
    called = [r for r, c in enumerate(got) if c]
    assert called == ([0] if vector["mode"] == "RANK_ZERO" else list(range(vector["world"])))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_python_with_python(session, vector):
    cluster = make(session, vector["mesh"], vector["world"])
    cluster.execute_all_sync("become", vector["mode"], vector["mesh"])
    future = cluster.options(mode=vector["mode"])
    check(vector, lambda: future.step(vector["input"]), lambda: cluster.execute_all_sync("calls"))
    if "collect_ranks" in vector:
        plan = cluster._plan(vector["mode"], False)
        assert plan.collect == vector["collect_ranks"]


@pytest.fixture(scope="module")
def go_workers(session, tmp_path_factory):
    """A Go program that plays the vectors' workers at the same head."""
    program = str(tmp_path_factory.mktemp("go") / "vectors")
    if shutil.which("go") is None:
        pytest.skip("there is no Go here; the repository's own tests have it")
    subprocess.run(
        ["go", "build", "-ldflags=-s -w", "-o", program, "./python/tests/goworkers"], cwd=conftest.ROOT, check=True
    )
    roles = [{"name": v["name"], "mode": v["mode"], "mesh": v["mesh"], "world": v["world"]} for v in VECTORS]
    p = subprocess.Popen(
        [program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "VECTORS_URL": session.url,
            "VECTORS_TOKEN_FILE": session.head.token_file,
            "VECTORS_ROLES": json.dumps(roles),
        },
    )
    assert p.stdout.readline().strip() == "ready"
    yield
    p.stdin.close()
    assert p.wait(90) == 0


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_a_python_driver_with_go_workers(session, go_workers, vector):
    cluster = troupe.Cluster.attach("go-" + vector["name"])
    check(vector, lambda: cluster.step(vector["input"]), lambda: cluster.execute_all_sync("calls"))
