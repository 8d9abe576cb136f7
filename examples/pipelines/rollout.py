"""rollout → reward → train as a pipeline, in Python: each stage at its own pace, durable streams between them, and a
bound on how old a sample may be when it is trained on. It starts a head of its own and ends by itself within seconds:

    python examples/pipelines/rollout.py

The policy is one number, the chance of answering well. A rollout worker answers each prompt with eight samples; reward
workers score them; the trainer, a plain function of the driver's, takes the first six of each group, and every group is
a new version of the policy. Samples that are more than two versions behind are dropped: with a slow reward, some are.
"""

import random
import time

import troupe
from troupe import Stage, Stream

PROMPTS, PER_PROMPT, FIRST, STALENESS = 40, 8, 6, 2


class Sampler(troupe.Worker):
    """A rollout worker. A real one would be sent weights by its trainer; here the version says how good it is."""

    def generate(self, prompt: troupe.Item) -> list[troupe.Item]:
        chance = min(0.95, 0.2 + 0.015 * (prompt.version or 0))
        group = f"prompt-{prompt.value}"
        return [
            troupe.Item({"answer": float(random.random() < chance)}, id=f"{group}/{i}", group=group, of=PER_PROMPT)
            for i in range(PER_PROMPT)
        ]


class Judge(troupe.Worker):
    """A reward worker: it takes its time, as a reward model does."""

    def score(self, sample: dict) -> dict:
        time.sleep(random.uniform(0, 0.004))
        return {**sample, "reward": sample["answer"] - 0.1}


def train(group: list[dict]) -> float:
    """One step for each group of samples. A real one would call a cluster of trainers."""
    return sum(sample["reward"] for sample in group) / len(group)


def main() -> None:
    with troupe.init(gpus="none"):
        workers = troupe.WorkerConfig
        rollout = troupe.Cluster("rollout", Sampler, worker_config=workers(world_size=2))
        reward = troupe.Cluster("reward", Judge, worker_config=workers(world_size=2, policy="restart_rank"))
        streams = {
            "prompts": Stream(items=4),  # a short one: rollouts are made when they are wanted, not long before
            "samples": Stream(items=64),
            "scored": Stream(items=256),
            "steps": Stream(sink=True),
        }
        stages = {
            "rollout": Stage(rollout, "generate", style="item", in_="prompts", out="samples", stamp=True),
            "reward": Stage(reward, "score", in_="samples", out="scored", in_flight=2),
            "train": Stage(
                train,
                in_="scored",
                out="steps",
                advance=1,
                group={"first": FIRST, "every": 0.3},
                stale={"bound": STALENESS, "then": "drop"},
            ),
        }
        with troupe.Pipeline("rl", streams, stages) as p:
            for i in range(PROMPTS):
                p.put("prompts", i)  # waits while rollouts are behind
            p.drain()
            rewards = []
            while steps := p.take("steps", 100, timeout=0):
                rewards += [item.value for item in steps]
            report(p.stats(), rewards)


def report(stats: dict, rewards: list[float]) -> None:
    streams = stats["streams"]
    late, stale, left = streams["scored"]["late"], streams["scored"]["stale"], sum(s["items"] for s in streams.values())
    print(
        f"{streams['prompts']['in']} prompts, {streams['samples']['in']} samples: {len(rewards)} steps to version "
        f"{stats['version']}"
    )
    print(
        f"{stale} samples were too old, {late} came late to their group; mean reward "
        f"{sum(rewards) / max(1, len(rewards)):.2f}"
    )
    print(f"{stats['dead']} dead letters, {left} left in the streams")


if __name__ == "__main__":
    main()
