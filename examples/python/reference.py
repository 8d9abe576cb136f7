"""The reference example: create a resource manager and a cluster, initialise, train. As it would be written for ROLL,
with another import line.

    .venv/bin/python examples/python/reference.py
"""

import numpy as np

from troupe import Batch, Cluster, Dispatch, ResourceManager, Worker, WorkerConfig, init, register


class TrainWorker(Worker):
    def __init__(self, worker_config):
        super().__init__(worker_config)
        self.weights = np.zeros(4)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self):
        self.logger.info(
            "rank %d of %d, dp %d, devices %s", self.rank, self.world_size, self.rank_info.dp_rank, self.devices
        )

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def train_step(self, batch):
        """One step of linear regression on this replica's rows."""
        error = batch["x"] @ self.weights - batch["y"]
        self.weights -= 0.1 * batch["x"].T @ error / len(batch)
        return Batch({"error": error}, {"metrics": {"loss": float((error**2).mean())}})


def main():
    with init(gpus="sim:1x4"):
        resource_manager = ResourceManager(num_gpus_per_node=4, num_nodes=1)
        cluster = Cluster(
            name="actor_train",
            worker_cls=TrainWorker,
            resource_manager=resource_manager,
            worker_config=WorkerConfig(
                name="actor_train", world_size=4, device_mapping=list(range(4)), tensor_parallel_size=2
            ),
        )
        print(f"{cluster.world_size} workers, dp {cluster.dp_size}, tp {cluster.tp_size}, on {cluster.rank2devices}")
        cluster.initialize()
        rng = np.random.default_rng(0)
        x = rng.normal(size=(64, 4))
        y = x @ np.array([1.0, -2.0, 3.0, 0.5])
        for step in range(30):
            result = cluster.train_step(Batch({"x": x, "y": y}))
            if step % 5 == 4:
                print(f"step {step + 1:2d}: loss {np.mean(result.meta['metrics']['loss']):.4f}")
        cluster.shutdown()
        resource_manager.destroy()


if __name__ == "__main__":
    main()
