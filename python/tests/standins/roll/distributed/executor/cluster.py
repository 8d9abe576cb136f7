import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll.distributed.scheduler.resource_manager import ResourceManager


class Cluster:
    """Workers on the devices of a resource manager: worker_config is a dict with world_size, device_mapping and
    system_envs."""

    def __init__(self, name, worker_cls, resource_manager: ResourceManager, worker_config):
        self.cluster_name, self.resource_manager, self.worker_config = name, resource_manager, worker_config
        self.worker_cls = ray.remote(worker_cls)
        self.world_size = worker_config["world_size"]
        self.workers = []
        self.master_addr = self.master_port = None
        self._create_workers()
        del self.worker_cls

    def _create_workers(self):
        for rank in range(self.world_size):
            device = self.worker_config["device_mapping"][rank]
            node = device // self.resource_manager.gpu_per_node
            env = {"RANK": str(rank), "WORLD_SIZE": str(self.world_size), "WORKER_NAME": f"{self.cluster_name}-{rank}"}
            if rank:
                env |= {"MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port)}
            env |= self.worker_config["system_envs"]
            self.worker_config["device"] = device
            options = {
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self.resource_manager.placement_groups[node]),
                "name": env["WORKER_NAME"],
                "runtime_env": ray.runtime_env.RuntimeEnv(env_vars=env),
                "num_cpus": 0.01,
                "num_gpus": 0.01,
            }
            self.workers.append(self.worker_cls.options(**options).remote(worker_config=self.worker_config))
            if rank == 0:
                self.master_addr, self.master_port = ray.get(self.workers[0].get_master_addr_and_port.remote())

    def execute_all_async(self, method_name, *args, **kwargs):
        raise NotImplementedError

    def execute_all_sync(self, method_name, *args, **kwargs):
        return ray.get(self.execute_all_async(method_name, *args, **kwargs))
