"""Weights on a GPU. Skipped without one."""

import uuid

import pytest

import troupe
from troupe import Box, _cuda_mover

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def session():
    with troupe.init(gpus="auto") as made:
        yield made


class Part(troupe.Worker):
    """A process with a part of two tensors on the GPU."""

    def open(self, name, by_rows):
        n = 768 // self.world_size
        size, start = ((n, 640), (n * self.rank, 0)) if by_rows else ((768, 640), (0, 0))
        if not by_rows:
            n = 640 // self.world_size
            size, start = (768, n), (0, n * self.rank)
        self.by_rows = by_rows
        self.part = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
        self.odd = torch.zeros(1001, dtype=torch.uint8, device="cuda")
        self.w = troupe.weights(name)
        self.w.bind({"x": Box((768, 640), start, self.part), "odd": self.odd})

    def values(self, step):
        whole = torch.arange(768 * 640, device="cuda").reshape(768, 640) * step % 251
        n = self.part.shape[0 if self.by_rows else 1]
        at = slice(n * self.rank, n * self.rank + n)
        return whole[at] if self.by_rows else whole[:, at]

    def publish(self, step):
        self.part.copy_(self.values(step))
        self.odd.fill_(step)
        version = self.w.publish(step)
        self.part.zero_()
        return version

    def take(self, version):
        self.w.stage(version)
        assert not torch.equal(self.part.long(), self.values(version.step)), "staging does not change the tensors"
        self.w.commit(version)
        return torch.equal(self.part.long(), self.values(version.step)) and bool((self.odd == version.step).all())


@pytest.mark.parametrize("ways", [{}, {"TROUPE_DEVICE": "host"}, {"TROUPE_DEVICE": "bus"}])
def test_processes_on_one_gpu(session, ways):
    name, role = f"policy-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex[:8]
    config = troupe.WorkerConfig(world_size=2, num_gpus_per_worker=0.2)
    receiving = troupe.WorkerConfig(world_size=2, num_gpus_per_worker=0.2, env=ways)
    with (
        troupe.Cluster(f"train-{role}", Part, worker_config=config) as train,
        troupe.Cluster(f"infer-{role}", Part, worker_config=receiving) as infer,
    ):
        train.execute_all_sync("open", name, True)
        infer.execute_all_sync("open", name, False)
        for step in (1, 2, 3, 4):
            (version,) = set(train.execute_all_sync("publish", step))
            assert infer.execute_all_sync("take", version) == [True, True]


@pytest.mark.parametrize("kernels", [True, False])
def test_strides_and_sizes(session, kernels, monkeypatch):
    """Views, transposed tensors and odd sizes, by the kernels of Triton and by torch."""
    if not kernels:
        monkeypatch.setattr(_cuda_mover, "_kernels", lambda: None)
    name = f"policy-{uuid.uuid4().hex[:8]}"
    w = troupe.weights(name)
    make = {
        "plain": lambda: torch.zeros(300, 129, dtype=torch.float32, device="cuda"),
        "transposed": lambda: torch.zeros(64, 33, dtype=torch.bfloat16, device="cuda").T,
        "view": lambda: torch.zeros(40, 50, 60, dtype=torch.int8, device="cuda")[3:9, 1:, ::2],
        "one": lambda: torch.zeros((), dtype=torch.float64, device="cuda"),
        "odd": lambda: torch.zeros(7, dtype=torch.uint8, device="cuda")[1:],
        "none": lambda: torch.zeros(0, 5, dtype=torch.float32, device="cuda"),
        "large": lambda: torch.zeros(30_000_001, dtype=torch.int16, device="cuda"),
    }
    source, target = ({name: do() for name, do in make.items()} for _ in range(2))
    target["plain"] = torch.zeros(129, 300, dtype=torch.float32, device="cuda").T
    w.bind(source, use="publish")
    w.bind(target, use="take")
    for step in (1, 2, 3):
        for tensor in source.values():
            tensor.copy_(torch.randint(0, 120, tensor.shape, device="cuda"))
        w.commit(w.stage(w.publish(step)))
        assert all(torch.equal(source[name], target[name]) for name in source)
