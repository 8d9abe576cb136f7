"""TensorDicts and tensorclasses. Without tensordict there is nothing to test here; with TROUPE_TEST_TORCH in the
environment that is a failure.
A class with the same interface is in test_batch.py and test_split_table.py."""

import os

import pytest

import troupe
from troupe import _split

if os.environ.get("TROUPE_TEST_TORCH"):
    import tensordict
else:
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed; pip install it, and these run")
import torch
from tensordict import NonTensorStack, TensorDict, tensorclass


@tensorclass
class Samples:
    tokens: torch.Tensor
    source: str


class Learner(troupe.Worker):
    @troupe.register(dispatch_mode=troupe.Dispatch.DP_MP_COMPUTE)
    def step(self, batch):
        self.rows = len(batch)
        return batch

    @troupe.register(dispatch_mode=troupe.Dispatch.ONE_TO_ALL)
    def seen(self):
        return self.rows


@pytest.fixture(scope="module")
def learners(session):
    with troupe.Cluster("learners", Learner, worker_config=troupe.WorkerConfig(world_size=3)) as cluster:
        yield cluster


def batch(rows, width=4):
    return TensorDict(
        {
            "tokens": torch.arange(rows * width).reshape(rows, width),
            "prompt": NonTensorStack(*[f"prompt {i}" for i in range(rows)]),
            "inner": {"mask": torch.ones(rows, width, dtype=torch.bool)},
        },
        batch_size=[rows],
    )


@pytest.mark.parametrize("width", [4, 1 << 14, 1 << 18])
def test_a_tensordict_is_split_and_joined(learners, width):
    value = batch(4, width)  # torch would chunk it into 2 and 2
    got = learners.step(value)
    assert learners.seen() == [2, 1, 1]
    assert isinstance(got, TensorDict) and got.batch_size == value.batch_size
    assert torch.equal(got["tokens"], value["tokens"]) and torch.equal(got["inner", "mask"], value["inner", "mask"])
    assert list(got["prompt"]) == list(value["prompt"])


def test_a_tensorclass_is_split_and_joined(learners):
    value = Samples(tokens=torch.arange(5), source="web", batch_size=[5])
    got = learners.step(value)
    assert type(got) is Samples and torch.equal(got.tokens, value.tokens) and got.source == "web"
    assert learners.seen() == [2, 2, 1]


def test_padding_is_trimmed(learners):
    with pytest.raises(troupe.InvalidError, match=r"options\(pad=True\)"):
        learners.step(batch(2))
    got = learners.options(pad=True).step(batch(2))
    assert learners.seen() == [1, 1, 1] and list(got["prompt"]) == ["prompt 0", "prompt 1"]


def test_a_tensordict_without_batch_dimensions_is_refused(learners):
    unclear = TensorDict({"tokens": torch.zeros(6, 2), "reward": torch.zeros(6)})
    with pytest.raises(troupe.InvalidError, match="argument 1 is a TensorDict whose arrays all have 6 rows"):
        learners.step(unclear)
    weights = TensorDict({"weight": torch.zeros(6, 2), "bias": torch.zeros(2)})
    assert not _split.is_cut("DP_MP_COMPUTE", (weights, troupe.Broadcast(unclear)), {})


def test_ragged_rows_are_split_and_given_as_a_list(learners):
    rows = torch.nested.as_nested_tensor([torch.arange(i + 1) for i in range(6)], layout=torch.jagged)
    value = TensorDict({"tokens": rows}, batch_size=[6])
    with pytest.raises(troupe.InvalidError, match=r"cannot be joined: .*options\(collect_all=True\)"):
        learners.step(value)
    parts = learners.options(collect_all=True).step(value)
    assert [len(p) for p in parts] == [2, 2, 2] and parts[2]["tokens"][1].tolist() == [0, 1, 2, 3, 4, 5]
