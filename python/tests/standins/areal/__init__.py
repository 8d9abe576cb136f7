"""A stand-in of AReaL: the names that troupe.adapters.areal uses, with AReaL's documented signatures and meanings.
Arrays of numpy take the place of tensors. `make adapters-check` runs the adapter with AReaL itself."""

import abc
import dataclasses
import json
import sys
import types
from typing import Any


def _module(name, **names):
    module = types.ModuleType(f"areal.{name}")
    module.__dict__.update(names)
    module.__path__ = []
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)
    for value in names.values():
        if isinstance(value, type):
            value.__module__ = module.__name__
    return module


# areal.api


@dataclasses.dataclass
class SchedulingStrategy:
    type: str = "separation"
    target: str | None = None
    fork: bool = True


@dataclasses.dataclass
class SchedulingSpec:
    cpu: int = 8
    gpu: int = 0
    mem: int = 32
    port_count: int = 2
    env_vars: dict = dataclasses.field(default_factory=dict)
    cmd: str | None = None
    additional_bash_cmds: list | None = None


@dataclasses.dataclass
class NameResolveConfig:
    type: str = "nfs"
    nfs_record_root: str = ""
    etcd3_addr: str = ""


@dataclasses.dataclass
class Worker:
    id: str
    ip: str
    worker_ports: list = dataclasses.field(default_factory=list)
    engine_ports: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Job:
    role: str
    replicas: int = 0
    tasks: list = dataclasses.field(default_factory=list)
    scheduling_strategy: SchedulingStrategy = dataclasses.field(default_factory=SchedulingStrategy)


class Scheduler(abc.ABC):
    @property
    @abc.abstractmethod
    def n_gpus_per_node(self) -> int: ...

    @abc.abstractmethod
    def create_workers(self, job: Job, *args, **kwargs) -> list[str]: ...

    @abc.abstractmethod
    def get_workers(self, role: str, timeout: int | None = None) -> list[Worker]: ...

    @abc.abstractmethod
    def delete_workers(self, role: str | None = None, reverse_order: bool = False): ...

    @abc.abstractmethod
    def fork_workers(self, role: str, target_role: str, command: str | None = None) -> list[str]: ...

    @abc.abstractmethod
    async def create_engine(
        self, worker_id: str, engine: str, engine_name: str | None = None, *args, **kwargs
    ) -> Any: ...

    @abc.abstractmethod
    async def set_worker_env(self, worker_id: str, env: dict[str, str]) -> None: ...

    @abc.abstractmethod
    def call_engine(
        self,
        worker_id: str,
        method: str,
        engine_name: str | None = None,
        *args,
        rpc_meta: dict[str, Any] | None = None,
        **kwargs,
    ) -> Any: ...

    @abc.abstractmethod
    async def async_call_engine(
        self,
        worker_id: str,
        method: str,
        engine_name: str | None = None,
        *args,
        rpc_meta: dict[str, Any] | None = None,
        **kwargs,
    ) -> Any: ...


class TrainEngine:
    initialized = False

    def is_data_parallel_head(self):
        return True

    def destroy(self):
        pass


class InferenceEngine:
    def destroy(self):
        pass


_module("api", Job=Job, Scheduler=Scheduler, Worker=Worker, TrainEngine=TrainEngine, InferenceEngine=InferenceEngine)
_module(
    "api.cli_args",
    SchedulingSpec=SchedulingSpec,
    SchedulingStrategy=SchedulingStrategy,
    NameResolveConfig=NameResolveConfig,
)


# areal.infra.scheduler.exceptions


class SchedulerError(Exception):
    pass


def _error(name, *fields):
    def __init__(self, *args):
        self.__dict__.update(zip(fields, args, strict=False))
        Exception.__init__(self, ": ".join(str(a) for a in args))

    return type(name, (SchedulerError,), {"__init__": __init__})


_module("infra")
_module("infra.scheduler")
_module(
    "infra.scheduler.exceptions", SchedulerError=SchedulerError,
    WorkerCreationError=_error("WorkerCreationError", "worker_key", "reason", "details"),
    WorkerFailedError=_error("WorkerFailedError", "worker_id", "exit_code", "stderr"),
    WorkerNotFoundError=_error("WorkerNotFoundError", "worker_id"),
    WorkerTimeoutError=_error("WorkerTimeoutError", "worker_key", "timeout"),
    EngineCreationError=_error("EngineCreationError", "worker_id", "reason", "status_code"),
    EngineImportError=_error("EngineImportError", "import_path", "reason"),
    EngineCallError=_error("EngineCallError", "worker_id", "method", "reason"),
)  # fmt: skip


# areal.infra.rpc


_stored: dict[str, Any] = {}
_backend: Any = None


@dataclasses.dataclass
class TensorShardInfo:
    shard_id: Any
    node_addr: str


@dataclasses.dataclass
class RTensor:
    shard: TensorShardInfo
    data: Any = None

    @staticmethod
    def remotize(obj, node_addr):
        return _mapped(
            obj, lambda v: hasattr(v, "dtype"), lambda v: RTensor(TensorShardInfo(_backend.store(v), node_addr))
        )

    @staticmethod
    def localize(obj):
        return _mapped(obj, lambda v: isinstance(v, RTensor), lambda v: _backend.fetch([v.shard])[0])

    @staticmethod
    async def clear_node(node_addr, shard_ids):
        await _backend.delete(node_addr, shard_ids)


def _mapped(obj, wanted, change):
    if wanted(obj):
        return change(obj)
    if isinstance(obj, dict):
        return {k: _mapped(v, wanted, change) for k, v in obj.items()}
    return type(obj)(_mapped(v, wanted, change) for v in obj) if isinstance(obj, (list, tuple)) else obj


class HttpRTensorBackend:
    def fetch(self, shards):
        raise AssertionError("no shard of these tests is outside of the run")

    async def delete(self, node_addr, shard_ids):
        raise AssertionError("no shard of these tests is outside of the run")


def set_backend(backend):
    global _backend
    _backend = backend


class GuardState:
    def register_health_hook(self, hook):
        self.health = hook


class _App:
    """A WSGI application, as Flask's is."""

    def __init__(self, state):
        self._state = state

    def register_blueprint(self, blueprint):
        pass

    def __call__(self, environ, start_response):
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps({"status": "healthy", "role": self._state.role, **self._state.health()}).encode()]


_module("infra.rpc")
_module(
    "infra.rpc.rtensor",
    RTensor=RTensor,
    TensorShardInfo=TensorShardInfo,
    HttpRTensorBackend=HttpRTensorBackend,
    set_backend=set_backend,
    store=_stored.__setitem__,
    fetch=_stored.__getitem__,
    remove=_stored.pop,
)
_module("infra.rpc.guard")
_module("infra.rpc.guard.app", GuardState=GuardState, create_app=_App)
_module("infra.rpc.guard.data_blueprint", data_bp=None)


# areal.utils


_module("infra.utils")
_module(
    "infra.utils.launcher",
    get_env_vars=lambda: {"PYTHONPATH": ""},
    get_thread_env_vars=lambda cpus, given: {"OMP_NUM_THREADS": str(cpus)},
)
_module("utils")
_module("utils.network", gethostip=lambda: "127.0.0.1")
_module("utils.name_resolve", reconfigure=lambda config: None, clear_subtree=lambda name: None)
_module("utils.names", trial_root=lambda experiment, trial: f"{experiment}/{trial}")
