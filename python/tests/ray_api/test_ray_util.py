"""ray.util: queue, pool of actors, state, private names."""

import asyncio
import os
import queue
import re
import subprocess
import sys
import time
import urllib.request

import pytest

from ray_api.raytest import REAL, eventually, module, ray

Queue = module("util.queue").Queue
Empty, Full = module("util.queue").Empty, module("util.queue").Full


@ray.remote(num_cpus=0)
class Doubler:
    def double(self, x):
        if x is None:
            raise ValueError("nothing to double")
        return 2 * x


def dead(actor):
    try:
        ray.get(actor.double.remote(1), timeout=90)
    except ray.exceptions.RayActorError:
        return True
    return False


@ray.remote(num_cpus=0)
def take(q):
    return q.get(timeout=90)


def test_queue(session):
    q = Queue(maxsize=2)
    assert q.empty() and q.qsize() == q.size() == len(q) == 0
    q.put(1)
    q.put_nowait(2)
    assert q.full()
    with pytest.raises(Full):
        q.put_nowait(3)
    with pytest.raises(queue.Full):
        q.put(3, timeout=0.05)
    with pytest.raises(Full):
        q.put_nowait_batch([3, 4])
    assert q.get() == 1 and q.get_nowait() == 2
    with pytest.raises(Empty):
        q.get_nowait()
    with pytest.raises(queue.Empty):
        q.get(timeout=0.05)
    with pytest.raises(ValueError):
        q.get(timeout=-1)
    q.put_nowait_batch([5, 6])
    with pytest.raises(Empty):
        q.get_nowait_batch(3)
    assert q.get_nowait_batch(2) == [5, 6]
    waiting = take.remote(q)
    assert not ray.wait([waiting], timeout=0.1)[0]
    q.put("x")
    assert ray.get(waiting, timeout=90) == "x"
    actor = q.actor
    q.shutdown()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.qsize.remote(), timeout=90)


def test_queue_in_a_loop(session):
    async def run():
        q = Queue(1)
        await q.put_async(1)
        with pytest.raises(Full):
            await q.put_async(2, timeout=0.05)
        assert await q.get_async() == 1
        with pytest.raises(Empty):
            await q.get_async(block=False)
        q.shutdown(force=True)

    asyncio.run(run())


def test_queue_holds_resources(session):
    q = Queue(actor_options={"num_cpus": 1})
    eventually(lambda: ray.available_resources()["CPU"] == 3, "the queue's actor holds a CPU")
    q.shutdown(force=True)
    eventually(lambda: ray.available_resources()["CPU"] == 4, "the CPU is free")


def test_pool(session):
    actors = [Doubler.remote() for _ in range(2)]
    pool = ray.util.ActorPool(actors)
    assert list(pool.map(lambda a, v: a.double.remote(v), range(5))) == [0, 2, 4, 6, 8]
    assert sorted(pool.map_unordered(lambda a, v: a.double.remote(v), range(5))) == [0, 2, 4, 6, 8]
    pool.submit(lambda a, v: a.double.remote(v), None)
    with pytest.raises(ValueError, match="nothing to double"):
        pool.get_next()
    assert pool.has_free() and not pool.has_next()
    with pytest.raises(StopIteration):
        pool.get_next()
    with pytest.raises(ValueError):
        pool.push(actors[0])
    assert pool.pop_idle() in actors
    last = pool._idle_actors[0]
    ray.kill(last)
    eventually(lambda: dead(last), "the actor is dead")
    pool.submit(lambda a, v: a.double.remote(v), 1)
    with pytest.raises(ray.exceptions.RayActorError):
        pool.get_next_unordered(timeout=90)
    assert not pool.has_free()
    pool.push(Doubler.remote())
    pool.submit(lambda a, v: a.double.remote(v), 4)
    assert pool.get_next(timeout=90) == 8


def test_state(session):
    state = module("util.state")
    actor = Doubler.options(name="counted").remote()
    ray.get(actor.double.remote(1))
    (row,) = state.list_actors(filters=[("name", "=", "counted")])
    assert (row.class_name, row.state, row["actor_id"]) == ("Doubler", "ALIVE", actor._actor_id.hex())
    assert state.get_actor(id=actor._actor_id.hex()).node_id == ray.nodes()[0]["NodeID"]
    assert "counted" in ray.util.list_named_actors()
    assert any(n["name"] == "counted" for n in ray.util.list_named_actors(all_namespaces=True))
    (node,) = state.list_nodes()
    assert node.state == "ALIVE" and node.is_head_node
    with pytest.raises(ValueError):
        state.list_actors(filters=[("name", "<", "x")])
    ray.kill(actor)
    eventually(lambda: state.get_actor(actor._actor_id.hex()).state == "DEAD", "the actor is dead")
    assert "counted" not in ray.util.list_named_actors()


@ray.remote(num_cpus=4)
def waits_for(path):
    """Returns the path once it exists. A task that waits in ray.get, as a queue does, gives its CPUs to the next."""
    while not os.path.exists(path):
        time.sleep(0.02)
    return path


@ray.remote(num_cpus=0)
class Failing:
    def fails(self):
        raise LookupError


def test_tables_of_tasks_workers_and_objects(session, tmp_path):
    state = module("util.state")
    path, actor = str(tmp_path / "done"), Failing.remote()
    with pytest.raises(LookupError):
        ray.get(actor.fails.remote())
    running = waits_for.remote(path)
    behind = [waits_for.remote(path), waits_for.remote(running)]

    def states(**wanted):
        rows = state.list_tasks(filters=[(k, "=", v) for k, v in wanted.items()], limit=10_000, detail=True)
        return sorted(row.state for row in rows)

    waiting = ["PENDING_ARGS_AVAIL", "PENDING_NODE_ASSIGNMENT", "RUNNING"]
    eventually(lambda: states(name="waits_for") == waiting, "one of the tasks runs", 60)
    actor_id = actor._actor_id.hex()
    eventually(lambda: states(actor_id=actor_id, type="ACTOR_TASK") == ["FAILED"], "the method has failed", 60)
    (row,) = state.list_tasks(filters=[("name", "=", "waits_for"), ("state", "=", "RUNNING")], detail=True)
    assert state.get_task(row.task_id).worker_pid == row.worker_pid != os.getpid()
    (worker,) = state.list_workers(filters=[("pid", "=", str(row.worker_pid))], detail=True)
    assert worker.is_alive and worker.worker_type == "WORKER" and worker.worker_id == row.worker_id
    summary = state.summarize_tasks()["cluster"]["summary"]
    assert sum(next(s for name, s in summary.items() if "waits_for" in name)["state_counts"].values()) == 3
    ref = ray.put(b"x" * 5000)
    (found,) = state.list_objects(filters=[("object_id", "=", ref.hex())])
    assert 5000 <= found.object_size < 6000 and found.pid == os.getpid() and found.reference_type == "LOCAL_REFERENCE"
    (tmp_path / "done").touch()
    assert ray.get([running, *behind]) == [path] * 3


def test_private_names(session):
    compat = module("_private.async_compat")

    class Base:
        async def run(self):
            pass

    class Derived(Base):
        def stop(self):
            pass

    assert compat.has_async_methods(Derived) and not compat.has_async_methods(object)
    with module("_private.profiling").profile("step"):
        pass
    worker = module("_private.worker")
    assert (
        worker.global_worker.mode == 0
        and worker.global_worker.gcs_client.address == ray.get_runtime_context().gcs_address
    )
    assert (
        module("_private.services").get_node_ip_address()
        == ray.util.get_node_ip_address()
        == ray.nodes()[0]["NodeManagerAddress"]
    )
    assert module("_private.runtime_env.constants").RAY_JOB_CONFIG_JSON_ENV_VAR == "RAY_JOB_CONFIG_JSON_ENV_VAR"
    assert module("_private.log_monitor").is_proc_alive(1)
    assert module("_raylet").ObjectRef is ray.ObjectRef
    timer = module("util.timer")._Timer()
    with timer:
        pass
    assert timer.mean >= 0
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(lambda: 3))() == 3


def test_completed(session):
    refs = [Doubler.remote().double.remote(i) for i in range(3)]
    assert sorted(ray.util.as_completed(refs)) == [0, 2, 4]


def test_metrics(session):
    """Values are checked as in Ray, in drivers and in workers."""
    metrics = module("util.metrics")
    counter = metrics.Counter("calls", description="of a test", tag_keys=("role",))
    gauge = metrics.Gauge("lag", tag_keys=("role",)).set_default_tags({"role": "a"})
    histogram = metrics.Histogram("seconds", boundaries=[0.1, 1.0])
    assert counter.info == {"name": "calls", "description": "of a test", "tag_keys": ("role",), "default_tags": {}}
    assert histogram.info["boundaries"] == [0.1, 1.0] and gauge.info["default_tags"] == {"role": "a"}

    @ray.remote
    def record(counter, histogram):
        counter.inc(2, tags={"role": "b"})
        histogram.observe(0.5)

    gauge.set(1.0)
    gauge.set(None)
    ray.get(record.remote(counter, histogram))
    with pytest.raises(ValueError, match="Missing value for tag key"):
        counter.inc()
    with pytest.raises(ValueError, match=">0"):
        counter.inc(0, tags={"role": "b"})
    with pytest.raises(ValueError, match="Unrecognized tag key"):
        gauge.set_default_tags({"other": "a"})
    with pytest.raises(ValueError, match="boundaries"):
        metrics.Histogram("empty")
    with pytest.raises(TypeError, match="value must be"):
        histogram.observe("1")


_MEASURES = """
import troupe.ray as ray
from troupe.ray.util.metrics import Counter, Gauge, Histogram
ray.init(address="auto")
@ray.remote
class Measuring:
    def __init__(self):
        self.seconds = Histogram("step_seconds", "of a step", boundaries=[0.1, 1.0])
    def step(self, seconds):
        self.seconds.observe(seconds)
actor = Measuring.remote()
ray.get([actor.step.remote(s) for s in (0.05, 0.5, 5)])
counter = Counter("samples", "made", tag_keys=("role",))
counter.inc(tags={"role": "actor"})
counter.inc(2, tags={"role": "actor"})
Gauge("lag", "behind").set(7)
print("measured", flush=True)
input()
"""


@pytest.mark.skipif(REAL, reason="Ray's own endpoint is found by its dashboard")
def test_metrics_reach_the_endpoint_of_the_head(tmp_path):
    env = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "troupe.ray.scripts"]
    port = module("_common.network_utils").find_free_port()
    start = ["start", "--head", "--port=0", "--num-cpus=2", f"--metrics-export-port={port}"]
    subprocess.run([*command, *start], env=env, check=True, stdout=subprocess.DEVNULL)
    program = subprocess.Popen(
        [sys.executable, "-c", _MEASURES], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    wanted = {
        'ray_samples{.*role="actor".*} 3',
        "ray_lag{.*} 7",
        'ray_step_seconds_bucket{.*le="0.1"} 1',
        'ray_step_seconds_bucket{.*le="1"} 2',
        "ray_step_seconds_sum{.*} 5.55",
    }

    def shown():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
            text = page.read().decode()
        return all(re.search(line, text) for line in wanted)

    try:
        assert program.stdout.readline() == "measured\n"
        eventually(shown, "the series are there")
    finally:
        program.communicate("end\n", timeout=60)
        subprocess.run([*command, "stop"], env=env, check=True, stdout=subprocess.DEVNULL)
