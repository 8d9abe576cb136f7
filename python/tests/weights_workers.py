"""Worker classes of the tests of weights: those that publish have rows, those that take have columns."""

import os
import pathlib
import warnings

import numpy as np

import troupe
from host_device import HostDevice
from troupe import Box, _device

ROWS, COLUMNS = 512, 1024


class Train(troupe.Worker):
    mode = "full"

    def zeros(self, shape, dtype):
        return np.zeros(shape, dtype)

    def open(self, name):
        half = ROWS // self.world_size
        self.a, self.b = self.zeros((half, COLUMNS), "f4"), self.zeros(3, "f8")
        self.w = troupe.weights(name)
        self.w.bind({"a": [Box((ROWS, COLUMNS), (half * self.rank, 0), self.a)], "b": self.b})

    def step(self, step):
        self.a[:] = step + self.rank
        self.b[:] = step
        version = self.w.publish(step, mode=self.mode)
        self.a[:] = -1  # the version is a snapshot
        return version

    def publish_forever(self, file):
        """Publishes one version after the other, alone, until the process is killed."""
        for step in range(1000, 1 << 40):
            self.w.publish(step)
            pathlib.Path(file).touch()

    def pid(self):
        return os.getpid()


class Infer(troupe.Worker):
    def zeros(self, shape, dtype):
        return np.zeros(shape, dtype)

    def open(self, name):
        part = COLUMNS // self.world_size
        self.a, self.b = self.zeros((ROWS, part), "f4"), self.zeros(3, "f8")
        self.w = troupe.weights(name)
        self.w.bind({"a": Box((ROWS, COLUMNS), (0, part * self.rank), self.a), "b": self.b})

    def take(self, version=None, timeout=None):
        version = self.w.stage(version, timeout=timeout)
        before = float(self.b[0])
        assert self.w.commit(version) == version == self.w.version
        return before

    def stage_forever(self, file):
        while True:
            self.w.stage()
            pathlib.Path(file).touch()

    def seen(self):
        """The step and the version of the tensors, which must have the values of one version."""
        step = float(self.b[0])
        assert np.all(self.b == step), self.b
        assert np.all(self.a[: ROWS // 2] == step) and np.all(self.a[ROWS // 2 :] == step + 1), self.a
        return step, self.w.version

    def pid(self):
        return os.getpid()


class Ready(Infer):
    """Has the newest version when its constructor returns, as a rank that is restarted should."""

    def __init__(self, name):
        self.open(name)
        self.take()


class AsyncInfer(Infer):
    async def follow(self, steps):
        """Takes the newest version as often as there is one, without a call that blocks the loop."""
        warnings.simplefilter("error")
        version, taken = None, []
        while not taken or taken[-1] < steps:
            await self.w.next(after=version)
            version = await self.w.stage(blocking=False)  # the newest; the one that was announced may be replaced
            await self.w.commit(version, blocking=False)
            taken.append(self.seen()[0])
        return taken


class Engine(troupe.Worker):
    """An engine that loads by name."""

    def open(self, name):
        self.tensors, self.fails = {}, False
        self.w = troupe.weights(name)
        self.w.bind(load=self.load)

    def load(self, pairs):
        for name, tensor in pairs:
            if self.fails:
                raise KeyError(name)
            self.tensors[name] = tensor

    def take(self, version=None, fails=False):
        self.fails = fails
        version = self.w.stage(version)
        self.w.commit(version)
        return self.w.version

    def seen(self):
        a, b = self.tensors["a"], self.tensors["b"]
        assert a.shape == (ROWS, COLUMNS) and np.all(a[ROWS // 2 :] == a[0, 0] + 1)
        return float(a[0, 0]), float(b[2]), self.w.version


class OnDevice:
    """Tensors on a device in memory of the host."""

    name = b"one"

    def __init__(self):
        _device._backend = self.device = HostDevice(self.name)
        _device.CHUNK = 256 << 10

    def zeros(self, shape, dtype):
        return self.device.device_array(np.zeros(shape, dtype))

    def kept(self):
        """The number of buckets that are lent."""
        return _device.count()


class TrainOnDevice(OnDevice, Train):
    pass


class DeltasOnDevice(TrainOnDevice):
    mode = "delta"


class InferOnDevice(OnDevice, Infer):
    pass


class InferElsewhere(InferOnDevice):
    name = b"two"


class InferByBus(InferElsewhere):
    def open(self, name):
        os.environ["TROUPE_DEVICE"] = "bus"
        super().open(name)
