"""An asynchronous pipeline with a killed worker: every stage at its own pace, durable streams between them, and no
sample is lost."""

import os
import signal
import time

import troupe
from troupe import Cluster, Pipeline, Stage, Stream, Worker, WorkerConfig


class Rollout(Worker):
    def generate(self, prompt):
        return {"prompt": prompt, "answer": prompt * 2}


class Reward(Worker):
    def score(self, sample):
        time.sleep(0.01)
        return {**sample, "reward": 1.0}

    def pid(self):
        return os.getpid()


def main(prompts=60):
    with troupe.init(gpus="none"):
        rollout = Cluster("rollout", Rollout, worker_config=WorkerConfig(world_size=1))
        reward = Cluster("reward", Reward, worker_config=WorkerConfig(world_size=2, policy="restart_rank", restarts=5))
        streams = {"prompts": Stream(items=200), "samples": Stream(items=200), "scored": Stream(sink=True)}
        stages = {
            "rollout": Stage(rollout, "generate", in_="prompts", out="samples"),
            "reward": Stage(reward, "score", in_="samples", out="scored"),
        }
        victim = reward.workers[1].pid()
        with Pipeline("rl", streams, stages) as p:
            for i in range(prompts):
                p.put("prompts", i)
            taken = [item.value for item in p.take("scored", 5, timeout=30)]
            os.kill(victim, signal.SIGKILL)  # with samples in hand: they go back to their stream
            p.drain()
            while some := p.take("scored", 100, timeout=0):
                taken += [item.value for item in some]
            lost = set(range(prompts)) - {s["prompt"] for s in taken}
            print(len(taken), "samples,", len(lost), "lost,", p.stats()["dead"], "dead letters")


if __name__ == "__main__":
    main()
