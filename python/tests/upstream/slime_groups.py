"""slime's placement group, its training group and its lock, and the loop of its train.py, with stand-ins for the engine
that generates and the one that trains."""

from __future__ import annotations

from argparse import Namespace

import ray
import torch
import torch.distributed as dist
from framework_report import Report
from slime.ray import train_actor
from slime.ray.placement_group import create_placement_groups, create_training_models
from slime.ray.utils import Lock


@ray.remote(num_cpus=1)
class Rollouts:
    def __init__(self) -> None:
        self.weights, self.lock = None, Lock.options(num_cpus=0.1, num_gpus=0).remote()

    def set_train_parallel_config(self, config: dict) -> None:
        self.config = config

    def update(self, weights: dict) -> None:
        self.weights = weights

    def get_lock(self) -> object:
        return self.lock

    def generate(self, rollout: int) -> list:
        torch.manual_seed(rollout)
        x = torch.randn(self.config["dp_size"], 32, 16)
        model = torch.nn.Linear(16, 1)
        model.load_state_dict(self.weights)
        with torch.no_grad():
            return [ray.put((part, part.sum(1, keepdim=True).sin() + 0 * model(part))) for part in x]


class Train(train_actor.TrainRayActor):
    def __init__(self, world_size: int, rank: int, master_addr: str | None, master_port: int | None) -> None:
        train_actor.get_local_gpu_id = lambda: int(ray.get_gpu_ids()[0])  # slime asks torch for its devices
        super().__init__(world_size, rank, master_addr, master_port)

    def init(self, args: Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        self.args, self.role = args, role
        dist.init_process_group("gloo")
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
        self.train_parallel_config = {"dp_size": dist.get_world_size()}
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.model = torch.nn.Linear(16, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        return 0

    def _get_parallel_config(self) -> dict:
        return self.train_parallel_config

    def sleep(self, tags: object = None) -> None: ...

    def wake_up(self, tags: object = None) -> None: ...

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None: ...

    def clear_memory(self) -> None: ...

    def train(self, rollout_id: int, rollout_data_ref: list, external_data: object = None) -> float:
        x, y = ray.get(rollout_data_ref[self._rank])
        loss = ((self.model(x) - y) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self._world_size
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / self._world_size

    def update_weights(self) -> None:
        if self._rank:
            return
        lock = ray.get(self.rollout_manager.get_lock.remote())
        while not ray.get(lock.acquire.remote()):
            pass
        ray.get(self.rollout_manager.update.remote(self.model.state_dict()))
        ray.get(lock.release.remote())


def main() -> None:
    report = Report()
    ray.init(num_gpus=4, num_cpus=8, include_dashboard=False)
    settings = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "num_rollout": 4}
    settings |= {"kl_coef": 0, "train_env_vars": {}, "train_backend": "megatron", "update_weight_mode": "full"}
    settings |= {"update_weight_transport": "nccl", "start_rollout_id": None, "megatron_config_path": None}
    off = "debug_train_only debug_rollout_only colocate rollout_external use_critic use_kl_loss use_opd offload_train"
    off += " use_routing_replay rollout_global_dataset"
    args = Namespace(**settings, **dict.fromkeys(off.split(), False))
    pgs = create_placement_groups(args)
    ids = sorted(int(i) for i in pgs["actor"][2])
    report.check("four bundles on four devices", ids == [0, 1, 2, 3], ids)
    report.check("two of them for rollouts", len(pgs["rollout"][1]) == 2, pgs["rollout"][1])
    rollouts = Rollouts.remote()
    actor, _ = create_training_models(args, pgs, rollouts, actor_cls=Train)
    lock = ray.get(rollouts.get_lock.remote())
    got = [ray.get(lock.acquire.remote()), ray.get(lock.acquire.remote())]
    ray.get(lock.release.remote())
    report.check("one holder of the lock", got == [True, False], got)
    actor.update_weights()
    losses = []
    for rollout in range(args.start_rollout_id, args.num_rollout):
        data = ray.get(rollouts.generate.remote(rollout))
        losses.append(ray.get(actor.async_train(rollout, data))[0])
        actor.save_model(rollout, force_sync=True)
        actor.clear_memory()
        actor.update_weights()
    report.check("four steps", len(losses) == 4, losses)
    actor.release()
    report.write("losses " + " ".join(f"{loss:.9f}" for loss in losses))
    ray.shutdown()


if __name__ == "__main__":
    main()
