"""On a machine with an NVIDIA GPU and torch: a worker reserved through NVML sees its device alone, trains a small model
called from a driver, is killed, and the device is clean and granted again.

    .venv/bin/python examples/python/gpu_check.py
"""

import os
import signal
import sys
import time

import torch

import troupe
from troupe import Cluster, Dispatch, Worker, WorkerConfig, register


class Trainer(Worker):
    def initialize(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def sees(self):
        return {
            "devices": self.devices,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "count": torch.cuda.device_count(),
            "name": torch.cuda.get_device_name(0),
            "pid": os.getpid(),
            "local_rank": os.environ.get("LOCAL_RANK"),
        }

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def train_step(self, x, y):
        before = torch.cuda.memory_allocated()
        loss = torch.nn.functional.mse_loss(self.model(x.cuda())[:, 0], y.cuda())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return [{"loss": loss.item(), "before": before, "after": torch.cuda.memory_allocated()}]

    def echo(self, x):
        return x

    def on_gpu(self, x):
        return x.cuda()


def check_tensors(handle):
    """Tensors keep their type, bits and shape, from the CPU and the GPU, whatever they look like."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    values = [base, base.T, base[::2, 1:], torch.empty(0, 3), torch.tensor(3.5), torch.ones(300, 300)]
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool):
        values += [base.to(dtype), torch.ones(200, 200).to(dtype), torch.empty(0).to(dtype)]
    for value in values + [v.cuda() for v in values]:
        for got in (handle.echo(value), handle.on_gpu(value)):
            assert got.dtype == value.dtype and got.shape == value.shape and got.device.type == "cpu", (
                value.dtype,
                got,
            )
            assert torch.equal(got.float(), value.cpu().float()), value.dtype
    print(f"  {2 * 2 * len(values)} tensors there and back")


def main():
    with troupe.init(gpus="auto"):
        cluster = Cluster(
            "actor_train", Trainer, worker_config=WorkerConfig(world_size=1, num_gpus_per_worker=1, start_timeout=120)
        )
        seen = cluster.workers[0].sees()
        print(
            f"  {cluster.rank2worker[0]} on {seen['name']}, visible {seen['visible']!r}, {seen['count']} device, "
            f"{seen['devices']}"
        )
        assert seen["count"] == 1 and len(seen["devices"]) == 1 and seen["local_rank"] == "0"
        cluster.execute_all_sync("initialize")
        x = torch.randn(1024, 512)
        y = x[:, 0] * 2 - x[:, 1]
        losses = []
        for step in range(50):
            (told,) = cluster.train_step(x, y)
            if step in (0, 49):
                print(
                    f"  step {step + 1}: loss {told['loss']:.4f}, device memory {told['before'] >> 20} → "
                    f"{told['after'] >> 20} MiB"
                )
            losses.append(told["loss"])
        assert losses[-1] < losses[0] / 5, "it does not learn"
        os.kill(seen["pid"], signal.SIGKILL)
        try:
            cluster.workers[0].echo(1)
            sys.exit("a killed worker answered")
        except troupe.WorkerLostError as err:
            print(f"  killed: {err.signal}: {err.message}")
        cluster.shutdown()
        began = time.monotonic()
        again = Cluster(
            "actor_train", Trainer, worker_config=WorkerConfig(world_size=1, num_gpus_per_worker=1, start_timeout=120)
        )
        assert again.workers[0].sees()["devices"] == seen["devices"]
        again.execute_all_sync("initialize")
        print(
            f"  the device is granted again: {again.train_step(x, y)[0]['loss']:.4f} after "
            f"{time.monotonic() - began:.1f} s"
        )
        check_tensors(
            again.workers[0]
        )  # last: from here on this process is on the device too, which then is granted to nobody
        again.shutdown()
    print("gpu check: all well")


if __name__ == "__main__":
    main()
