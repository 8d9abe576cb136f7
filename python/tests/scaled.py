"""Workers of roles that are scaled."""

import os
import time

import numpy as np

import troupe
from troupe import Dispatch, register


class Served(troupe.Worker):
    weights = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, replay=True)
    def load(self, weights):
        while isinstance(weights, dict) and os.path.exists(weights["wait"].format(self.rank)):
            time.sleep(0.01)
        if isinstance(weights, str) and weights == f"not on {self.rank}":
            raise ValueError("there is no room for these weights")
        self.weights = weights
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, replay=True)
    def shard(self, part):
        self.part = part

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def rows(self, x):
        return np.stack([x, np.full_like(x, self.rank)], axis=1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def loaded(self):
        return self.weights

    def answer(self, x):
        time.sleep(0.02)  # so that no rank answers all requests
        assert self.weights is not None, f"rank {self.rank} was never loaded"
        return [self.rank, self.weights]

    def pid(self):
        return os.getpid()


class Asker(troupe.Worker):
    """Has a handle of another role."""

    def know(self, cluster):
        self.cluster = cluster

    def size(self):
        return self.cluster.world_size, len(self.cluster.workers)

    def ask(self):
        return self.cluster.load("by a worker")
