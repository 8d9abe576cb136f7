"""A reservation of nodes, for clusters that share them."""

from __future__ import annotations

from . import _errors, _session


class ResourceManager:
    """One reservation of whole nodes. Clusters on it share a device wherever their mappings overlap."""

    def __init__(self, num_gpus_per_node: int = 0, num_nodes: int = 1, *, wait: float = 0.0) -> None:
        if num_gpus_per_node < 0 or num_nodes < 1:
            raise _errors.InvalidError(f"num_gpus_per_node {num_gpus_per_node} and num_nodes {num_nodes}: there is at least one node")
        self.num_gpus_per_node = num_gpus_per_node
        self.num_nodes = num_nodes
        self._session = _session.current()
        self.id = ""
        self.nodes: list[str] = []
        if num_gpus_per_node:
            got = self._session.core.ask(
                "reserve", runtime=self._session.id, name="resource manager", reserve={"nodes": num_nodes, "devices": num_gpus_per_node, "wait": float(wait)}
            ).get()
            self.id, self.nodes = got["id"], got["nodes"] or []

    @property
    def num_gpus(self) -> int:
        return self.num_gpus_per_node * self.num_nodes

    def destroy(self) -> None:
        """Gives the nodes back. Clusters on them must be shut down before."""
        if self.id and not self._session.closed:
            self._session.core.ask("unreserve", name=self.id).get()
            self.id = ""

    def __enter__(self) -> ResourceManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()
