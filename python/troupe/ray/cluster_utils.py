"""Several nodes on one machine, each with its own agent and the resources that it declares."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import signal
import time
from typing import Any

from . import _heads, _labels
from ._refused import refuse

cluster_not_supported = False


class Node:
    """A node started by a Cluster."""

    def __init__(self, process: Any, said: dict[str, Any], *, head: bool, address: str) -> None:
        self.process, self.said, self.head = process, said, head
        self.address = self.gcs_address = address
        self.node_ip_address = "127.0.0.1"
        self.node_name = said.get("name", "")
        self.webui_url = ""
        self.redis_address = address

    @property
    def node_id(self) -> str:
        return node_id(self.node_name)

    @property
    def unique_id(self) -> str:
        return self.node_id

    def is_head(self) -> bool:
        return self.head

    def live_processes(self) -> list[Any]:
        return [("agent", self.process)] if self.process.poll() is None else []

    def any_processes_alive(self) -> bool:
        return bool(self.live_processes())

    def remaining_processes_alive(self) -> bool:
        return bool(self.live_processes())

    def kill_raylet(self, check_alive: bool = True) -> None:
        """Kills the agent and its worker processes. A head is shut down instead."""
        self.end(graceful=False)

    def end(self, graceful: bool = True) -> None:
        if not graceful and self.process.poll() is None and not self.head:
            for pid in _tree(self.process.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.process.wait(10)
        _heads.end_process(self.process)
        for path in (self.said.get("file"), self.said.get("log")):
            if path:
                _heads.remove(path)
        if self.said.get("run"):
            shutil.rmtree(self.said["run"], ignore_errors=True)


def _tree(pid: int) -> list[int]:
    """Returns a process and its descendants. The process comes first, so that it is killed before it can start more."""
    found = [pid]
    for parent in found:
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for task in tasks:
            try:
                with open(f"/proc/{parent}/task/{task}/children") as f:
                    found += [int(child) for child in f.read().split() if int(child) not in found]
            except OSError:
                continue
    return found


def node_id(name: str) -> str:
    """Returns the id that the control service gives to the node with this name."""
    return hashlib.sha1(name.encode()).hexdigest() + "0" * 16


class Cluster:
    """A head and its nodes. Without initialize_head, the first add_node starts the head."""

    def __init__(
        self,
        initialize_head: bool = False,
        connect: bool = False,
        head_node_args: dict[str, Any] | None = None,
        shutdown_at_exit: bool = True,
    ) -> None:
        self.head_node: Node | None = None
        self.worker_nodes: set[Node] = set()
        self.connected = False
        self.redis_address: str | None = None
        if connect and not initialize_head:
            raise RuntimeError("Cannot connect to uninitialized cluster.")
        if shutdown_at_exit:
            atexit.register(self.shutdown)
        if initialize_head:
            self.add_node(**(head_node_args or {}))
            if connect:
                self.connect()

    @property
    def address(self) -> str | None:
        return None if self.head_node is None else self.head_node.address

    gcs_address = address

    def connect(self, namespace: str | None = None) -> None:
        """Makes this process a driver of the cluster."""
        from . import init

        assert self.address is not None
        assert not self.connected
        init(address=self.address, namespace=namespace, ignore_reinit_error=True)
        self.connected = True

    def add_node(self, wait: bool = True, **node_args: Any) -> Node:
        """Starts a node. Options, with defaults: num_cpus (1), num_gpus (0), resources, memory, node_name."""
        amounts = {
            k: node_args.pop(k, default)
            for k, default in (("num_cpus", 1), ("num_gpus", 0), ("resources", None), ("memory", None))
        }
        amounts["labels"] = _labels.check_labels(node_args.pop("labels", None))
        name = node_args.pop("node_name", None) or f"node-{os.urandom(6).hex()}"
        for ignored in (
            "object_store_memory",
            "enable_object_reconstruction",
            "_system_config",
            "include_dashboard",
            "dashboard_port",
            "min_worker_port",
            "max_worker_port",
            "env_vars",
            "dashboard_host",
            "temp_dir",
            "object_spilling_directory",
            "runtime_env_dir_name",
            "redis_password",
            "num_initial_workers",
        ):
            node_args.pop(ignored, None)
        if node_args:
            raise refuse(f"{sorted(node_args)} of Cluster.add_node", "`troupe join`")
        if self.head_node is None:
            process, said = _heads.start_head(name=name, **amounts)
            self.head_node = Node(process, {**said, "name": name}, head=True, address=said["address"])
            self.redis_address = said["address"]
            return self.head_node
        process, said = _heads.join(
            {k: self.head_node.said[k] for k in ("url", "token_file", "fingerprint")}, name=name, **amounts
        )
        node = Node(process, said, head=False, address=self.head_node.address)
        self.worker_nodes.add(node)
        if wait:
            self.wait_for_nodes()
        return node

    def _names(self) -> set[str]:
        """Returns the names of the live nodes known to the head; empty if this process is not a driver of the
        cluster."""
        from . import _state

        if _state.current() is None or _state.require().address != self.address:
            return set()
        _state.control_call("refresh_nodes")
        return {n["name"] for n in _state.control_call("placement", "nodes") if n["alive"]}

    def wait_for_nodes(self, timeout: float = 30) -> None:
        """Waits until the head's live nodes are exactly those of this object. Returns at once if this process is not a
        driver of the cluster; the head knows an agent as soon as that has reported ready."""
        deadline = time.monotonic() + timeout
        wanted = {node.node_name for node in self.list_all_nodes()}
        while (known := self._names()) and known != wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the nodes {sorted(wanted ^ known)} were not settled within {timeout} s")
            time.sleep(0.05)

    def remove_node(self, node: Node, allow_graceful: bool = True) -> None:
        """Ends a node and everything that runs on it."""
        node.end(allow_graceful)
        if node is self.head_node:
            self.head_node = None
            return
        self.worker_nodes.discard(node)
        self.wait_for_nodes()

    def list_all_nodes(self) -> list[Node]:
        return ([self.head_node] if self.head_node is not None else []) + list(self.worker_nodes)

    def remaining_processes_alive(self) -> bool:
        return all(node.remaining_processes_alive() for node in self.list_all_nodes())

    def shutdown(self) -> None:
        """Ends all nodes, the head last."""
        for node in list(self.worker_nodes):
            node.end()
        self.worker_nodes.clear()
        if self.head_node is not None:
            self.head_node.end()
            self.head_node = None


class AutoscalingCluster:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise refuse("AutoscalingCluster", "nodes that join by themselves: `troupe join`")
