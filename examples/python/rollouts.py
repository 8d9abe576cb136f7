"""Rollouts in groups: four prompts, three siblings each, two turns each. Samplers take samples and make their turns,
judges score what has ended, and the driver trains complete groups, each once. One sampler is killed on the way: its
sample goes on elsewhere, after the last finished turn.

    .venv/bin/python examples/python/rollouts.py
"""

import os
import signal

import troupe

NAME, PROMPTS, SIBLINGS, TURNS = "grpo", 4, 3, 2


class Sampler(troupe.Worker):
    def pid(self):
        return os.getpid()

    def work(self, seconds):
        """Makes turns until there is no sample for some seconds."""
        rollouts, made = troupe.Rollouts.attach(NAME), 0
        while (sample := rollouts.take(timeout=seconds)) is not None:
            for turn in sample:
                history = [token for before in sample.turns for token in before["tokens"]]
                tokens = [len(sample.prompt) + len(history) + i for i in range(4)]  # stands in for a model
                made += turn.finish(tokens=tokens, logprobs=[-0.1] * len(tokens))
        return made


class Judge(troupe.Worker):
    def work(self, seconds):
        rollouts, scored = troupe.Rollouts.attach(NAME), 0
        while True:
            with rollouts.scoring("reward", 8, timeout=seconds) as samples:
                if not samples:
                    return scored
                for sample in samples:
                    last = sample.turns[-1]["tokens"]
                    scored += rollouts.set(sample, reward=(sum(last) + sample.index) % 7 / 7)


def main():
    with troupe.init():
        samplers = troupe.Cluster("samplers", Sampler, worker_config=troupe.WorkerConfig(world_size=2, policy="ignore"))
        judges = troupe.Cluster("judges", Judge, worker_config=troupe.WorkerConfig(world_size=1))
        with samplers, judges, troupe.Rollouts(NAME, siblings=SIBLINGS, turns=TURNS, fields=["reward"], stale=4) as r:
            victim = samplers.workers[1].pid()
            work = [worker.work.remote(5.0) for worker in (*samplers.workers, *judges.workers)]
            for number in range(1, PROMPTS + 1):
                r.put(f"prompt {number}", number=number, source="data")
            os.kill(victim, signal.SIGKILL)
            for step in range(PROMPTS // 2):
                with r.batch(groups=2) as batch:
                    for group in batch:
                        rewards = [sample.fields["reward"] for sample in group.samples]
                        mean = sum(rewards) / len(rewards)
                        advantages = [round(reward - mean, 3) for reward in rewards]
                        print(f"step {step}: {group.prompt}, weights {group.version:g}, advantages {advantages}")
                r.set_version(step + 1)
            stats = r.stats()
            print(f"{stats['trained']} groups trained, {stats['turns']} turns finished")
            made, scored = work[0].result(60), work[2].result(60)  # they end when nothing is left
            print(f"the other sampler: {type(work[1].exception(60)).__name__}")
            print(f"the sampler that lived made {made} of them, and the judge scored {scored} samples")


if __name__ == "__main__":
    main()
