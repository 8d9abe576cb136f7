"""Colocation and weight sync: the trainer and the rollout engine share devices, and weights go from one to the other
without the driver."""

import numpy as np

import troupe
from troupe import Cluster, Dispatch, ResourceManager, Worker, WorkerConfig, register


class Trainer(Worker):
    def __init__(self, worker_config=None):
        super().__init__(worker_config)
        self.weights = np.zeros(1 << 18)  # 2 MiB

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train_step(self):
        self.weights = self.weights + 1

    def export(self):
        return self.weights


class Rollout(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, weights):
        self.weights = weights
        return float(weights.mean())


def main():
    with troupe.init(resources={"GPU": 4}):  # simulated devices; init() takes those of the machine
        nodes = ResourceManager(num_gpus_per_node=4, num_nodes=1)
        train = Cluster("actor_train", Trainer, nodes, WorkerConfig(device_mapping=[0, 1, 2, 3]))
        infer = Cluster("actor_infer", Rollout, nodes, WorkerConfig(device_mapping=[0, 1, 2, 3], num_gpus_per_worker=2))
        print("train on", list(train.rank2devices.values()), "infer on", list(infer.rank2devices.values()))
        for step in range(3):
            train.train_step()
            weights = train.workers[
                0
            ].export.remote()  # the array stays with rank 0, and the engines fetch it from there
            print("step", step, "weights", infer.load(weights))


if __name__ == "__main__":
    main()
