"""Checkpoint and recovery: a GRPO loop whose trainer is killed in the middle. The role restarts, loads its checkpoint
and goes on.

Nothing polls: the call that was under way raises WorkerLostError, and the next one waits for the restarted role.
"""

import os
import signal
import sys
import tempfile

import numpy as np

import troupe
from troupe import Cluster, Dispatch, Worker, WorkerConfig, register


class Rollout(Worker):
    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def generate(self, prompts, weight):
        rng = np.random.default_rng(int(prompts[0]))
        return rng.random(len(prompts)) < 1 / (1 + np.exp(-weight))  # an answer is right or wrong


class Trainer(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, replay=True)
    def initialize(self, path):
        """Called once by the driver, and again by Troupe on every restarted worker."""
        self.path, self.step, self.weight = path, 0, -1.0
        if os.path.exists(path):
            saved = np.load(path)
            self.step, self.weight = int(saved["step"]), float(saved["weight"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def train_step(self, rewards, die=False):
        if die and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        advantage = rewards - rewards.mean()
        self.weight += 2 * float((advantage * rewards).mean())
        self.step += 1
        return self.step, self.weight

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def save(self):
        np.savez(self.path + ".new.npz", step=self.step, weight=self.weight)
        os.replace(self.path + ".new.npz", self.path)  # a checkpoint is whole or not there

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def state(self):
        return self.step, self.weight


def main(steps=12, killed_at=7):
    path = os.path.join(tempfile.mkdtemp(), "checkpoint.npz")
    with troupe.init(gpus="none"):
        rollout = Cluster("rollout", Rollout, worker_config=WorkerConfig(world_size=2))
        train = Cluster(
            "actor_train", Trainer, worker_config=WorkerConfig(world_size=2, policy="restart_role", restarts=2)
        )
        train.on_death(lambda death: print("rank", death.rank, "died", file=sys.stderr))
        train.initialize(path)
        step, weight = train.state()
        while step < steps:
            rewards = rollout.generate(np.arange(step * 64, step * 64 + 64), weight).astype(float)
            try:
                step, weight = train.train_step(rewards, die=step == killed_at, timeout=60)
                if step % 5 == 0:
                    train.save()
            except troupe.WorkerLostError:
                killed_at = -1
                step, weight = train.state(timeout=60)  # waits for the restart; what the checkpoint has
                print("back at step", step)
        print("step", step, "weight rose:", weight > -1)


if __name__ == "__main__":
    main()
