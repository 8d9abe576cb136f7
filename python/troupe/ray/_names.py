"""The supported part of Ray's API: each name with its behaviour here. `python -m troupe.ray._names` prints docs/ray.md.

The tables of refused names and of ignored parameters come from the modules that refuse or ignore them.
"""

from __future__ import annotations

import importlib
from typing import Any

SAME, DIFFERENT, IMPORT = "same", "different", "import only"

# By module: name, status, difference from Ray.
NAMES: dict[str, list[tuple[str, str, str]]] = {
    "ray": [
        ("init", DIFFERENT, "connects to the session that `address`, RAY_ADDRESS or a running `ray start --head` names, else starts one of its own; "
         "num_cpus, num_gpus and resources are pretended amounts; RAY_OVERRIDE_RESOURCES replaces them. Parameters without effect are listed below"),
        ("shutdown", SAME, ""),
        ("is_initialized", SAME, ""),
        ("remote", SAME, "options below"),
        ("method", SAME, "num_returns, concurrency_group"),
        ("get", SAME, "values are copies of their own; large arrays are read-only, as in Ray"),
        ("put", SAME, "the value stays in the process that put it, and ends with it"),
        ("wait", SAME, ""),
        ("cancel", SAME, ""),
        ("kill", SAME, ""),
        ("get_actor", SAME, ""),
        ("get_gpu_ids", SAME, ""),
        ("get_runtime_context", SAME, "the methods that programs use; others are refused"),
        ("nodes", DIFFERENT, "ports and socket names that do not exist are 0 or made up"),
        ("cluster_resources", DIFFERENT, "without the CPU_group_… resources that stand for placement groups"),
        ("available_resources", DIFFERENT, "without the CPU_group_… resources that stand for placement groups"),
        ("timeline", DIFFERENT, "an empty list: `troupe timeline` shows calls"),
        ("ObjectRef", SAME, ""),
        ("ActorID", SAME, ""), ("JobID", SAME, ""), ("NodeID", SAME, ""), ("PlacementGroupID", SAME, ""), ("TaskID", SAME, ""), ("UniqueID", SAME, ""),
        ("WorkerID", SAME, ""),
        ("WORKER_MODE", SAME, ""), ("SCRIPT_MODE", SAME, ""), ("LOCAL_MODE", SAME, "init(local_mode=True) is refused"),
        ("cloudpickle", SAME, "the installed cloudpickle"),
        ("__version__", SAME, "2.60.0"),
    ],
    "ray.actor": [("ActorHandle", SAME, ""), ("ActorClass", SAME, ""), ("exit_actor", SAME, ""), ("ActorClassInheritanceException", SAME, "")],
    "ray.exceptions": [
        (name, SAME, "")
        for name in ("RayError", "RayTaskError", "RayActorError", "ActorDiedError", "ActorUnavailableError", "GetTimeoutError", "TaskCancelledError",
                     "OwnerDiedError", "ObjectLostError", "WorkerCrashedError", "RaySystemError", "TaskPlacementGroupRemoved", "ActorPlacementGroupRemoved",
                     "ActorUnschedulableError", "TaskUnschedulableError", "RuntimeEnvSetupError", "OutOfMemoryError", "NodeDiedError")
    ],
    "ray.runtime_env": [("RuntimeEnv", DIFFERENT, "env_vars (without those that Troupe sets itself, TROUPE_…), working_dir (a folder) and py_executable; "
                         "conda, pip, uv, container, nsight and remote archives are refused")],
    "ray.util": [
        ("placement_group", SAME, "bundle_label_selector, and topology_strategy by other labels than the node, are refused"),
        ("remove_placement_group", SAME, ""), ("get_placement_group", SAME, ""), ("placement_group_table", SAME, ""),
        ("get_current_placement_group", SAME, ""), ("PlacementGroup", SAME, ""),
        ("ActorPool", SAME, ""), ("list_named_actors", SAME, ""), ("get_node_ip_address", SAME, ""),
        ("as_completed", SAME, ""), ("map_unordered", SAME, ""), ("log_once", SAME, ""), ("inspect_serializability", DIFFERENT, "names the whole value, not the part of it"),
        ("get_node_instance_id", DIFFERENT, "always empty"),
    ],
    "ray.util.placement_group": [
        ("PlacementGroup", SAME, "ready(), wait(), id, bundle_specs, bundle_count"), ("placement_group", SAME, ""), ("remove_placement_group", SAME, ""),
        ("get_placement_group", SAME, ""), ("placement_group_table", SAME, ""), ("get_current_placement_group", SAME, ""),
        ("validate_placement_group", SAME, ""), ("check_placement_group_index", SAME, ""), ("VALID_PLACEMENT_GROUP_STRATEGIES", SAME, ""),
    ],
    "ray.util.scheduling_strategies": [
        ("PlacementGroupSchedulingStrategy", SAME, ""), ("NodeAffinitySchedulingStrategy", SAME, "without the private _spill_on_unavailable and _fail_on_unavailable"),
        ("NodeLabelSchedulingStrategy", DIFFERENT, "hard labels with In(…); soft labels and other operators are refused"), ("In", SAME, ""),
        ("NotIn", IMPORT, ""), ("Exists", IMPORT, ""), ("DoesNotExist", IMPORT, ""),
    ],
    "ray.util.queue": [("Queue", SAME, ""), ("Empty", SAME, ""), ("Full", SAME, "")],
    "ray.util.actor_pool": [("ActorPool", SAME, "")],
    "ray.util.accelerators": [("NVIDIA_H100", SAME, "and the other names; the option accelerator_type is refused")],
    "ray.util.annotations": [("PublicAPI", SAME, ""), ("DeveloperAPI", SAME, ""), ("Deprecated", DIFFERENT, "does not warn")],
    "ray.util.timer": [("_Timer", SAME, "")],
    "ray.util.collective": [("is_group_initialized", DIFFERENT, "always False: all other functions are refused")],
    "ray.util.state": [
        ("list_actors", SAME, ""), ("get_actor", SAME, ""), ("list_nodes", SAME, ""), ("get_node", SAME, ""), ("list_placement_groups", SAME, ""),
        ("get_placement_group", SAME, ""), ("summarize_actors", SAME, ""), ("list_tasks", DIFFERENT, "always empty"), ("list_workers", DIFFERENT, "always empty"),
        ("list_objects", DIFFERENT, "always empty"), ("list_jobs", DIFFERENT, "always empty"),
    ],
    "ray.experimental.state.api": [("get_actor", SAME, ""), ("list_actors", SAME, ""), ("list_nodes", SAME, ""), ("list_placement_groups", SAME, "")],
    "ray.cluster_utils": [("Cluster", DIFFERENT, "each node is an agent of its own on this machine; labels are refused"), ("cluster_not_supported", SAME, "")],
    "ray.dag": [("CompiledDAG", IMPORT, ""), ("InputNode", IMPORT, ""), ("MultiOutputNode", IMPORT, "")],
    "ray._raylet": [("ObjectRef", SAME, ""), ("ObjectRefGenerator", IMPORT, "streaming generators are refused"), ("PlacementGroupID", SAME, "")],
    "ray._private.state": [
        ("state", DIFFERENT, "placement_group_table, get_placement_group_by_name, node_table, actor_table and the resource functions"),
        ("available_resources_per_node", SAME, ""), ("total_resources_per_node", SAME, ""), ("actors", SAME, ""), ("node_ids", SAME, ""),
    ],
    "ray._private.services": [("get_node_ip_address", SAME, "")],
    "ray._private.async_compat": [("has_async_methods", SAME, ""), ("is_async_func", SAME, ""), ("sync_to_async", SAME, "")],
    "ray._private.profiling": [("profile", DIFFERENT, "does nothing")],
    "ray._private.worker": [
        ("global_worker", DIFFERENT, "mode, connected, namespace, node, the ids and gcs_client.address; other attributes are refused"), ("RemoteFunctionNoArgs", IMPORT, ""),
        ("logger", SAME, ""), ("print_to_stdstream", SAME, ""), ("print_worker_logs", SAME, ""),
    ],
    "ray._private.log_monitor": [
        ("LogMonitor", DIFFERENT, "finds no files: agents collect the output of workers"), ("LogFileInfo", IMPORT, ""), ("WORKER_LOG_PATTERN", SAME, ""),
        ("RUNTIME_ENV_SETUP_PATTERN", SAME, ""), ("RAY_RUNTIME_ENV_LOG_TO_DRIVER_ENABLED", SAME, ""), ("is_proc_alive", SAME, ""),
    ],
    "ray._private.utils": [("get_ray_doc_version", SAME, "")],
    "ray._private.client_mode_hook": [("is_client_mode_enabled", SAME, "False")],
    "ray._private.runtime_env.constants": [("RAY_JOB_CONFIG_JSON_ENV_VAR", SAME, "")],
}

OPTIONS = [
    ("num_cpus, num_gpus, memory, resources", SAME, "a request for what is busy or not there waits"),
    ("scheduling_strategy, placement_group, placement_group_bundle_index, placement_group_capture_child_tasks", SAME, ""),
    ("runtime_env", DIFFERENT, "as RuntimeEnv above"),
    ("object_store_memory", DIFFERENT, "accepted with a warning, as in Ray; nothing is reserved"),
    ("name, namespace, get_if_exists, lifetime", SAME, ""),
    ("max_concurrency, concurrency_groups", SAME, ""),
    ("num_returns", DIFFERENT, "numbers; \"streaming\" and \"dynamic\" are refused"),
    ("max_retries, retry_exceptions", SAME, "a task whose worker died runs again"),
    ("max_calls", DIFFERENT, "0 or 1; as in Ray a task with devices has a process of its own"),
    ("max_restarts, max_task_retries", SAME, ""),
]

COMMANDS = [
    ("ray start --head", DIFFERENT, "listens on loopback; with --node-ip-address of another interface on all, with TLS and a token"),
    ("ray start --address", DIFFERENT, "from another machine with TROUPE_TOKEN and TROUPE_FINGERPRINT set"),
    ("ray stop", SAME, "sessions and nodes of this user on this machine"),
    ("ray status", SAME, ""),
]

_INTRODUCTION = """# Programs written for Ray

`python -m troupe.ray SCRIPT`, or `-m MODULE`, runs a program written for Ray 2.60 on Troupe: `import ray` gives `troupe.ray`, in the program
and in all its processes, and a `ray` command is on PATH. `import troupe.ray as ray` does the same for one module. With `--adapter verl` or
`--adapter roll` before SCRIPT, worker groups of that framework are roles of Troupe: [adapters.md](adapters.md).

```python
import troupe.ray as ray

ray.init(num_cpus=4)

@ray.remote
def square(x):
    return x * x

print(ray.get([square.remote(i) for i in range(4)]))
```

What there is, is what training frameworks use. Everything else raises `NotImplementedError`, which names the nearest thing in Troupe.
*same*: as in Ray. *different*: the note says how. *import only*: the import succeeds, a use is refused.

Resources of these programs are counted by their own control service: roles of Troupe's own API on the same head do not see them, and the
other way round. Use a head of its own for each kind, or one of them without devices.

Environment variables of Ray that have an effect: RAY_ADDRESS, RAY_TMPDIR, RAY_OVERRIDE_RESOURCES (pretended devices),
RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1 (processes without GPUs see none; otherwise they see
those of the driver) and RAY_IGNORE_UNHANDLED_ERRORS (an error of a call whose reference is dropped unread is otherwise logged).

This page is made from the code: `python -m troupe.ray._names > docs/ray.md`.
"""


def rows() -> list[tuple[str, str, str, str]]:
    """Returns (module, name, status, note) for every name."""
    return [(module, *row) for module, names in NAMES.items() for row in names]


def _table(first: str, found: list[tuple[str, str, str]]) -> str:
    lines = [f"| {first} | status | note |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {status} | {note} |" for name, status, note in found])


def _refusals() -> list[tuple[str, str]]:
    from . import _options, util
    from .scripts import scripts
    from .util import state

    found = [(f"option `{name}`", instead) for name, instead in _options._NEAREST.items()]
    found += [(f"`ray.util.{name}`", instead) for name, instead in util._REFUSED.items()]
    found += [(f"`ray.util.state.{name}`", instead) for name, instead in state._REFUSED.items()]
    found += [(f"`ray {name}` on the command line", instead) for name, instead in scripts._REFUSED.items()]
    found += [
        ("`ray://` addresses (Ray Client)", 'init(address="HOST:PORT")'), ("`init(local_mode=True)`", "init()"), ("`init(job_config=…)`", "init(namespace=…, runtime_env=…)"),
        ('`num_returns="streaming"`', "a method that yields, which gives a troupe.ResultStream"), ("`ray.util.collective` but is_group_initialized", "torch.distributed"),
        ("`ray.util.multiprocessing.Pool`", "troupe.remote functions"), ("`ray.dag`", "troupe.Pipeline"), ("`put(_tensor_transport=…, _owner=…)`", "troupe.put"),
        ("`runtime_env` with conda, pip, uv, container, nsight", "an interpreter that has what is needed: py_executable"),
        ("`ray.data`, `ray.train`, `ray.tune`, `ray.serve`, `ray.rllib`", "troupe.Cluster and troupe.Pipeline"),
    ]  # fmt: skip
    return found


def document() -> str:
    """Returns the text of docs/ray.md."""
    from . import _session
    from .scripts import scripts

    parts = [_INTRODUCTION]
    for module, names in NAMES.items():
        parts.append(f"## {module}\n\n{_table('name', names)}\n")
    parts.append(f"## Options of actors and tasks\n\n{_table('options', OPTIONS)}\n")
    parts.append(f"## The ray command\n\n{_table('command', COMMANDS)}\n\nWithout effect: {', '.join(f'`{o}`' for o in scripts._WITHOUT_EFFECT)}.\n")
    parts.append(f"## Parameters of init without effect\n\n{', '.join(f'`{p}`' for p in sorted(_session._WITHOUT_EFFECT))}.\n")
    refused = "\n".join(f"| {what} | {instead} |" for what, instead in _refusals())
    parts.append(f"## Refused\n\n| what | nearest in Troupe |\n|---|---|\n{refused}\n")
    return "\n".join(parts)


def resolve(module: str, name: str) -> Any:
    """Returns the object of this package that a row names."""
    found = importlib.import_module(f"{__package__}{module[3:]}")
    return getattr(found, name)


if __name__ == "__main__":
    print(document(), end="")
