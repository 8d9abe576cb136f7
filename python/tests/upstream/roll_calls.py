"""Calls of ROLL to a cluster of four workers."""

import ray
import torch
from roll.configs.worker_config import WorkerConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.resource_manager import ResourceManager


class Measured(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, clear_cache=False)
    def small(self, value):
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, clear_cache=False)
    def large(self, value):
        return len(value)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def shard(self, parts):
        return parts


def runs():
    ray.init(num_cpus=16, log_to_driver=False)
    cluster = Cluster("measured", Measured, ResourceManager(0, 1), WorkerConfig(name="measured", world_size=4))
    blob = torch.ones(4 << 20)
    batch = [torch.ones(1 << 20) for _ in range(4)]
    return {
        "small argument": (lambda: cluster.small(1), 50),
        "16 MiB to all": (lambda: cluster.large(blob), 3),
        "16 MiB in shards, there and back": (lambda: cluster.shard(batch), 3),
    }
