"""An engine for AReaL's tests of its controllers: every method that they call."""

import os

from areal.api import TrainEngine


class CheckEngine(TrainEngine):
    def __init__(self, config):
        self.config = config
        self.version = 1

    initialized = False

    def is_data_parallel_head(self):
        return int(os.environ["RANK"]) % 2 == 0

    def get_version(self):
        return self.version

    def destroy(self):
        pass

    def train_lm(self, input_=None):
        return {"lm_loss": 0.4}

    ppo_update = train_lm

    def echo(self, value):
        return value


def _nothing(self, *args, **kwargs):
    return None


for name in (
    "create_process_group",
    "initialize",
    "train",
    "set_version",
    "save",
    "load",
    "step_lr_scheduler",
    "connect_engine",
):
    setattr(CheckEngine, name, _nothing)
CheckEngine.__abstractmethods__ = frozenset()
