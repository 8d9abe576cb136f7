"""torch tensors. Without torch there is nothing to test here; with TROUPE_TEST_TORCH in the environment that is a
failure."""

import os

import numpy as np
import pytest

import troupe
from troupe import _codec

if os.environ.get("TROUPE_TEST_TORCH"):
    import torch
else:
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install torch, and these run")

PLAIN = _codec.Codec()

DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]


def there_and_back(value):
    body = PLAIN.encode(value)
    return PLAIN.decode(bytearray(body if isinstance(body, bytes) else body.join()))


def same(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).contiguous().view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7), (200, 100)])
def test_every_dtype_and_shape(dtype, shape):
    value = torch.rand(shape).mul(3).to(getattr(torch, dtype))
    got = there_and_back({"x": [value]})["x"][0]
    assert isinstance(got, torch.Tensor) and same(got, value)


def test_views_gradients_and_writing():
    base = torch.arange(60_000, dtype=torch.float32).reshape(200, 300)
    for value in (base.T, base[::2, 1::3], base.requires_grad_()):
        got = there_and_back(value)
        assert same(got, value.detach()) and not got.requires_grad and got.is_contiguous()
        got += 1
    assert base.detach()[0, 1] == 1, "it is private"


def test_the_loss_of_requires_grad_is_said_once(monkeypatch):
    monkeypatch.setattr(_codec, "_warned_of_gradients", False)
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(RuntimeWarning, match=r"arrives without it.*tensor\.detach\(\)") as caught:
        for value in (parameter, [parameter * 2], torch.ones(1 << 16).requires_grad_()):
            got = there_and_back(value)
            assert not (got[0] if isinstance(got, list) else got).requires_grad
    assert len(caught) == 1 and caught[0].filename == __file__, "it points to the user's line"


def test_tensors_without_dense_elements_are_pickled():
    codec = _codec.Codec(pickle=True)
    nested = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    for value in (torch.empty(3, 4, device="meta"), torch.eye(3).to_sparse(), nested):
        got = codec.decode(bytearray(codec.encode({"x": value})))["x"]
        assert got.shape[0] == value.shape[0] and got.layout == value.layout and got.device == value.device


def test_dtypes_that_the_wire_has_not_are_named():
    with pytest.raises(troupe.EncodeError, match="complex64"):
        there_and_back(torch.zeros(2, dtype=torch.complex64))


def test_numpy_stays_numpy_and_torch_torch():
    got = there_and_back([np.zeros(3, "f4"), torch.zeros(3)])
    assert isinstance(got[0], np.ndarray) and isinstance(got[1], torch.Tensor)


def test_batches_of_tensors():
    batch = troupe.Batch({"x": torch.arange(10), "y": torch.rand(10, 2).to(torch.bfloat16)}, {"metrics": {"loss": 1.0}})
    parts = batch.split(3)
    assert [len(p) for p in parts] == [4, 3, 3]
    whole = troupe.Batch.concat([there_and_back(p) for p in parts])
    assert torch.equal(whole["x"], batch["x"]) and same(whole["y"], batch["y"])


def test_tensors_through_workers(workers):
    rows = torch.arange(7, dtype=torch.int32)
    assert torch.equal(workers.rows(rows), rows), "cut and joined"
    large = torch.rand(600, 600).to(torch.bfloat16)
    assert same(workers.workers[0].echo(large), large)
    assert workers.workers[0].type_name(large) == "Tensor"


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU; `examples/python/gpu_check.py` runs on one as well"
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_tensors_arrive_on_the_cpu(dtype):
    value = torch.rand(300, 400, device="cuda").mul(3).to(getattr(torch, dtype))
    for source in (value, value.T, value[::3], value[:0]):
        got = there_and_back(source)
        assert got.device.type == "cpu" and same(got, source.cpu())


class Unreadable(torch.Tensor):
    """A tensor whose elements cannot be copied."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            raise RuntimeError("its elements are not there")
        return super().__torch_function__(function, types, args, kwargs or {})


def unreadable():
    return torch.zeros(1024, 1024).as_subclass(Unreadable).T


class Broken:
    def large(self):
        return unreadable()

    def size(self, value):
        return sum(v.numel() for v in value) if isinstance(value, list) else value.numel()

    def meta(self, value):
        return value.to("meta")


def test_tensors_without_elements_travel_and_unreadable_ones_leave_nothing(session):
    worker = troupe.actor(Broken)
    try:
        assert worker.meta(torch.empty(1 << 20, device="meta")).is_meta
        for call in (
            worker.large,
            lambda: worker.size(unreadable()),
            lambda: worker.size([torch.zeros(1 << 20), unreadable()]),
        ):
            with pytest.raises(troupe.Error, match="cannot be copied from cpu"):
                call()
        assert worker.size(torch.zeros(1 << 20)) == 1 << 20, "the worker lives"
    finally:
        worker.cluster.shutdown()
