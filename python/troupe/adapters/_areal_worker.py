"""The workers behind AReaL's Scheduler: one hosts engines, the other runs a command."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import troupe

from .. import register

if TYPE_CHECKING:
    import torch

_FETCHES = 8  # fetches of tensors that one worker serves at once


class EngineImportFailure(Exception):
    """The class of an engine cannot be imported."""


class EngineMissing(Exception):
    """A call names an engine or a method that the worker does not have."""


def free_ports(count: int) -> list[int]:
    """Returns ports that no process of this host listens on now."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class EngineWorker(troupe.Worker):
    """Hosts engines by name. Their calls run one at a time on the main thread, in the order of arrival, as collectives
    require; tensors are fetched on other threads. AReaL's HTTP routes for health, ports, forks and tensors are served
    too, for processes outside of Troupe."""

    def __init__(self, role: str, first_index: int, trial: Mapping[str, object], ports: int) -> None:
        from areal.infra.rpc import rtensor
        from areal.utils import name_resolve
        from areal.utils.network import gethostip

        self.index = first_index + self.rank
        self.role = role
        self.host = gethostip()
        self.engines: dict[str, Any] = {}
        name_resolve.reconfigure(trial["name_resolve"])
        port = self._serve_routes(trial)
        self.node_addr = f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"
        self.ports = [port, *free_ports(max(ports - 1, 0))]
        rtensor.set_backend(tensors_of(f"{self.cluster_name}.{self.rank}"))

    def _serve_routes(self, trial: Mapping[str, object]) -> int:
        from areal.infra.rpc.guard.app import GuardState, create_app
        from areal.infra.rpc.guard.data_blueprint import data_bp

        state = GuardState()
        state.server_host, state.role, state.worker_index = self.host, self.role, self.index
        state.experiment_name, state.trial_name, state.fileroot = trial["experiment"], trial["name"], trial["fileroot"]
        state.register_health_hook(lambda: {"engine_count": len(self.engines), "engines": list(self.engines)})
        app = create_app(state)
        app.register_blueprint(data_bp)
        self._http = make_server("0.0.0.0", 0, app, server_class=_Server, handler_class=_Silent)
        state.server_port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, daemon=True, name="areal-http").start()
        return int(state.server_port)

    @register(lane="control")
    def describe(self) -> tuple[str, list[int]]:
        """Returns the address of this worker's host, and its ports."""
        return self.host, self.ports

    @register()
    def setup(self, env: Mapping[str, object]) -> None:
        os.environ.update({name: str(value) for name, value in env.items()})

    @register()
    def seed(self, config: Any) -> None:
        from areal.utils import seeding

        seeding.set_random_seed(config.seed, key=f"{self.role}{self.index}")

    @register()
    def create(self, path: str, engine: str, /, *args: object, **kwargs: object) -> None:
        engine = self._named(engine)
        if engine in self.engines:
            raise ValueError(f"Engine '{engine}' already exists; give another engine_name")
        self.engines[engine] = _engine_class(path)(*args, **kwargs)

    @register()
    def invoke(
        self, method: str, engine: str, meta: Mapping[str, object] | None, /, *args: object, **kwargs: object
    ) -> Any:
        from areal.api import TrainEngine
        from areal.infra.rpc.rtensor import RTensor

        engine = self._named(engine)
        if engine not in self.engines:
            raise EngineMissing(f"Engine '{engine}' not found. Available engines: {list(self.engines)}")
        target = self.engines[engine]
        args, kwargs = RTensor.localize(args), RTensor.localize(kwargs)
        if _wants_broadcast(target, meta):
            args, kwargs = _broadcast(target, args, kwargs)
        function = getattr(target, method, None)
        if function is None:
            raise EngineMissing(f"Engine does not have method '{method}'")
        result = function(*args, **kwargs)
        if isinstance(result, Future):
            result = result.result()
        if isinstance(target, TrainEngine) and target.initialized and not target.is_data_parallel_head():
            return None  # the controller drops it, so nothing would delete the tensors
        return RTensor.remotize(result, node_addr=self.node_addr)

    @register(concurrency=_FETCHES)
    def tensors(self, shards: list[str]) -> list[torch.Tensor]:
        from areal.infra.rpc import rtensor

        return [rtensor.fetch(shard) for shard in shards]

    @register(concurrency=_FETCHES)
    def drop_tensors(self, shards: list[str]) -> None:
        from areal.infra.rpc import rtensor

        for shard in shards:
            rtensor.remove(shard)

    def _named(self, engine: str) -> str:
        """Returns the name of an engine; `actor/*` becomes the name with this worker's index."""
        return f"{engine[:-1]}{self.index}" if engine.endswith("/*") else engine

    def close(self) -> None:
        for engine in self.engines.values():
            try:
                engine.destroy()
            except Exception as err:
                print(f"destroy of {type(engine).__name__} raised {type(err).__name__}: {err}", file=sys.stderr)
        self._http.shutdown()


class CommandWorker(troupe.Worker):
    """Runs a command that serves AReaL's HTTP routes, as a child process on this worker's node with its devices. The
    worker exits with the child."""

    def __init__(self, role: str, first_index: int, command: list[str], ports: int) -> None:
        from areal.utils.network import gethostip

        index = first_index + self.rank
        self.host, self.ports = gethostip(), free_ports(max(ports, 1))
        command = [word.replace("{port}", str(self.ports[0])).replace("{index}", str(index)) for word in command]
        found = os.pathsep.join(p for p in sys.path if p)  # the child finds the same modules as this worker
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": found})
        threading.Thread(target=self._end_with_child, daemon=True, name="areal-command").start()

    def _end_with_child(self) -> None:
        code = self._child.wait()
        os._exit(code if code >= 0 else 128 - code)

    @register(lane="control")
    def describe(self) -> tuple[str, list[int]]:
        return self.host, self.ports

    @register(lane="control")
    def healthy(self) -> bool:
        """Returns whether the child answers on its port."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[0]}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def tensors_of(owner: str) -> object:
    """Returns a backend for AReaL's RTensors. The name of a shard contains its owner, `role.rank.id`. Processes of the
    run fetch it from that worker by a call, through shared memory on the same host; processes outside of the run use
    HTTP, as before."""
    from areal.infra.rpc.rtensor import HttpRTensorBackend, fetch, store

    class Tensors(HttpRTensorBackend):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._clusters: dict[str, troupe.Cluster] = {}

        def store(self, tensor: object) -> str:
            shard = f"{owner}.{os.urandom(8).hex()}"
            store(shard, tensor)
            return shard

        def fetch(self, shards: Sequence[Any]) -> list[torch.Tensor]:
            out: dict[int, Any] = {}
            asked = []
            foreign = []
            for key, places in _by_owner(s.shard_id for s in shards).items():
                names = [shards[i].shard_id for i in places]
                if key == owner:
                    out.update(zip(places, map(fetch, names), strict=True))
                elif key:
                    asked.append((places, self._worker(key).tensors.remote(names)))
                else:
                    foreign = places
            if foreign:
                out.update(zip(foreign, super().fetch([shards[i] for i in foreign]), strict=True))
            for places, future in asked:
                out.update(zip(places, future.result(), strict=True))
            return [out[i] for i in range(len(shards))]

        async def delete(self, node_addr: str, shard_ids: Sequence[object]) -> None:
            for key, places in _by_owner(shard_ids).items():
                names = [shard_ids[i] for i in places]
                if key:
                    await self._worker(key).drop_tensors.remote(names)
                else:
                    await super().delete(node_addr, names)

        def _worker(self, key: str) -> troupe.WorkerHandle:
            role, _, rank = key.rpartition(".")
            if role not in self._clusters:
                self._clusters[role] = troupe.Cluster.attach(role)
            return self._clusters[role].workers[int(rank)]

    return Tensors()


def _by_owner(shards: Any) -> dict[str, list[int]]:
    """Returns the indices of shards by owner; shards not owned by a worker of the run are under an empty name."""
    found: dict[str, list[int]] = {}
    for i, shard in enumerate(shards):
        parts = str(shard).split(".")
        found.setdefault(".".join(parts[:2]) if len(parts) == 3 and parts[1].isdigit() else "", []).append(i)
    return found


def _engine_class(path: str) -> type:
    from areal.api import InferenceEngine, TrainEngine

    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ValueError, ImportError, AttributeError) as err:
        raise EngineImportFailure(f"Failed to import engine '{path}': {err}") from err
    if not isinstance(cls, type) or not issubclass(cls, (TrainEngine, InferenceEngine)):
        raise TypeError(f"Engine class must be a subclass of TrainEngine or InferenceEngine, got {cls}")
    return cls


def _wants_broadcast(engine: object, meta: Mapping[str, object] | None) -> bool:
    from areal.api import TrainEngine

    if meta is not None and not isinstance(meta, dict):
        raise ValueError(f"Invalid rpc_meta: expected dict or None, got {type(meta)}")
    wanted = (meta or {}).get("broadcast", isinstance(engine, TrainEngine) and engine.initialized)
    if not isinstance(wanted, bool):
        raise ValueError(f"Invalid rpc_meta.broadcast: expected bool, got {type(wanted)}")
    return wanted


def _broadcast(engine: Any, *values: object) -> list[Any]:
    """Broadcasts the arguments of the data-parallel head to all ranks of its group."""
    from areal.infra.platforms import current_platform
    from areal.infra.rpc.guard.engine_blueprint import resolve_broadcast_target
    from areal.utils.data import broadcast_tensor_container, tensor_container_to

    group, device = resolve_broadcast_target(engine, current_platform.current_device())
    if current_platform.device_type != "cpu":
        current_platform.set_device(current_platform.current_device())
    return [
        broadcast_tensor_container(
            tensor_container_to(v, device), src_rank=engine.current_data_parallel_head(), group=group
        )
        for v in values
    ]
