import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class RayResourcePool:
    def __init__(self, process_on_nodes=None, use_gpu=True, name_prefix="pool", max_colocate_count=1):
        self.store, self.use_gpu, self.name_prefix, self.max_colocate_count = (
            process_on_nodes or [],
            use_gpu,
            name_prefix,
            max_colocate_count,
        )
        self.pgs = None

    @property
    def world_size(self):
        return sum(self.store)

    def get_placement_groups(self, strategy="STRICT_PACK", name=None, device_name="cuda"):
        if self.pgs is None:
            bundle = {"CPU": self.max_colocate_count, **({"GPU": 1} if self.use_gpu else {})}
            self.pgs = [placement_group([bundle] * count, strategy=strategy) for count in self.store]
            ray.get([pg.ready() for pg in self.pgs])
        return self.pgs


class RayWorkerGroup:
    """Workers of one class. Its methods are those of the class that have a `mode`: "one_to_all" or "shards"."""

    fused_worker_execute_fn_name = "_fuw_execute"

    def __init__(self, resource_pool=None, ray_cls_with_init=None, name_prefix="group", worker_handles=None):
        cls, self._args = ray_cls_with_init
        self.ray_cls_with_init, self.name_prefix = ray_cls_with_init, name_prefix
        self.fused_worker_used, self.method_names, self.sub_cls_name = hasattr(cls, "_fuw_execute"), [], ""
        self._workers = worker_handles or self._create(resource_pool, cls)
        for name in dir(cls):
            mode = getattr(getattr(cls, name, None), "mode", "")
            if mode:
                setattr(self, name, getattr(self, "_" + mode)(name))

    def _create(self, pool, cls):
        share = 1 / pool.max_colocate_count if pool.use_gpu else 0
        workers = []
        for group in pool.get_placement_groups():
            for bundle in range(group.bundle_count):
                rank = len(workers)
                env = {"RANK": str(rank), "WORLD_SIZE": str(pool.world_size)}
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
                options = {
                    "scheduling_strategy": where,
                    "name": f"{self.name_prefix}:{rank}",
                    "runtime_env": {"env_vars": env},
                    "num_gpus": share,
                }
                workers.append(cls.options(**options).remote(*self._args))
        return workers

    @property
    def workers(self):
        return self._workers

    @property
    def world_size(self):
        return len(self._workers)

    def spawn(self, names):
        return {name: type(self)(None, self.ray_cls_with_init, self.name_prefix, self._workers) for name in names}

    def execute_all_sync(self, method_name, *args, **kwargs):
        return ray.get(self.execute_all_async(method_name, *args, **kwargs))

    def _one_to_all(self, name):
        return lambda *args: self.execute_all_sync(name, *[[a] * self.world_size for a in args])

    def _shards(self, name):
        """Each argument has a part for each pair of ranks."""
        return lambda *args: self.execute_all_sync(name, *[[a[r // 2] for r in range(self.world_size)] for a in args])
