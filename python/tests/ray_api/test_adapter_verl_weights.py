"""verl's checkpoint engine on troupe.weights, with a stand-in of verl: real processes, in the order of verl's manager.
`make frameworks` runs it with verl itself."""

import numpy as np
import pytest

from ray_api.raytest import REAL, ray

if REAL:
    pytest.skip("the adapters run with troupe.ray", allow_module_level=True)


class Rank:
    """A process with a checkpoint engine, as verl's workers have it."""

    def __init__(self, **settings):
        from verl.checkpoint_engine.base import CheckpointEngineRegistry

        import troupe.adapters.verl_weights  # noqa: F401 as custom_backend_module does

        self.engine = CheckpointEngineRegistry.new("troupe", bucket_size=1 << 20, **settings)

    def execute_checkpoint_engine(self, method, **kwargs):
        return getattr(self.engine, method)(**kwargs)

    async def send(self, value, names, step):
        await self.engine.send_weights(((n, np.full((300, 40), value, "f4")) for n in names), step)

    async def receive(self, step, few=False):
        got = {}
        async for name, tensor in self.engine.receive_weights(step):
            got[name] = float(tensor[0, 0]), float(tensor[-1, -1])
            if few:
                return got
        return got

    def topology(self, trainers, receivers, metadata):
        return type(self.engine).build_topology(trainers, receivers, metadata)


@pytest.fixture(scope="module")
def ranks(frameworks):
    ray.init(address="local", num_cpus=16)
    actor = ray.remote(Rank)
    trainers = [actor.remote(is_master=True), actor.remote()]
    yield trainers, [actor.remote() for _ in range(2)]
    ray.shutdown()


def prepare(trainers, receivers):
    """What verl's manager does before each update."""
    both = trainers + receivers
    metadata = ray.get([a.execute_checkpoint_engine.remote("prepare") for a in both])
    first, second = ray.get(trainers[0].topology.remote(len(trainers), len(receivers), metadata))
    for group, kwargs in ((trainers, first), (receivers, second)):
        calls = [{name: values[i] for name, values in kwargs.items()} for i in range(len(group))]
        ray.get([group[i].execute_checkpoint_engine.remote("init_process_group", **c) for i, c in enumerate(calls)])


def test_updates_reach_all_receivers(ranks):
    trainers, receivers = ranks
    updates = [(1.0, "ab", None), (2.0, "ab", 7), (3.0, "ab", 7), (4.0, "abc", 9)]
    for value, names, step in updates:
        prepare(trainers, receivers)
        received = [a.receive.remote(step) for a in receivers]
        ray.get([a.send.remote(value, names, step) for a in trainers])
        assert ray.get(received, timeout=60) == [dict.fromkeys(names, (value, value))] * 2
        ray.get([a.execute_checkpoint_engine.remote("finalize") for a in trainers + receivers])
    late = ray.remote(Rank).remote()
    receivers = [*receivers, late]
    prepare(trainers, receivers)
    received = [a.receive.remote(10, few=a is late) for a in receivers]
    ray.get([a.send.remote(5.0, "abc", 10) for a in trainers])
    *whole, part = ray.get(received, timeout=60)
    assert whole == [dict.fromkeys("abc", (5.0, 5.0))] * 2 and list(part.values()) == [(5.0, 5.0)]


def test_a_trainer_without_a_first_rank(ranks):
    trainers, _ = ranks
    with pytest.raises(Exception, match="is_master=True"):
        ray.get(trainers[0].topology.remote(1, 1, [{}, {}]))
