"""A pool of rollout workers that has the devices which a trainer leaves free: it grows when the trainer ends, a killed
worker is replaced, and the answers stay complete, in order and of the newest weights while it does."""

import os
import signal

import troupe
from troupe import Cluster, Dispatch, Worker, WorkerConfig, register


class Trainer(Worker):
    def train(self):
        return self.rank


class Rollout(Worker):
    @register(replay=True)  # a worker that comes later is called with the last version before it takes prompts
    def load(self, version):
        self.version = version

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def generate(self, prompts):
        return [f"{prompt}@{self.version}" for prompt in prompts]


def grown(pool, size):
    """The membership once the pool has that many workers."""
    now = pool.members()
    while len(now.members) < size:
        now = pool.changed(now.epoch).result(60)
    return now


def main():
    with troupe.init(gpus="sim:1x8"):
        device = {"num_gpus_per_worker": 1, "num_cpus_per_worker": 0}
        trainer = Cluster("trainer", Trainer, worker_config=WorkerConfig(world_size=5, **device))
        pool = Cluster("rollout", Rollout, worker_config=WorkerConfig(replicas=(1, 8), spares=1, **device))
        pool.load(1)
        beside = grown(pool, 3)  # of eight devices the trainer has five
        prompts = [f"p{i}" for i in range(24)]
        expected = [f"{prompt}@1" for prompt in prompts]
        complete = pool.generate(prompts) == expected
        os.kill(beside.members[1].pid, signal.SIGKILL)
        replaced = pool.changed(beside.epoch).result(60)
        complete = complete and pool.generate(prompts) == expected
        trainer.shutdown()
        alone = grown(pool, 8)
        complete = complete and pool.generate(prompts) == expected
        sizes = len(beside.members), len(replaced.members), len(alone.members)
        print("beside the trainer {}, after a kill {}, alone {}".format(*sizes))
        print("complete", complete)


if __name__ == "__main__":
    main()
