import ray


class ResourceManager:
    """A placement group for each node, with the devices of that node."""

    def __init__(self, num_gpus_per_node, num_nodes):
        found = [n for n in ray.nodes() if n["Resources"].get("GPU", 0) >= num_gpus_per_node]
        self.num_nodes, self.gpu_per_node = len(found) if num_nodes is None else num_nodes, num_gpus_per_node
        self.placement_groups = [
            ray.util.placement_group([{"GPU": num_gpus_per_node, "CPU": 1}]) for _ in range(self.num_nodes)
        ]
        ray.get([pg.ready() for pg in self.placement_groups])

    def destroy_placement_group(self):
        for group in self.placement_groups:
            ray.util.remove_placement_group(group)
