"""A script for Ray: actors with a parameter server, tasks, put, wait and a placement group. `python -m troupe.ray
ray_script.py` runs it unchanged; ray_port.py is the same written for Troupe."""

import numpy as np
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
class ParameterServer:
    def __init__(self, size):
        self.weights = np.zeros(size)

    def apply(self, *gradients):
        self.weights = self.weights + np.mean(gradients, axis=0)
        return self.weights

    def get(self):
        return self.weights


@ray.remote(num_cpus=1)
class Worker:
    def __init__(self, rank):
        self.rank = rank

    def gradient(self, weights):
        if self.rank > 3:
            raise ValueError("no such rank")
        return np.full_like(weights, self.rank)


@ray.remote
def norm(weights):
    return float(np.abs(weights).sum())


def main():
    ray.init(num_cpus=4)
    group = placement_group([{"CPU": 1}] * 3, strategy="PACK")
    ray.get(group.ready())
    server = ParameterServer.options(name="server", num_cpus=0).remote(4)
    workers = [
        Worker.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
        ).remote(i)
        for i in range(3)
    ]
    weights = server.get.remote()
    for _ in range(3):
        weights = server.apply.remote(*[w.gradient.remote(weights) for w in workers])
    shared = ray.put(ray.get(weights))
    norms = [norm.remote(shared) for _ in range(2)]
    ready, _ = ray.wait(norms, num_returns=2, timeout=60)
    print("norm", ray.get(ready[0]), "of", len(ready))
    print("server", ray.get(ray.get_actor("server").get.remote()).tolist())
    try:
        ray.get(Worker.options(num_cpus=0).remote(7).gradient.remote(np.zeros(1)))
    except ValueError as err:
        print("error", "no such rank" in str(err))
    ray.shutdown()


if __name__ == "__main__":
    main()
