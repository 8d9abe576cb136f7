"""init and shutdown of this process as a driver."""

from __future__ import annotations

import atexit
import concurrent.futures
import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import troupe

from .. import _core, _errors, _launch, _seam
from .. import _session as _troupe_session
from . import _control, _heads, _host, _objects, _options, _peers, _refused, _state, actor, remote_function

_NAMESPACE = "ray"  # Troupe namespace of the sessions of this package, unless TROUPE_NAMESPACE names another
_lock = threading.RLock()
_at_exit = False

# Parameters of init that are accepted without effect, since there is no dashboard, and the bound of values has settings
# of its own.
_WITHOUT_EFFECT = {
    "include_dashboard",
    "dashboard_host",
    "dashboard_port",
    "configure_logging",
    "logging_level",
    "logging_format",
    "logging_config",
    "object_store_memory",
    "_redis_max_memory",
    "_plasma_directory",
    "_temp_dir",
    "_system_config",
    "_tracing_startup_hook",
    "_metrics_export_port",
    "_memory",
    "_enable_object_reconstruction",
    "_driver_object_store_memory",
    "_node_ip_address",
    "_node_name",
    "enable_resource_isolation",
    "system_reserved_cpu",
    "system_reserved_memory",
    "labels",
    "_cgroup_path",
}


class RayContext(dict[str, Any]):
    """The result of init: the address of the session, and a context manager that ends it."""

    def __init__(self, state: _state.State) -> None:
        info = {
            "node_ip_address": state.node_ip,
            "raylet_ip_address": state.node_ip,
            "redis_address": None,
            "object_store_address": None,
            "raylet_socket_name": None,
            "webui_url": "",
            "session_dir": "",
            "metrics_export_port": 0,
            "gcs_address": state.address,
            "address": state.address,
            "dashboard_agent_listen_port": 0,
            "node_id": state.node_id,
        }
        super().__init__(info)
        self.address_info = info
        self.dashboard_url = ""
        self.python_version = sys.version.split()[0]
        self.ray_version = "2.60.0"

    def disconnect(self) -> None:
        shutdown()

    def __enter__(self) -> RayContext:
        return self

    def __exit__(self, *_: object) -> None:
        shutdown()


class DriverService:
    """The methods of a driver that other processes can call, to reach its objects."""

    def __init__(self, store: _objects.Store) -> None:
        self._store = store

    async def fetch(self, id: str, again: bool) -> object:
        return await _settled(_host.fetch(self._store, id, again))

    async def receive_values(self, id: str, first: int, values: Sequence[tuple[int, object]]) -> object:
        return await _settled(_host.receive_values(self._store, id, first, values))

    async def borrow(self, id: str, process: str) -> None:
        self._store.borrow(id, process)

    async def give_back(self, id: str, process: str) -> None:
        self._store.give_back(id, process)

    async def describe(self, with_objects: bool) -> dict[str, Any]:
        return {**_objects.describe_process(_state.require(), with_objects), "calls": []}

    async def owns(self) -> bool:
        return self._store.is_needed()

    async def cancel_object(self, id: str, force: bool, recursive: bool) -> None:
        _host.cancel_object(self._store, id, force, recursive)


async def _settled(found: object) -> object:
    if isinstance(found, concurrent.futures.Future):
        import asyncio

        return await asyncio.wrap_future(found)
    return found


def implicit_init() -> _state.State:
    with _lock:
        state = _state.current()
        if state is None:
            init()
            state = _state.current()
            assert state is not None
        return state


_state.start = implicit_init


def init(
    address: str | None = None,
    *,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: dict[str, float] | None = None,
    namespace: str | None = None,
    ignore_reinit_error: bool = False,
    runtime_env: object = None,
    local_mode: bool = False,
    job_config: object = None,
    log_to_driver: bool | None = None,
    **others: object,
) -> RayContext:
    """Connects to a session, or starts a local one. num_cpus, num_gpus and resources override the detected amounts."""
    unknown = [k for k in others if k not in _WITHOUT_EFFECT]
    if unknown:
        raise RuntimeError(f"Unknown keyword argument(s): {', '.join(unknown)}")
    if local_mode:
        raise _refused.refuse("local_mode", "a session of this machine, init()")
    if namespace is not None:
        _options.check_namespace(namespace)
    if job_config is not None:
        raise _refused.refuse("job_config", "init(runtime_env=…, namespace=…)")
    env = _options.environment(runtime_env)
    with _lock:
        state = _state.current()
        if state is not None:
            if ignore_reinit_error or state.mode == _state.WORKER_MODE:
                logging.getLogger(__name__).info("init was called again: the session that is open is kept")
                return RayContext(state)
            raise RuntimeError(
                "Maybe you called ray.init twice by accident? This error can be suppressed by passing in "
                "'ignore_reinit_error=True' or by calling 'ray.shutdown()' prior to 'ray.init()'."
            )
        address = address or os.environ.get("RAY_ADDRESS") or None
        if address is not None and address.startswith("ray://"):
            raise _refused.refuse("Ray Client (ray://)", 'init(address="HOST:PORT"), a driver anywhere on the network')
        given = _given_resources(num_cpus, num_gpus, resources)
        if address not in (None, "local") and (num_cpus is not None or num_gpus is not None):
            raise ValueError("When connecting to an existing cluster, num_cpus and num_gpus must not be provided.")
        if log_to_driver is None:
            log_to_driver = os.environ.get("RAY_LOG_TO_DRIVER", "1") != "0"
        return RayContext(_open(address, given, namespace, env, bool(log_to_driver)))


def _given_resources(
    num_cpus: float | None, num_gpus: float | None, resources: dict[str, float] | None
) -> dict[str, float]:
    """Returns the resource amounts that the session claims to have."""
    override = json.loads(os.environ.get("RAY_OVERRIDE_RESOURCES") or "{}")
    given = {
        **(resources or {}),
        **({} if num_cpus is None else {"CPU": num_cpus}),
        **({} if num_gpus is None else {"GPU": num_gpus}),
    }
    return {k: float(v) for k, v in {**given, **override}.items()}


def _declared(resources: dict[str, float]) -> dict[str, Any]:
    """Returns what the node of a private head declares: its devices, and other totals."""
    totals: dict[str, Any] = {k: int(v) if k in ("CPU", "memory") else v for k, v in resources.items()}
    gpus = totals.pop("GPU", None)
    totals.pop("object_store_memory", None)  # there is no separate object store
    return {"gpus": _heads.devices(gpus), "resources": totals or None}


def _open(
    address: str | None, resources: dict[str, float], namespace: str | None, env: dict[str, Any], log_to_driver: bool
) -> _state.State:
    global _at_exit
    access = _heads.resolve(address)
    local = access is None
    before = os.environ.pop("TROUPE_URL", None) if local else None
    try:
        found: dict[str, Any] = dict(access or {})
        session = _troupe_session.init(
            found.pop("url", None),
            _NAMESPACE if local else os.environ.get("TROUPE_NAMESPACE") or _NAMESPACE,
            name=None,
            output="raw" if log_to_driver else "none",
            **(_declared(resources) if local else {}),
            **found,
        )
    except _errors.UnavailableError as err:
        raise ConnectionError(
            f"Could not find any running Ray instance at {address}: {err}. Please set `address`, or `RAY_ADDRESS`."
        ) from err
    finally:
        if before is not None:
            os.environ["TROUPE_URL"] = before
    process = f"driver-{os.urandom(8).hex()}"
    store = _objects.Store(process)
    served = _serve(DriverService(store), process)
    _peers.forget_peers()
    session.core.ask(_seam.show_output(runtime=session.id, name=process)).get(30)
    host, port = session._addresses[0]
    state = _state.State(
        mode=_state.DRIVER_MODE,
        job_id="",
        namespace=namespace or str(uuid.uuid4()),
        node_id="",
        address=f"{host}:{port}",
        control=_control.Control(process),
        process=process,
    )
    state.store = store
    state.runtime_env = env
    state.served = served
    job = {
        "process": process,
        "session": session.session,
        "output": "raw" if log_to_driver else "none",
        "namespace": state.namespace,
        "dir": _launch.here(),
        "executable": sys.executable,
        "env": _environment(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "troupe_ray": os.environ.get("TROUPE_RAY", ""),
        "sys_path": _launch.search_path(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "package": _launch._PACKAGE_IN,
        "address": state.address,
        "node_ip": host,
        "fork": _launch.fork_settings(_launch.warm_modules(None), _launch.search_path()),
    }
    _objects.start_reader(_core.get())
    _state.set_current(state)
    try:
        told = _state.control_call("register_job", job, timeout=60)
    except BaseException:
        _state.set_current(None)
        session.close()
        raise
    state.job_id, state.node_id, state.node_ip = told["job_id"], told["node_id"], told["node_ip"]
    state.control.job_id = state.job_id
    if session.head is not None:
        head = session.head
        state.announced = _heads.write(
            "session",
            f"{os.getpid()}-{port}",
            host=host,
            ip=host,
            port=port,
            url=head.url,
            token_file=head.token_file,
            fingerprint=head.fingerprint,
        )
    if not _at_exit:
        _at_exit = True
        getattr(threading, "_register_atexit", atexit.register)(shutdown)
    return state


def _serve(served: object, name: str) -> object:
    """Serves an object on its own event loop, even if init is called inside another loop, which may block later."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(troupe.serve, served, name, max_concurrency=1_000_000).result()


def _environment() -> dict[str, str]:
    env = {**_launch.inherited_environment(), "PYTHONUNBUFFERED": "1"}
    if path := _launch._python_path(env.get("PYTHONPATH", "")):
        env["PYTHONPATH"] = path
    return env


def shutdown(_exiting_interpreter: bool = False) -> None:
    """Ends this driver. Its actors end, except detached ones in a session shared with other drivers."""
    with _lock:
        state = _state.current()
        if state is None or state.mode == _state.WORKER_MODE:
            return
        if state.announced:
            _heads.remove(state.announced)
        try:
            _state.control_call("end_job", state.job_id, timeout=10)
        except Exception:
            pass  # the session is already gone
        state.control.close()
        _state.set_current(None)
        actor.forget_all()
        remote_function._submitters.clear()
        _peers.forget_peers()
        troupe.shutdown()


def is_initialized() -> bool:
    return _state.current() is not None
