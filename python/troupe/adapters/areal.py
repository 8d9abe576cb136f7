"""AReaL's Scheduler on Troupe.

    from troupe.adapters.areal import TroupeScheduler
    PPOTrainer._init_scheduler = lambda self: TroupeScheduler(exp_config=self.config)

An AReaL role is a Troupe role whose workers host engines, on one reservation. Forked roles share the devices of their
target. Calls that an event loop makes to several workers of a role in one iteration are sent together; calls with the
same arguments are published once.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from areal.api import Job, Scheduler, Worker
from areal.api.cli_args import NameResolveConfig, SchedulingSpec
from areal.infra.rpc import rtensor
from areal.infra.scheduler.exceptions import (
    EngineCallError,
    EngineCreationError,
    EngineImportError,
    SchedulerError,
    WorkerCreationError,
    WorkerFailedError,
    WorkerNotFoundError,
    WorkerTimeoutError,
)
from areal.infra.utils.launcher import get_env_vars, get_thread_env_vars
from areal.utils import name_resolve, names

import troupe

from .. import _pieces
from ._areal_worker import CommandWorker, EngineImportFailure, EngineMissing, EngineWorker, tensors_of

__all__ = ["TroupeScheduler"]

logger = logging.getLogger("TroupeScheduler")

_RPC_SERVER = (
    "areal.infra.rpc.rpc_server"  # the default command of AReaL's workers; here the workers do its work themselves
)
_NO_DEVICES = {"CPU": 0.001}  # bundle of a worker without devices: it fixes a node, which forked roles share
_CREATE_TIMEOUT = 300.0  # seconds for the constructor of an engine
_ENV_TIMEOUT = 30.0


class _Info:
    """One worker of a role."""

    def __init__(
        self, role: str, index: int, cluster: troupe.Cluster, rank: int, spec: SchedulingSpec, serves_http: bool
    ) -> None:
        self.role = role
        self.index = index
        self.cluster = cluster
        self.rank = rank
        self.spec = spec
        self.serves_http = serves_http  # whether the worker runs its own command and is called over HTTP
        self.worker = Worker(id=f"{role}/{index}", ip="")  # the address is set after the start


class _Call:
    """A call of one worker's method, until it is sent together with others."""

    def __init__(
        self, info: _Info, method: str, timeout: float, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        self.info = info
        self.method = method
        self.timeout = timeout
        self.args = args
        self.kwargs = kwargs
        self.sent: asyncio.Future[troupe.RankFuture] = asyncio.get_running_loop().create_future()


class TroupeScheduler(Scheduler):  # type: ignore[misc]
    """Runs AReaL's workers as Troupe roles. If this process has no session, it calls troupe.init().

    - startup_timeout: seconds that the workers of a role may take to start, and that a request for devices waits.
    - policy: what happens when a worker dies, as in troupe.WorkerConfig; by default its role fails.
    - gpu_devices and log_dir are accepted for programs written for LocalScheduler: the devices are those of the
      session, and `troupe logs` shows output.
    """

    def __init__(
        self,
        gpu_devices: list[int] | None = None,
        log_dir: str | None = None,
        startup_timeout: float = 300.0,
        health_check_interval: float = 0.2,
        *,
        n_gpus_per_node: int | None = None,
        experiment_name: str | None = None,
        trial_name: str | None = None,
        fileroot: str | None = None,
        enable_tms_offload: bool | None = None,
        name_resolve_type: str = "nfs",
        nfs_record_root: str = "/tmp/areal/name_resolve",
        etcd3_addr: str = "localhost:2379",
        exp_config: Any = None,
        policy: str = "",
    ) -> None:
        self._workers: dict[str, list[_Info]] = {}
        self._colocated_roles: dict[str, str] = {}  # by role, the role whose workers or devices it shares
        self._reservations: dict[str, troupe.Reservation] = {}  # by the role that created it
        self._queued: dict[asyncio.AbstractEventLoop, list[_Call]] = {}
        self.experiment_name, self.trial_name, self.fileroot = experiment_name, trial_name, fileroot
        self.enable_tms_offload = bool(enable_tms_offload)
        self.name_resolve_config = NameResolveConfig(
            type=name_resolve_type, nfs_record_root=nfs_record_root, etcd3_addr=etcd3_addr
        )
        if exp_config is not None:
            self.experiment_name, self.trial_name, self.fileroot = (
                exp_config.experiment_name,
                exp_config.trial_name,
                exp_config.cluster.fileroot,
            )
            self.enable_tms_offload = bool(exp_config.enable_offload)
            self.name_resolve_config = exp_config.cluster.name_resolve
        self.exp_config = exp_config
        self.startup_timeout, self.health_check_interval, self.policy = startup_timeout, health_check_interval, policy
        if self.experiment_name and self.trial_name:
            name_resolve.reconfigure(self.name_resolve_config)
            name_resolve.clear_subtree(names.trial_root(self.experiment_name, self.trial_name))
        if not troupe.is_initialized():
            troupe.init()
        rtensor.set_backend(tensors_of(""))
        devices = max((n["resources"].get("GPU", 0) for n in troupe.nodes()), default=0)
        self._n_gpus_per_node = int(
            n_gpus_per_node
            or (exp_config.cluster.n_gpus_per_node if exp_config is not None else 0)
            or len(gpu_devices or [])
            or devices
        )

    @property
    def n_gpus_per_node(self) -> int:
        return self._n_gpus_per_node

    # Workers.

    def create_workers(self, job: Job, *args: object, **kwargs: object) -> list[str]:
        if job.role in self._workers:
            raise WorkerCreationError(
                job.role,
                "Worker group already exists",
                f"Use delete_workers('{job.role}') first to remove existing workers",
            )
        if job.replicas < 1:
            raise WorkerCreationError(job.role, "Invalid configuration", "replicas must be greater than 0")
        specs = self._specs(job)
        if str(getattr(job.scheduling_strategy.type, "value", job.scheduling_strategy.type)) == "colocation":
            return self._colocate(job)
        bundles = [{"GPU": s.gpu} if s.gpu else _NO_DEVICES for s in specs]
        with _creating(job.role):
            self._reservations[job.role] = troupe.Reservation(bundles, wait=self.startup_timeout)
        try:
            return self._start(job.role, specs, self._reservations[job.role])
        except BaseException:
            self._reservations.pop(job.role).release()
            raise

    def fork_workers(self, role: str, target_role: str, command: str | None = None) -> list[str]:
        if target_role not in self._workers:
            raise WorkerNotFoundError(f"Target role '{target_role}' not found for fork")
        if role in self._workers:
            raise WorkerCreationError(
                role, "Worker group already exists", f"Use delete_workers('{role}') first to remove existing workers"
            )
        specs = [info.spec for info in self._workers[target_role]]
        made = self._start(
            role,
            specs,
            self._reservations[self._holder(target_role)],
            f"python -m {command}" if command else _RPC_SERVER,
        )
        self._colocated_roles[role] = target_role
        return made

    def _specs(self, job: Job) -> list[SchedulingSpec]:
        """Returns the specification of each worker."""
        tasks = list(job.tasks or []) or [SchedulingSpec(cpu=1, gpu=0, mem=1, port_count=2)]
        if len(tasks) not in (1, job.replicas):
            raise WorkerCreationError(
                job.role,
                "Invalid configuration",
                f"schedulings length ({len(tasks)}) must be 1 or equal to replicas ({job.replicas})",
            )
        for spec in tasks:
            if spec.additional_bash_cmds:
                raise WorkerCreationError(
                    job.role, "Invalid configuration", "additional_bash_cmds is for Slurm; put the commands into cmd"
                )
            if "--port" in (spec.cmd or ""):
                raise WorkerCreationError(
                    job.role,
                    "Custom command should not include --port argument",
                    "The scheduler allocates and provides the port.",
                )
        return tasks * job.replicas if len(tasks) == 1 else tasks

    def _colocate(self, job: Job) -> list[str]:
        target = job.scheduling_strategy.target
        if not target:
            raise WorkerCreationError(
                job.role, "Invalid strategy", "Colocation strategy requires target role to be specified"
            )
        if target not in self._workers:
            raise WorkerNotFoundError(f"Cannot colocate with role '{target}' - role not found")
        if job.replicas != len(self._workers[target]):
            raise WorkerCreationError(
                job.role,
                "Replica count mismatch",
                f"Colocated role must have same replica count as target ({job.replicas} != "
                f"{len(self._workers[target])})",
            )
        if job.scheduling_strategy.fork:
            return self.fork_workers(job.role, target)
        self._colocated_roles[job.role] = target
        return [info.worker.id for info in self._workers[target]]

    def _start(
        self, role: str, specs: list[SchedulingSpec], reservation: troupe.Reservation, command: str | None = None
    ) -> list[str]:
        """Starts the workers of a role in the background: one Troupe role for each run of equal specifications, usually
        a single one."""
        parts = [list(part) for _, part in groupby(range(len(specs)), key=lambda i: specs[i])]
        workers: list[_Info] = []
        with _creating(role):
            try:
                for n, indices in enumerate(parts):
                    spec = specs[indices[0]]
                    name = role if len(parts) == 1 else f"{role}-{n}"
                    words = shlex.split(command or spec.cmd or _RPC_SERVER)
                    serves_http = _RPC_SERVER not in words
                    cluster = self._cluster(name, role, indices, spec, reservation, words if serves_http else None)
                    workers += [_Info(role, i, cluster, rank, spec, serves_http) for rank, i in enumerate(indices)]
            except BaseException:
                _end(workers)
                raise
        self._workers[role] = workers
        if self.exp_config is not None:
            self._configure_workers(workers)
        return [info.worker.id for info in workers]

    def _cluster(
        self,
        name: str,
        role: str,
        indices: list[int],
        spec: SchedulingSpec,
        reservation: troupe.Reservation,
        command: list[str] | None,
    ) -> troupe.Cluster:
        env = {**get_env_vars(), **get_thread_env_vars(spec.cpu, spec.env_vars)}
        if self.enable_tms_offload:
            from areal.utils.offload import get_tms_env_vars

            env.update(get_tms_env_vars())
        env.update(spec.env_vars)
        config = troupe.WorkerConfig(
            env={k: str(v) for k, v in env.items()},
            bundles=indices,
            start_timeout=self.startup_timeout,
            policy=self.policy,
        )
        trial = {
            "experiment": self.experiment_name,
            "name": self.trial_name,
            "fileroot": self.fileroot,
            "name_resolve": self.name_resolve_config,
        }
        if command is None:
            return troupe.Cluster.create(
                name, EngineWorker, reservation, config, worker_args=(role, indices[0], trial, spec.port_count)
            )
        return troupe.Cluster.create(
            name,
            CommandWorker,
            reservation,
            config,
            worker_args=(role, indices[0], self._whole_command(command, role), spec.port_count),
        )

    def _whole_command(self, words: list[str], role: str) -> list[str]:
        """Adds the arguments that AReaL's servers take to a command; each worker replaces {port} and {index}."""
        resolve = self.name_resolve_config
        flags = {
            "host": "0.0.0.0",
            "port": "{port}",
            "experiment-name": self.experiment_name,
            "trial-name": self.trial_name,
            "role": role,
            "worker-index": "{index}",
            "name-resolve-type": resolve.type,
            "nfs-record-root": resolve.nfs_record_root,
            "etcd3-addr": resolve.etcd3_addr,
            "fileroot": self.fileroot,
        }
        program = sys.executable if words[0].startswith("python") else words[0]
        return [
            program,
            *words[1:],
            *(word for name, value in flags.items() if value for word in (f"--{name}", str(value))),
        ]

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        if role not in self._workers and role in self._colocated_roles:
            return self.get_workers(self._colocated_roles[role], timeout)
        if role not in self._workers:
            raise WorkerNotFoundError(role)
        limit = self.startup_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        workers = self._workers[role]
        try:
            for cluster in _clusters(workers):
                cluster.wait_ready(max(deadline - time.monotonic(), 0.001))
                placed = cluster.describe()
                for info in (w for w in workers if w.cluster is cluster):
                    info.worker.ip, ports = placed[info.rank]
                    info.worker.worker_ports = [str(p) for p in ports]
            for info in workers:
                while info.serves_http and not info.cluster.workers[info.rank].healthy():
                    if time.monotonic() > deadline:
                        raise WorkerTimeoutError(role, limit)
                    time.sleep(
                        self.health_check_interval
                    )  # polls, because another program's server gives no notification
        except troupe.TimedOutError:
            raise WorkerTimeoutError(role, limit) from None
        except troupe.Error as err:
            raise _failed(workers, err) from err
        return [info.worker for info in workers]

    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        """Ends a role, or all roles. Troupe ends rank 0 of a role last, regardless of reverse_order."""
        if role is None:
            while self._colocated_roles or self._workers:
                self.delete_workers(next(reversed(self._colocated_roles or self._workers)))
            return
        for fork in [r for r, target in self._colocated_roles.items() if target == role and r in self._workers]:
            self.delete_workers(fork)
        known = self._colocated_roles.pop(role, None) or role in self._workers
        if not known:
            logger.warning(f"Worker role '{role}' not found, skipping deletion")
        _end(self._workers.pop(role, []))
        if reservation := self._reservations.pop(role, None):
            reservation.release()

    def _holder(self, role: str) -> str:
        """Returns the role that holds the reservation of a role."""
        while role not in self._reservations:
            role = self._colocated_roles[role]
        return role

    def _configure_workers(self, workers: list[_Info]) -> None:
        """Seeds every worker; workers that run a command are configured once they serve."""
        for cluster in _clusters(workers):
            if workers[0].serves_http:
                self.get_workers(workers[0].role)
                asyncio.run(_configure_by_http(workers, self.exp_config))
                return
            cluster.seed.remote(self.exp_config)  # later calls run after it

    # Engines.

    async def set_worker_env(self, worker_id: str, env: dict[str, str]) -> None:
        info = self._find(worker_id)
        if not env:
            return
        try:
            if info.serves_http:
                await _post(info, "set_env", {"env": env}, _ENV_TIMEOUT)
            else:
                await self._call(_Call(info, "setup", _ENV_TIMEOUT, (env,), {}))
        except troupe.TimedOutError as err:
            raise SchedulerError(worker_id, f"set_env timed out: {err}") from err
        except troupe.Error as err:
            raise _failed([info], err) from err

    async def create_engine(
        self, worker_id: str, engine: str, engine_name: str | None = None, *args: object, **kwargs: object
    ) -> Any:
        info = self._find(worker_id)
        if not isinstance(engine, str):
            raise EngineCreationError(worker_id, f"Engine must be a string import path, got {type(engine)}")
        name = engine_name or worker_id
        try:
            if info.serves_http:
                return await _create_by_http(info, engine, name, args, kwargs)
            return await self._call(
                _Call(info, "create", _CREATE_TIMEOUT, (sys.intern(engine), _own(name, info), *args), kwargs)
            )
        except EngineImportFailure as err:
            raise EngineImportError(engine, _reason(err)) from err
        except troupe.WorkerLostError as err:
            raise _failed([info], err) from err
        except troupe.TimedOutError as err:
            raise EngineCreationError(worker_id, f"Request timed out: {err}") from err
        except troupe.Error as err:
            raise EngineCreationError(worker_id, _reason(err)) from err

    def call_engine(
        self,
        worker_id: str,
        method: str,
        engine_name: str | None = None,
        *args: object,
        rpc_meta: Mapping[str, object] | None = None,
        http_timeout: float = 7200.0,
        max_retries: int = 3,
        retry_delay: float = 1.0,
        **kwargs: object,
    ) -> Any:
        """Calls a method of an engine and waits for the result. A call runs at most once, so max_retries and
        retry_delay have no effect."""
        info = self._find(worker_id)
        if info.serves_http:
            return asyncio.run(
                _call_by_http(info, method, engine_name or worker_id, args, kwargs, rpc_meta, http_timeout)
            )
        handle = info.cluster.workers[info.rank]
        with _calling(info, method):
            return handle.invoke.options(timeout=http_timeout)(
                method, _own(engine_name or worker_id, info), rpc_meta, *args, **kwargs
            )

    async def async_call_engine(
        self,
        worker_id: str,
        method: str,
        engine_name: str | None = None,
        *args: object,
        rpc_meta: Mapping[str, object] | None = None,
        http_timeout: float = 7200.0,
        max_retries: int = 3,
        retry_delay: float = 1.0,
        **kwargs: object,
    ) -> Any:
        """Calls a method of an engine as call_engine does, in an event loop."""
        info = self._find(worker_id)
        if info.serves_http:
            return await _call_by_http(info, method, engine_name or worker_id, args, kwargs, rpc_meta, http_timeout)
        with _calling(info, method):
            return await self._call(
                _Call(
                    info,
                    "invoke",
                    http_timeout,
                    (sys.intern(method), _own(engine_name or worker_id, info), rpc_meta, *args),
                    kwargs,
                )
            )

    def _find(self, worker_id: str) -> _Info:
        for workers in self._workers.values():
            for info in workers:
                if info.worker.id == worker_id:
                    return info
        raise WorkerNotFoundError(worker_id)

    # Calls to several workers of a role.

    async def _call(self, call: _Call) -> object:
        """Sends a call together with all others of this loop iteration, and waits for its answer."""
        loop = asyncio.get_running_loop()
        queued = self._queued.setdefault(loop, [])
        if not queued:
            loop.call_soon(self._send_queued, loop)
        queued.append(call)
        return await (await call.sent)

    def _send_queued(self, loop: asyncio.AbstractEventLoop) -> None:
        for group in _groups(self._queued.pop(loop, [])):
            try:
                self._send(group)
            except Exception as err:
                for call in group:
                    if not call.sent.done():
                        call.sent.set_exception(err)

    def _send(self, group: list[_Call]) -> None:
        """Sends calls to different workers of one role: as one call if they cover all workers, otherwise separately."""
        cluster, method, timeout = group[0].info.cluster, group[0].method, group[0].timeout
        if len(group) < cluster.world_size or len(group) == 1:
            for call in group:
                _take(
                    call,
                    cluster.workers[call.info.rank][method].options(timeout=timeout).remote(*call.args, **call.kwargs),
                )
            return
        group.sort(key=lambda call: call.info.rank)
        sent = _pieces.send(
            cluster, method, [(call.args, call.kwargs) for call in group], timeout=timeout, collect_all=True
        )
        for call in group:
            _take(call, sent[call.info.rank])

    def __del__(self) -> None:
        try:
            self.delete_workers()
        except Exception:
            pass  # the session has ended, and its roles with it


def _groups(calls: list[_Call]) -> list[list[_Call]]:
    """Groups calls of one method to different workers of a role. The calls of each worker stay in order."""
    groups: list[list[_Call]] = []
    for call in calls:
        at = len(groups)
        while at and not any(c.info is call.info for c in groups[at - 1]):
            at -= 1
            first = groups[at][0]
            if (first.info.cluster, first.method, first.timeout) == (call.info.cluster, call.method, call.timeout):
                groups[at].append(call)
                break
        else:
            groups.append([call])
    return groups


def _take(call: _Call, future: Any) -> None:
    if not call.sent.done():  # already done if the caller's task was cancelled
        call.sent.set_result(future)


def _own(engine: str, info: _Info) -> str:
    """Replaces the worker's index in an engine's name by `*`, so that all workers of a role use the same name."""
    return sys.intern(f"{engine[: -len(str(info.index))]}*" if engine.endswith(f"/{info.index}") else engine)


def _clusters(workers: list[_Info]) -> list[troupe.Cluster]:
    return list(dict.fromkeys(info.cluster for info in workers))


def _end(workers: list[_Info]) -> None:
    for cluster in _clusters(workers):
        try:
            cluster.shutdown()
        except troupe.Error as err:
            logger.warning(f"{cluster.name} has ended already: {err.message}")


def _failed(workers: list[_Info], err: troupe.Error) -> WorkerFailedError:
    """Converts the error of a lost worker to AReaL's."""
    lost = next((w for w in workers if w.rank == err.rank), workers[0])
    code = -getattr(signal, err.signal, 0) if err.signal else 1 if err.exit_code is None else err.exit_code
    return WorkerFailedError(lost.worker.id, code, "\n".join(err.last_lines) or str(err))


def _reason(err: BaseException) -> str:
    return str(getattr(err, "message", "") or err)


class _creating:
    """Converts Troupe's errors while workers are created to AReaL's."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, err: BaseException | None, trace: object) -> None:
        if isinstance(err, troupe.Error):
            raise WorkerCreationError(self._role, "Troupe could not create the workers", str(err)) from err


class _calling:
    """Converts the errors of a call to an engine to AReaL's."""

    def __init__(self, info: _Info, method: str) -> None:
        self._info, self._method = info, method

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, err: BaseException | None, trace: object) -> None:
        worker = self._info.worker.id
        if isinstance(err, troupe.WorkerLostError):
            raise _failed([self._info], err) from err
        if isinstance(err, EngineMissing):
            raise EngineCallError(worker, self._method, _reason(err)) from err
        if isinstance(err, troupe.Error):
            raise EngineCallError(worker, self._method, f"Engine method '{self._method}' failed: {err}") from err


# Workers that run their own command are called over HTTP, in AReaL's format.


async def _post(info: _Info, route: str, payload: object, timeout: float) -> tuple[int, Any]:
    import aiohttp
    from areal.infra.scheduler.exceptions import RPCConnectionError

    if not info.worker.worker_ports:
        info.worker.ip, ports = info.cluster.workers[info.rank].describe()
        info.worker.worker_ports = [str(p) for p in ports]
    host, port = info.worker.ip, int(info.worker.worker_ports[0])
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/{route}"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.post(url, json=payload) as answer,
        ):
            return answer.status, await answer.json()
    except aiohttp.ClientError as err:
        raise RPCConnectionError(info.worker.id, host, port, str(err)) from err


async def _configure_by_http(workers: list[_Info], config: object) -> None:
    from areal.infra.rpc.serialization import serialize_value
    from areal.infra.scheduler.exceptions import WorkerConfigurationError

    for info in workers:
        status, answer = await _post(
            info,
            "configure",
            serialize_value({"config": config, "role": info.role, "rank": info.index}),
            _CREATE_TIMEOUT,
        )
        if status != 200:
            raise WorkerConfigurationError(info.worker.id, answer.get("error", "Unknown error"), str(status))


async def _create_by_http(
    info: _Info, engine: str, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Any:
    from areal.infra.rpc.serialization import serialize_value

    payload = {
        "engine": engine,
        "engine_name": name,
        "init_args": serialize_value(list(args)),
        "init_kwargs": serialize_value(kwargs),
    }
    status, answer = await _post(info, "create_engine", payload, _CREATE_TIMEOUT)
    if status == 200:
        return answer.get("result")
    reason = answer.get("error", "Unknown error")
    if "Failed to import" in reason:
        raise EngineImportError(engine, reason)
    raise EngineCreationError(info.worker.id, reason, status)


async def _call_by_http(
    info: _Info,
    method: str,
    name: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    meta: Mapping[str, object] | None,
    timeout: float,
) -> Any:
    from areal.infra.rpc.serialization import deserialize_value, serialize_value

    payload = {
        "method": method,
        "engine_name": name,
        "args": serialize_value(list(args)),
        "kwargs": serialize_value(kwargs),
        "rpc_meta": meta,
    }
    status, answer = await _post(info, "call", payload, timeout)
    if status != 200:
        raise EngineCallError(info.worker.id, method, answer.get("error", "Unknown error"))
    return deserialize_value(answer.get("result"))
