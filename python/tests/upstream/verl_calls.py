"""Calls of verl to a worker group of four."""

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


class Measured(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def small(self, value):
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def large(self, value):
        return len(value)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def shard(self, data):
        return data


def runs():
    ray.init(num_cpus=16, log_to_driver=False)
    group = RayWorkerGroup(
        RayResourcePool([4], use_gpu=False, max_colocate_count=1), RayClassWithInitArgs(cls=ray.remote(Measured))
    )
    blob = torch.ones(4 << 20)
    batch = DataProto.from_dict({"x": torch.ones(4, 1 << 20)})
    return {
        "small argument": (lambda: group.small(1), 50),
        "16 MiB to all": (lambda: group.large(blob), 3),
        "16 MiB in shards, there and back": (lambda: group.shard(batch), 3),
    }
