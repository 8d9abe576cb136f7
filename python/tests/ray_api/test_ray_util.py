"""ray.util: queue, pool of actors, state, private names."""

import asyncio
import queue

import pytest

from ray_api.raytest import eventually, module, ray

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
        ray.get(actor.double.remote(1), timeout=20)
    except ray.exceptions.RayActorError:
        return True
    return False


@ray.remote(num_cpus=0)
def take(q):
    return q.get(timeout=20)


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
    assert ray.get(waiting, timeout=20) == "x"
    actor = q.actor
    q.shutdown()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.qsize.remote(), timeout=20)


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
        pool.get_next_unordered(timeout=20)
    assert not pool.has_free()
    pool.push(Doubler.remote())
    pool.submit(lambda a, v: a.double.remote(v), 4)
    assert pool.get_next(timeout=20) == 8


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
    assert worker.global_worker.mode == 0 and worker.global_worker.gcs_client.address == ray.get_runtime_context().gcs_address
    assert module("_private.services").get_node_ip_address() == ray.util.get_node_ip_address() == ray.nodes()[0]["NodeManagerAddress"]
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
