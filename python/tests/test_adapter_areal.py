"""troupe.adapters.areal with a stand-in of AReaL: real workers, real calls. `make adapters-check` runs AReaL's own
tests with the adapter."""

import asyncio
import json
import os
import sys
import urllib.request

import numpy as np
import pytest

STANDINS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standins")
ENGINE = "areal_engines.Engine"


@pytest.fixture(scope="module")
def areal(session):
    """The stand-in and the adapter; workers find both by the driver's sys.path."""
    sys.path.insert(0, STANDINS)
    import areal.api.cli_args
    import areal.infra.scheduler.exceptions

    from troupe.adapters.areal import TroupeScheduler

    areal.TroupeScheduler = TroupeScheduler
    yield areal
    sys.path.remove(STANDINS)


@pytest.fixture(scope="module")
def scheduler(areal):
    made = areal.TroupeScheduler(experiment_name="e", trial_name="t", startup_timeout=60)
    yield made
    made.delete_workers()


def job(areal, role, replicas, *, strategy=None, **spec):
    return areal.api.Job(
        role,
        replicas,
        [areal.api.cli_args.SchedulingSpec(cpu=1, **spec)],
        strategy or areal.api.cli_args.SchedulingStrategy(),
    )


@pytest.fixture(scope="module")
def actor(areal, scheduler):
    """Four workers with an engine each, and a name for calls to all of them."""
    assert scheduler.create_workers(job(areal, "actor", 4, gpu=1, env_vars={"MARK": "a=b,c"})) == [
        f"actor/{i}" for i in range(4)
    ]
    workers = scheduler.get_workers("actor")

    async def setup():
        await asyncio.gather(
            *[scheduler.set_worker_env(w.id, {"RANK": str(i), "WORLD_SIZE": "4"}) for i, w in enumerate(workers)]
        )
        await asyncio.gather(
            *[scheduler.create_engine(w.id, ENGINE, f"actor/{i}", config={"lr": 0.1}) for i, w in enumerate(workers)]
        )

    asyncio.run(setup())
    return workers


def call_all(scheduler, workers, method, *args, **kwargs):
    async def run():
        calls = [
            scheduler.async_call_engine(w.id, method, f"actor/{i}", *args, **kwargs) for i, w in enumerate(workers)
        ]
        return await asyncio.gather(*calls)

    return asyncio.run(run())


class Counted:
    """Counts how often it is encoded."""

    def __init__(self):
        self.encoded = 0

    def __reduce__(self):
        self.encoded += 1
        return str, ("value",)


def test_roles_engines_and_environment(scheduler, actor):
    assert [w.id for w in actor] == [f"actor/{i}" for i in range(4)]
    assert all(w.ip == "127.0.0.1" and len(w.worker_ports) == 2 for w in actor)
    assert call_all(scheduler, actor, "environment", "RANK") == ["0", "1", "2", "3"]
    assert scheduler.call_engine("actor/2", "environment", None, "MARK") == "a=b,c"
    assert scheduler.call_engine("actor/2", "environment", "actor/2", name="CUDA_VISIBLE_DEVICES")
    with urllib.request.urlopen(f"http://{actor[1].ip}:{actor[1].worker_ports[0]}/health", timeout=90) as answer:
        assert json.load(answer) == {"status": "healthy", "role": "actor", "engine_count": 1, "engines": ["actor/1"]}


def test_calls_of_one_loop_turn_are_sent_together(scheduler, actor):
    """Arguments that several ranks share are encoded once; each shard of a data-parallel call once for its ranks."""
    everyone = Counted()
    assert call_all(scheduler, actor, "shown", everyone) == ["'value'"] * 4
    assert everyone.encoded == 1
    shards = [Counted(), Counted()]

    async def by_shard():
        return await asyncio.gather(
            *[scheduler.async_call_engine(w.id, "shown", f"actor/{i}", shards[i // 2]) for i, w in enumerate(actor)]
        )

    assert asyncio.run(by_shard()) == ["'value'"] * 4
    assert [s.encoded for s in shards] == [1, 1]


def test_calls_to_one_worker_stay_in_order(scheduler, actor):
    async def run():
        calls = [scheduler.set_worker_env("actor/0", {"STEP": "1"})]
        calls += [scheduler.async_call_engine(w.id, "environment", None, "STEP") for w in actor]
        calls += [
            scheduler.set_worker_env("actor/0", {"STEP": "2"}),
            scheduler.async_call_engine("actor/0", "environment", None, "STEP"),
        ]
        return await asyncio.gather(*calls)

    assert asyncio.run(run()) == [None, "1", None, None, None, None, "2"]


def test_tensors_stay_with_their_worker(areal, scheduler, actor):
    """Results are named, fetched by another worker without the driver, and dropped."""
    RTensor = areal.infra.rpc.rtensor.RTensor
    results = call_all(scheduler, actor, "double", [{"x": np.arange(100_000.0)}])
    assert all(isinstance(r[0]["y"], RTensor) for r in results)
    assert scheduler.call_engine("actor/3", "total", None, results[0][0]["y"]) == float(np.arange(100_000.0).sum() * 2)
    assert RTensor.localize(results[1])[0]["y"][-1] == 199_998
    shard = results[0][0]["y"].shard
    asyncio.run(RTensor.clear_node(shard.node_addr, [shard.shard_id]))
    with pytest.raises(KeyError):
        RTensor.localize(results[0])


def test_errors_are_the_schedulers_own(areal, scheduler, actor):
    errors = areal.infra.scheduler.exceptions
    for id, method in (("actor/9", "shown"), ("nobody/0", "shown")):
        with pytest.raises(errors.WorkerNotFoundError):
            scheduler.call_engine(id, method)
    with pytest.raises(errors.EngineCallError, match="bad batch"):
        scheduler.call_engine("actor/0", "fail")
    with pytest.raises(errors.EngineCallError, match="does not have method 'nothing'"):
        asyncio.run(scheduler.async_call_engine("actor/0", "nothing"))
    with pytest.raises(errors.EngineCallError, match="Engine 'other' not found"):
        scheduler.call_engine("actor/0", "shown", "other", 1)
    with pytest.raises(errors.EngineImportError, match="no attribute 'Missing'"):
        asyncio.run(scheduler.create_engine("actor/0", "areal_engines.Missing", "x"))
    with pytest.raises(errors.EngineCreationError, match="must be a subclass"):
        asyncio.run(scheduler.create_engine("actor/0", "areal_engines.Unimportable", "x"))
    with pytest.raises(errors.EngineCreationError, match="already exists"):
        asyncio.run(scheduler.create_engine("actor/0", ENGINE))
    with pytest.raises(errors.WorkerCreationError, match="already exists"):
        scheduler.create_workers(job(areal, "actor", 1))
    with pytest.raises(errors.WorkerCreationError, match="replicas"):
        scheduler.create_workers(job(areal, "none", 0))
    with pytest.raises(errors.WorkerCreationError, match="--port"):
        scheduler.create_workers(job(areal, "none", 1, cmd="python -m server --port 1"))
    with pytest.raises(errors.WorkerCreationError, match="devices"):
        scheduler.create_workers(job(areal, "none", 1, gpu=999))
    with pytest.raises(errors.WorkerNotFoundError):
        scheduler.get_workers("none")
    scheduler.delete_workers("none")


def test_forked_roles_share_the_devices_of_their_target(areal, scheduler, actor):
    colocated = areal.api.cli_args.SchedulingStrategy("colocation", "actor", fork=True)
    assert scheduler.create_workers(job(areal, "ref", 4, strategy=colocated)) == [f"ref/{i}" for i in range(4)]
    command = "areal_engines --extra"
    assert scheduler.fork_workers("proxy", "ref", command) == [f"proxy/{i}" for i in range(4)]
    asyncio.run(scheduler.create_engine("ref/2", ENGINE))
    devices = [scheduler.call_engine(id, "environment", None, "CUDA_VISIBLE_DEVICES") for id in ("actor/2", "ref/2")]
    assert devices[0] == devices[1] != ""
    proxy = scheduler.get_workers("proxy")[2]
    with urllib.request.urlopen(f"http://{proxy.ip}:{proxy.worker_ports[0]}/health", timeout=90) as answer:
        told = answer.read().decode()
    assert told.startswith("--extra --host 0.0.0.0 --port ") and "--role proxy --worker-index 2" in told
    same = areal.api.cli_args.SchedulingStrategy("colocation", "actor", fork=False)
    assert scheduler.create_workers(job(areal, "critic", 4, strategy=same)) == [w.id for w in actor]
    assert scheduler.get_workers("critic") == actor
    scheduler.delete_workers("critic")
    scheduler.delete_workers("ref")
    with pytest.raises(areal.infra.scheduler.exceptions.WorkerNotFoundError):
        scheduler.get_workers("proxy")
    assert scheduler.call_engine("actor/0", "shown", None, 1) == "1"


def test_a_lost_worker_is_named_with_its_exit_code(areal, scheduler):
    failed = areal.infra.scheduler.exceptions.WorkerFailedError
    scheduler.create_workers(job(areal, "fragile", 1))
    asyncio.run(scheduler.create_engine("fragile/0", ENGINE))
    with pytest.raises(failed, match="so to say") as caught:
        scheduler.call_engine("fragile/0", "exit")
    assert (caught.value.worker_id, caught.value.exit_code) == ("fragile/0", 7)
    with pytest.raises(failed):
        scheduler.get_workers("fragile")
    scheduler.delete_workers("fragile")
