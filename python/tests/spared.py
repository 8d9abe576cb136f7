"""Workers of roles with spares."""

import os
import signal

import troupe
from troupe import Dispatch, register


class Spared(troupe.Worker):
    prepared = 0
    loaded = None

    @classmethod
    def prepare(cls):
        cls.prepared = os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, replay=True)
    def load(self, value):
        print(f"rank {self.rank} loads", flush=True)
        self.loaded = value

    def state(self):
        """Returns whether this process was a spare, and what it has loaded."""
        return self.prepared == os.getpid(), self.loaded, self.rank, os.environ["RANK"]

    def pid(self):
        return os.getpid()

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)
