"""Workers that are killed and restarted."""

import os
import time

import numpy as np

import troupe
from troupe import Dispatch, register


class Mortal(troupe.Worker):
    """Takes as long to be made as the file `slow` says, if there is one."""

    def __init__(self, worker_config=None, slow=""):
        super().__init__(worker_config)
        self.setups = []
        self.count = 0
        while slow and os.path.exists(slow):
            time.sleep(0.01)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, replay=True)
    def initialize(self, lr, *, weights=None):
        if lr is None:
            raise ValueError("no learning rate")
        self.setups.append(lr)
        self.weights = weights

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, replay=True)
    def take_part(self, part):
        self.part = part

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self):
        self.count += 1
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "setups": self.setups,
            "count": self.count,
            "part": getattr(self, "part", None),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self):
        return float(self.weights.sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kind(self):
        return type(self.weights).__name__

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def inner_total(self):
        """The total of weights that came as a reference inside a list."""
        return float(self.weights[0].result(30).sum())

    def export(self, value, size):
        return np.full(size, value, np.float32)

    def put(self, value, size):
        return troupe.put(np.full(size, value, np.float32))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)
        return os.getpid()

    def pid(self):
        return os.getpid()

    @register(lane="control")
    def status(self):
        return os.getpid()


class AsyncMortal:
    def __init__(self):
        self.setups = []

    @register(replay=True)
    async def initialize(self, lr):
        self.setups.append(lr)

    @register()
    async def step(self):
        return {"pid": os.getpid(), "setups": self.setups}
