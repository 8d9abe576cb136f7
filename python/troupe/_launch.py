"""Builds the spec of a role of Python workers for the core, and the configuration that its workers read."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from . import _check, _codec, _constructor, _errors, _session, _source
from ._config import WorkerConfig, check, replica_range, setting
from ._resources import BundleOf, Reservation

# Variables that Troupe sets for each worker, unless its role has own_variables: visible devices, and the worker's rank
# and names. Workers do not inherit them from their driver.
WORKER_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CLUSTER_NAME",
    "WORKER_NAME",
)
_RENDEZVOUS = WORKER_VARIABLES[6:13]
FORK_VARIABLES = (
    "TROUPE_FORK",
    "TROUPE_WARM",
)  # variables of a driver that its workers get too, for the roles they create
_NOT_INHERITED = {*WORKER_VARIABLES, "PYTHONUNBUFFERED"}


def class_path(cls: type | str) -> str:
    """Returns a readable name of a class."""
    if isinstance(cls, str):
        return cls
    return f"{cls.__module__}.{cls.__qualname__}"


def _name(cls: type | str) -> str:
    """Returns the class's own name, restricted to the characters that the bus allows in names."""
    text = class_path(cls).rpartition(".")[2].replace("<locals>", "")
    return "".join(c if c.isalnum() or c in "_-" else "_" for c in text)[-64:] or "worker"


def _by_value(cls: type) -> bool:
    """Returns whether the class cannot be imported, because it is defined in the main script or inside a function."""
    module = sys.modules.get(cls.__module__)
    if cls.__module__ == "__main__" or module is None:
        return True
    found: Any = module
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not cls


def _class_config(codec: _codec.Codec, cls: type | str) -> dict[str, object]:
    if isinstance(cls, str):
        if "." not in cls.replace(":", "."):
            raise _errors.InvalidError(f'worker_cls {cls!r} is no import path; give a class, or "package.module.Class"')
        return {"path": cls}
    if not isinstance(cls, type):
        raise _errors.InvalidError(
            f'worker_cls is of type {type(cls).__name__}; give a class, or "package.module.Class"'
        )
    if _by_value(cls):
        if not codec.pickle:
            raise _errors.EncodeError(
                f"class {cls.__qualname__} is the script's own and would have to be pickled, but {codec.why_not}; "
                "move it to a module "
                "that the workers can import"
            )
        return {"pickle": _source.dump(codec, cls), "path": class_path(cls)}
    return {"path": class_path(cls)}


def engine_config(
    codec: _codec.Codec, cls: type | str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Returns the configuration from which a worker creates an object."""
    body = codec.encode([list(args), kwargs or None])
    return {"class": _class_config(codec, cls), "args": body if isinstance(body, bytes) else body.join()}


def spec(
    session: _session.Session,
    name: str,
    cls: type | str,
    manager: object,
    config: object,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    node: str,
) -> dict[str, object]:
    """Returns the spec of a role for the core."""
    if not isinstance(cls, (type, str)):
        raise _errors.InvalidError(
            f'worker_cls is of type {type(cls).__name__}; give a class, or "package.module.Class"'
        )
    if isinstance(cls, type):
        _constructor.arguments(cls, args, kwargs, config)
    codec = session.codec(True)
    get = setting
    check(config)
    mapping, world = get(config, "device_mapping", None), get(config, "world_size", None)
    chosen = get(config, "bundles", None)
    places: list[str] = []  # the node of each worker, for bundles without devices
    if chosen is not None or (isinstance(manager, Reservation) and mapping is None and world is None):
        if not isinstance(manager, Reservation) or mapping is not None:
            raise _errors.InvalidError(
                f"role {name!r}: bundles are those of a troupe.Reservation given as resource_manager, without a "
                "device_mapping"
            )
        indices = manager._indices(chosen)
        if len(indices) == 1 and (manager._has_share(indices) or _asks_for_share(config)):
            manager, world = BundleOf(manager, indices[0]), 1
        else:
            mapping, places = manager._devices_of(indices)
            world = len(indices) if world is None else world
    devices = _mapping(mapping)
    fewest, most = replica_range(config)
    if most and world is None and devices is None:
        world = fewest * int(get(config, "tensor_parallel_size", 1)) * int(get(config, "context_parallel_size", 1))
    world = _world(name, world, devices)
    mesh = {
        "tp": int(get(config, "tensor_parallel_size", 1)), "pp": int(get(config, "pipeline_parallel_size", 1)),
        "cp": int(get(config, "context_parallel_size", 1)), "dp": 0,
    }  # fmt: skip
    out: dict[str, Any] = {
        "name": name,
        "class": _name(cls),
        "world": world,
        "mesh": mesh,
        "config": _config(session, codec, name, cls, config, args, kwargs),
        "command": [sys.executable, "-m", "troupe.worker"],
        **_folder(session),
        **fork_settings(warm_modules(config), search_path()),
        **_environments(name, config, world),
        "ordered": bool(get(config, "ordered", False)),
        "detached": bool(get(config, "detached", False)),
        "ends_with_run": get(config, "lifetime", "") == "run",
        "queue_limit": int(get(config, "queue_limit", 0)),
        "start_timeout": float(get(config, "start_timeout", 0)),
        "stop_grace": float(get(config, "stop_grace", 0)),
        "late_rendezvous": bool(get(config, "late_rendezvous", False)),
        "own_variables": bool(get(config, "own_variables", False)),
        "policy": str(get(config, "policy", "")) or ("restart_rank" if fewest else ""),
        "restarts": int(get(config, "restarts", 0)),
        "spares": int(get(config, "spares", 0)),
        "stall_after": float(get(config, "stall_after", 0)),
        "min_replicas": fewest,
        "max_replicas": most,
        "output": str(get(config, "output", "")),
    }
    if isinstance(manager, BundleOf):
        out.update(manager._request(name, world, _bundle(config, "")))
    elif places:
        out["bundles"] = [{"node": place} for place in places]
    else:
        out.update(_resources(name, manager, config, world, devices, node))
    return out


def _resources(name: str, manager: Any, config: object, world: int, devices: str | None, node: str) -> dict[str, Any]:
    """Returns the devices, CPUs and memory of the workers, and their placement."""
    bundle = _bundle(config, node)
    gpus = bundle.get("devices", 0)
    out: dict[str, Any] = {"strategy": setting(config, "strategy", "")}
    if manager is not None and manager.id:
        out["colocate"] = manager.id
    if gpus % 1000 and (devices is not None or manager is not None):
        raise _errors.InvalidError(
            f"role {name!r}: num_gpus_per_worker={gpus / 1000} is a share of a device, which a device_mapping or a "
            "resource_manager cannot give; "
            "a bundle of a Reservation can, to one worker: WorkerConfig(bundles=[0])"
        )
    if devices is not None:
        out["mapping"], out["per_rank"] = devices, gpus // 1000
    elif gpus and manager is not None:
        out["mapping"] = str(list(range(world * (gpus // 1000))))
    if "mapping" in out:
        bundle = {k: v for k, v in bundle.items() if k not in ("devices", "node")}
    if bundle:
        out["bundles"] = [bundle]
    return out


def _bundle(config: object, node: str) -> dict[str, Any]:
    """Returns the request of one worker, in the core's format."""
    asked = {
        "devices": _check.devices("num_gpus_per_worker", setting(config, "num_gpus_per_worker", 0)),
        "cpus": _check.thousandths("num_cpus_per_worker", setting(config, "num_cpus_per_worker", 0)),
        "memory": _check.memory("memory_per_worker", setting(config, "memory_per_worker", 0)),
        "resources": _check.resources("resources_per_worker", setting(config, "resources_per_worker", None)),
        "node": node,
    }  # fmt: skip
    return {k: v for k, v in asked.items() if v}


def _asks_for_share(config: object) -> bool:
    return bool(_bundle(config, "").get("devices", 0) % 1000)


def _folder(session: _session.Session) -> dict[str, object]:
    """Returns where the workers run: in this process's directory, or in a copy of working_dir that is shipped once to
    each node."""
    if session.working_dir is None:
        return {"dir": here()}
    folder = os.path.abspath(session.working_dir)
    if not os.path.isdir(folder):
        raise _errors.InvalidError(f"working_dir {folder} is no folder")
    return {"ship": folder, "exclude": ["__pycache__", "*.pyc", ".git", ".venv"]}


def warm_modules(config: object) -> list[str]:
    """Returns the modules that a role's workers import first, once for all workers of a node: those of the role, or of
    TROUPE_WARM."""
    named = setting(config, "warm", None)
    if named is None:
        named = [m.strip() for m in os.environ.get("TROUPE_WARM", "").split(",") if m.strip()]
    return _check.modules("warm", named)


def fork_settings(modules: list[str], paths: list[str]) -> dict[str, object]:
    """Returns the settings for workers that are forked from a process with the imports already done; empty with
    TROUPE_FORK=0."""
    if os.environ.get("TROUPE_FORK") == "0":
        return {}
    return {"fork": True, "warm": modules, "warm_path": paths if modules else []}


def _mapping(mapping: Sequence[int] | str | None) -> str | None:
    """Returns a device mapping as text, which Go parses."""
    if mapping is None or isinstance(mapping, str):
        return mapping or None
    return str([int(d) for d in mapping]) if len(mapping) else None


def _world(name: str, world: int | None, devices: str | None) -> int:
    """Returns the number of workers. 0 means as many as the mapping has devices for, which Go counts."""
    if world is not None:
        if int(world) < 1:
            raise _errors.InvalidError(f"role {name!r}: world_size {world} must be at least 1")
        return int(world)
    if devices is None:
        raise _errors.InvalidError(
            f"role {name!r}: world_size is not set, and there is no device_mapping that it could be known from"
        )
    return 0


def _environments(name: str, config: object, world: int) -> dict[str, object]:
    """Returns the environment shared by all ranks and, if env is a sequence, that of each rank."""
    given = setting(config, "env", None) or setting(config, "system_envs", None) or {}
    shared, of_ranks = (given, []) if isinstance(given, Mapping) else ({}, list(given))
    if of_ranks and world and len(of_ranks) != world:
        raise _errors.InvalidError(
            f"role {name!r}: env has {len(of_ranks)} environments for {world} workers; give one for all, or a "
            "sequence with one for each rank"
        )
    for own in (shared, *of_ranks):
        _check_environment(config, own)
    env = {**inherited_environment(), **shared, "PYTHONUNBUFFERED": "1"}
    if path := _python_path(env.get("PYTHONPATH", "")):
        env["PYTHONPATH"] = path
    return {"env": env, "rank_env": of_ranks}


def _check_environment(config: object, env: object) -> None:
    if not isinstance(env, Mapping):
        raise _errors.InvalidError(
            f"env: {env!r} is of type {type(env).__name__}; give a dict of variables, or a sequence of them with one "
            "for each rank"
        )
    for key, value in env.items():
        if not isinstance(value, str):
            raise _errors.InvalidError(f"env: the value of {key} is of type {type(value).__name__}; give text")
        if (
            key in WORKER_VARIABLES
            and not setting(config, "own_variables", False)
            and not (key in _RENDEZVOUS and setting(config, "late_rendezvous", False))
        ):
            raise _errors.InvalidError(
                f"env: {key} is set by Troupe for each worker; remove it, or give own_variables=True: then env is "
                "taken as it is, and none is added"
            )


def _config(
    session: _session.Session,
    codec: _codec.Codec,
    name: str,
    cls: type | str,
    config: object,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> dict[str, object]:
    """Returns the configuration that the worker host reads first. It is plain msgpack; fields with other values are
    encoded separately."""
    settings = codec.encode(_plain_config(config))
    return {
        **engine_config(codec, cls, args, kwargs),
        "worker_config": settings if isinstance(settings, bytes) else settings.join(),
        "cluster_name": name,
        "driver": session.session,
        "pickle": session.pickle,
        "device": session.device,
        "sys_path": search_path(),
        "shipped": session.working_dir is not None,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "max_concurrency": int(setting(config, "max_concurrency", 1000)),
        "troupe": _PACKAGE_IN,
        "warm": warm_modules(config),
        "variables": {name: os.environ[name] for name in FORK_VARIABLES if name in os.environ},
    }


def _plain_config(config: object) -> object:
    """Returns a WorkerConfig as its fields, and any other configuration unchanged."""
    if type(config) is WorkerConfig:
        return {"troupe.WorkerConfig": dict(config.__dict__)}
    return config


def unpack_config(value: object) -> object:
    if isinstance(value, dict) and set(value) == {"troupe.WorkerConfig"}:
        return WorkerConfig(**value["troupe.WorkerConfig"])
    return value


def packed(value: Mapping[str, object]) -> bytes:
    return bytes(msgpack.packb(value))


def inherited_environment() -> dict[str, str]:
    """Returns the driver's environment without the variables that each worker gets of its own."""
    return {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED and not set_by_troupe(k)}


def set_by_troupe(variable: str) -> bool:
    """Returns whether Troupe sets this variable for its workers itself."""
    return variable.startswith("TROUPE_") and not variable.startswith(
        ("TROUPE_SHM", "TROUPE_VALUES", "TROUPE_DEVICE", "TROUPE_RECORDER")
    )


def here() -> str:
    """Returns the working directory of this process."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise _errors.InvalidError(
            "the folder that this process runs in has been removed, and workers would run there: os.chdir to another"
        ) from None


def search_path() -> list[str]:
    """Returns the existing directories in which this process finds modules, as absolute paths."""
    paths = [absolute for p in sys.path for absolute in _absolute(p)]
    return [p for p in dict.fromkeys(paths) if os.path.exists(p)]


def _absolute(path: str) -> list[str]:
    """Returns the absolute directories of a sys.path entry. A relative entry counts from the current directory and from
    the one at import time."""
    if os.path.isabs(path):
        return [path]
    return [os.path.normpath(os.path.join(folder, path)) for folder in dict.fromkeys((here(), _STARTED_IN))]


def _python_path(inherited: str) -> str:
    """Returns the PYTHONPATH of a worker: the directory of this package, and the inherited entries as absolute paths.
    An installed package is omitted, because the worker's interpreter finds it anyway."""
    paths = [
        absolute for p in inherited.split(os.pathsep) if p for absolute in _absolute(p) if os.path.exists(absolute)
    ]
    if os.path.basename(_PACKAGE_IN) not in ("site-packages", "dist-packages"):
        paths.insert(0, _PACKAGE_IN)
    return os.pathsep.join(dict.fromkeys(paths))


def _start_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


_STARTED_IN = _start_folder()
_PACKAGE_IN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
