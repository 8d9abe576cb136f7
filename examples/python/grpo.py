"""A toy GRPO loop over three roles: rollout, reward, train. On numpy, on the CPU, in well under a minute.

    .venv/bin/python examples/python/grpo.py [--steps 60] [--plot reward.svg] [--torch]

A prompt is a digit, and the right answer counts on from it: 7 → 8 9 0 1. The policy begins by guessing; groups of
answers to the same prompt are scored against each other, and what did better than its group becomes more likely.
--torch trains the same policy with torch's autograd, where torch is installed.
"""

import argparse
import time

import numpy as np

import troupe
from troupe import Batch, Cluster, Dispatch, Worker, WorkerConfig, register

DIGITS, LENGTH = 10, 4


def softmax(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


class Rollout(Worker):
    """Answers prompts with the version of the weights that it has committed last."""

    def initialize(self, weights):
        self.rng = np.random.default_rng(self.rank)
        self.weights = weights.copy()
        self.policy = troupe.weights("policy")
        self.policy.bind({"logits": self.weights})

    def load(self, version):
        self.policy.stage(version)
        self.policy.commit(version)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def generate(self, batch):
        p = softmax(self.weights[batch["prompt"]])  # rows × positions × digits
        draws = self.rng.random((len(batch), LENGTH, 1))
        answer = (p.cumsum(-1) < draws).sum(-1).clip(0, DIGITS - 1)
        return Batch({"prompt": batch["prompt"], "group": batch["group"], "answer": answer})


class Reward(Worker):
    """The share of the digits that are right."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def score(self, batch):
        want = (batch["prompt"][:, None] + 1 + np.arange(LENGTH)) % DIGITS
        return (batch["answer"] == want).mean(-1)


class Train(Worker):
    """Holds the policy. Each replica makes the gradient of its rows; all apply the mean of them."""

    def initialize(self, weights, lr):
        self.weights, self.lr, self.step = weights.copy(), lr, 0
        troupe.weights("policy").bind({"logits": self.weights})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def gradient(self, batch):
        p = softmax(self.weights[batch["prompt"]])
        taken = np.eye(DIGITS)[batch["answer"]]
        grad = np.zeros_like(self.weights)
        np.add.at(grad, batch["prompt"], (taken - p) * batch["advantage"][:, None, None])
        return [grad / len(batch)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def apply(self, grad):
        self.weights += self.lr * grad
        return self.publish()

    def publish(self):
        """Returns the new version. The ranks have the same weights: one of them publishes."""
        self.step += 1
        return troupe.weights("policy").publish(self.step, ranks=[0]) if self.rank == 0 else None


class TorchTrain(Train):
    """The same with torch: the loss says it all, autograd and Adam do the rest."""

    def initialize(self, weights, lr):
        import torch

        self.torch = torch
        self.policy, self.step = torch.nn.Parameter(torch.tensor(weights)), 0
        troupe.weights("policy").bind({"logits": self.policy})
        self.optimizer = torch.optim.Adam([self.policy], lr=lr / 20)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def gradient(self, batch):
        torch = self.torch
        prompt, answer = torch.from_numpy(batch["prompt"]), torch.from_numpy(batch["answer"])
        log_p = torch.log_softmax(self.policy[prompt], -1).gather(-1, answer[..., None])[..., 0].sum(-1)
        loss = -(log_p * torch.from_numpy(batch["advantage"]).float()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        return [self.policy.grad.clone()]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def apply(self, grad):
        self.policy.grad = grad
        self.optimizer.step()
        return self.publish()


def advantages(reward, group):
    """How much better each answer did than its group."""
    groups = group.max() + 1
    count = np.bincount(group, minlength=groups)
    mean = np.bincount(group, reward, groups) / count
    deviation = np.sqrt(np.bincount(group, (reward - mean[group]) ** 2, groups) / count)
    return (reward - mean[group]) / (deviation[group] + 1e-6)


def plot(rewards, path):
    """The reward curve as a picture, written by hand."""
    width, height, left, bottom = 640, 320, 50, 40
    at = [
        (left + i * (width - left - 20) / max(1, len(rewards) - 1), height - bottom - r * (height - bottom - 20))
        for i, r in enumerate(rewards)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    marks = "".join(
        f'<text x="{left - 8}" y="{height - bottom - v * (height - bottom - 20) + 4:.0f}" '
        f'text-anchor="end">{v:g}</text>'
        for v in (0, 0.5, 1)
    )
    with open(path, "w") as f:
        f.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
            'font-size="12">'
            f'<rect width="100%" height="100%" fill="white"/><path d="M{left} 20V{height - bottom}H{width - 20}" '
            f'fill="none" stroke="black"/>{marks}'
            f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">step (of {len(rewards)})</text>'
            f'<text x="{left}" y="14">mean reward</text><polyline points="{line}" fill="none" stroke="#06c" '
            'stroke-width="2"/></svg>\n'
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--group", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--lr", type=float, default=4.0)
    parser.add_argument("--plot", default="reward.svg")
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    rewards = []
    with troupe.init(gpus="none"):
        weights = np.zeros((DIGITS, LENGTH, DIGITS), "f4")
        roles = {}
        for name, cls in (
            ("actor_infer", Rollout),
            ("reward", Reward),
            ("actor_train", TorchTrain if args.torch else Train),
        ):
            roles[name] = Cluster(name, cls, worker_config=WorkerConfig(world_size=2))
        infer, reward, train = roles["actor_infer"], roles["reward"], roles["actor_train"]
        troupe.get(
            [infer.execute_all_async("initialize", weights), train.execute_all_async("initialize", weights, args.lr)]
        )
        prompts = np.repeat(np.arange(DIGITS), args.group)
        for step in range(args.steps):
            answers = infer.generate(Batch({"prompt": prompts, "group": np.repeat(np.arange(DIGITS), args.group)}))
            score = reward.score(answers)
            answers["advantage"] = advantages(score, answers["group"])
            gradients = train.gradient(answers)
            infer.load(train.apply(sum(gradients) / len(gradients)))
            rewards.append(float(score.mean()))
            if step % 10 == 0 or step == args.steps - 1:
                print(f"step {step + 1:3d}  mean reward {rewards[-1]:.3f}  {'█' * int(40 * rewards[-1])}")
    plot(rewards, args.plot)
    print(f"{args.steps} steps in {time.monotonic() - began:.1f} s; the reward curve is in {args.plot}")
    return rewards


if __name__ == "__main__":
    main()
