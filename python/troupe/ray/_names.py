"""The supported part of Ray's API: each name with its behaviour here. `python -m troupe.ray._names` prints docs/ray.md.

The tables of refused names and of ignored parameters come from the modules that refuse or ignore them.
"""

from __future__ import annotations

import importlib

SAME, DIFFERENT, IMPORT = "same", "different", "import only"

# By module: name, status, difference from Ray.
NAMES: dict[str, list[tuple[str, str, str]]] = {
    "ray": [
        (
            "init",
            DIFFERENT,
            "connects to the session that `address`, RAY_ADDRESS or a running `ray start --head` names, else starts "
            "one of its own; "
            "num_cpus, num_gpus and resources are pretended amounts; RAY_OVERRIDE_RESOURCES replaces them. Parameters "
            "without effect are listed below",
        ),
        ("shutdown", SAME, ""),
        ("is_initialized", SAME, ""),
        ("remote", SAME, "options below"),
        ("method", SAME, "num_returns, concurrency_group"),
        ("get", SAME, "values are copies of their own; large arrays are read-only, as in Ray"),
        ("put", SAME, "the value stays in the process that put it, and ends with it"),
        (
            "wait",
            DIFFERENT,
            "a large value of another host is ready when it exists there; with fetch_local it begins to come then",
        ),
        ("cancel", SAME, ""),
        ("kill", SAME, ""),
        ("get_actor", SAME, ""),
        ("get_gpu_ids", SAME, ""),
        ("get_runtime_context", SAME, "the methods that programs use; others are refused"),
        ("nodes", DIFFERENT, "ports and socket names that do not exist are 0 or made up"),
        ("cluster_resources", DIFFERENT, "without the CPU_group_… resources that stand for placement groups"),
        ("available_resources", DIFFERENT, "without the CPU_group_… resources that stand for placement groups"),
        (
            "timeline",
            DIFFERENT,
            "executions of tasks, methods and constructors, and sections, of processes that still run, from their "
            "flight recorders; "
            "without the events inside of a task and those of drivers. `troupe timeline` has more",
        ),
        ("ObjectRef", SAME, ""),
        (
            "ObjectRefGenerator",
            SAME,
            "of functions and methods that yield, async ones too. If the calling process dies, the generator is closed",
        ),
        ("DynamicObjectRefGenerator", SAME, ""),
        ("ActorID", SAME, ""),
        ("JobID", SAME, ""),
        ("NodeID", SAME, ""),
        ("PlacementGroupID", SAME, ""),
        ("TaskID", SAME, ""),
        ("UniqueID", SAME, ""),
        ("WorkerID", SAME, ""),
        ("WORKER_MODE", SAME, ""),
        ("SCRIPT_MODE", SAME, ""),
        ("LOCAL_MODE", SAME, "init(local_mode=True) is refused"),
        ("cloudpickle", SAME, "the installed cloudpickle"),
        ("__version__", SAME, "2.60.0"),
    ],
    "ray.actor": [
        ("ActorHandle", SAME, ""),
        ("ActorClass", SAME, ""),
        ("exit_actor", SAME, ""),
        ("ActorClassInheritanceException", SAME, ""),
    ],
    "ray.exceptions": [
        (name, SAME, "")
        for name in (
            "RayError",
            "RayTaskError",
            "RayActorError",
            "ActorDiedError",
            "ActorUnavailableError",
            "GetTimeoutError",
            "TaskCancelledError",
            "OwnerDiedError",
            "ObjectLostError",
            "WorkerCrashedError",
            "RaySystemError",
            "TaskPlacementGroupRemoved",
            "ActorPlacementGroupRemoved",
            "ActorUnschedulableError",
            "TaskUnschedulableError",
            "RuntimeEnvSetupError",
            "OutOfMemoryError",
            "NodeDiedError",
            "ObjectRefStreamEndOfStreamError",
            "RpcError",
        )
    ],
    "ray.runtime_env": [
        (
            "RuntimeEnv",
            DIFFERENT,
            "env_vars (without those that Troupe sets itself, TROUPE_…), working_dir (a folder) and py_executable; "
            "conda, pip, uv, container, nsight and remote archives are refused",
        )
    ],
    "ray.util": [
        (
            "placement_group",
            SAME,
            "topology_strategy by other labels than the node is refused",
        ),
        ("remove_placement_group", SAME, ""),
        ("get_placement_group", SAME, ""),
        ("placement_group_table", SAME, ""),
        ("get_current_placement_group", SAME, ""),
        ("PlacementGroup", SAME, ""),
        ("ActorGroup", SAME, ""),
        ("ActorPool", SAME, ""),
        ("list_named_actors", SAME, ""),
        ("get_node_ip_address", SAME, ""),
        ("as_completed", SAME, ""),
        ("map_unordered", SAME, ""),
        ("log_once", SAME, ""),
        ("inspect_serializability", SAME, "prints fewer lines, and looks into containers and attributes too"),
        ("get_node_instance_id", DIFFERENT, "always empty"),
    ],
    "ray.util.placement_group": [
        ("PlacementGroup", SAME, "ready(), wait(), id, bundle_specs, bundle_count"),
        ("placement_group", SAME, ""),
        ("remove_placement_group", SAME, ""),
        ("get_placement_group", SAME, ""),
        ("placement_group_table", SAME, ""),
        ("get_current_placement_group", SAME, ""),
        ("validate_placement_group", SAME, ""),
        ("check_placement_group_index", SAME, ""),
        ("VALID_PLACEMENT_GROUP_STRATEGIES", SAME, ""),
    ],
    "ray.util.scheduling_strategies": [
        ("PlacementGroupSchedulingStrategy", SAME, ""),
        ("NodeAffinitySchedulingStrategy", SAME, "without the private _spill_on_unavailable and _fail_on_unavailable"),
        ("NodeLabelSchedulingStrategy", SAME, ""),
        ("In", SAME, ""),
        ("NotIn", SAME, ""),
        ("Exists", SAME, ""),
        ("DoesNotExist", SAME, ""),
    ],
    "ray.util.queue": [("Queue", SAME, ""), ("Empty", SAME, ""), ("Full", SAME, "")],
    "ray.util.actor_pool": [("ActorPool", SAME, "")],
    "ray.util.actor_group": [("ActorGroup", SAME, "")],
    "ray.util.multiprocessing": [
        ("Pool", SAME, "each thread of the pool has an actor; arguments are sent with each call"),
        ("JoinableQueue", SAME, ""),
        ("TimeoutError", SAME, ""),
    ],
    "ray.util.joblib": [("register_ray", SAME, "")],
    "ray.util.accelerators": [("NVIDIA_H100", SAME, "and the other names; the option accelerator_type is refused")],
    "ray.util.annotations": [
        ("PublicAPI", SAME, ""),
        ("DeveloperAPI", SAME, ""),
        ("Deprecated", DIFFERENT, "does not warn"),
    ],
    "ray.util.metrics": [
        (
            name,
            DIFFERENT,
            "at `/metrics` of a head with `troupe up --metrics` or `ray start --head --metrics-export-port`, as ray_NAME "
            "with the tags, the namespace and the session of the process, within two seconds; elsewhere dropped",
        )
        for name in ("Counter", "Gauge", "Histogram")
    ],
    "ray.util.timer": [("_Timer", SAME, "")],
    "ray.util.collective": [("is_group_initialized", DIFFERENT, "always False: all other functions are refused")],
    "ray.util.state": [
        ("list_actors", SAME, ""),
        ("get_actor", SAME, ""),
        ("list_nodes", SAME, ""),
        ("get_node", SAME, ""),
        ("list_placement_groups", SAME, ""),
        ("get_placement_group", SAME, ""),
        ("summarize_actors", SAME, ""),
        ("list_tasks", DIFFERENT, "of the processes that run now, and the waiting ones of the calling process"),
        ("get_task", DIFFERENT, "as list_tasks"),
        ("summarize_tasks", DIFFERENT, "as list_tasks"),
        ("list_workers", DIFFERENT, "those that run now"),
        ("get_worker", DIFFERENT, "as list_workers"),
        ("list_objects", DIFFERENT, "by their owners"),
        ("get_objects", DIFFERENT, "as list_objects"),
        ("list_jobs", DIFFERENT, "always empty"),
    ],
    "ray.experimental.state.api": [
        ("get_actor", SAME, ""),
        ("list_actors", SAME, ""),
        ("list_nodes", SAME, ""),
        ("list_placement_groups", SAME, ""),
        ("list_tasks", DIFFERENT, "as in ray.util.state"),
        ("list_workers", DIFFERENT, "as in ray.util.state"),
        ("list_objects", DIFFERENT, "as in ray.util.state"),
    ],
    "ray.cluster_utils": [
        ("Cluster", DIFFERENT, "each node is an agent of its own on this machine"),
        ("cluster_not_supported", SAME, ""),
    ],
    "ray.dag": [
        ("InputNode", SAME, ""),
        ("MultiOutputNode", SAME, ""),
        ("DAGNode", SAME, "bind of functions, classes and methods; execute"),
        (
            "CompiledDAG",
            DIFFERENT,
            "of methods of actors that exist. Values go from actor to actor, through shared memory on a host and CUDA "
            "IPC on a device, whatever with_tensor_transport says; collectives, profiling and visualize are refused",
        ),
        ("DAGContext", DIFFERENT, "without the sizes of buffers, which are not needed"),
    ],
    "ray.experimental.compiled_dag_ref": [("CompiledDAGRef", SAME, ""), ("CompiledDAGFuture", SAME, "")],
    "ray.experimental.channel.communicator": [("Communicator", IMPORT, "")],
    "ray.experimental.channel.accelerator_context": [
        ("register_accelerator_context", DIFFERENT, "no effect: tensors go through CUDA IPC")
    ],
    "ray._raylet": [
        ("ObjectRef", SAME, ""),
        ("ObjectRefGenerator", SAME, ""),
        ("ObjectRefStreamEndOfStreamError", SAME, ""),
        ("PlacementGroupID", SAME, ""),
    ],
    "ray._private.accelerators": [
        (name, DIFFERENT, "counts the devices that the kernel shows; without the functions that set them")
        for name in (
            "NvidiaGPUAcceleratorManager",
            "AMDGPUAcceleratorManager",
            "IntelGPUAcceleratorManager",
            "NPUAcceleratorManager",
        )
    ],
    "ray._private.ray_logging": [("RAY_DEDUP_LOGS", DIFFERENT, "no effect: every line is printed")],
    "ray._private.state": [
        (
            "state",
            DIFFERENT,
            "placement_group_table, get_placement_group_by_name, node_table, actor_table and the resource functions",
        ),
        ("available_resources_per_node", SAME, ""),
        ("total_resources_per_node", SAME, ""),
        ("actors", SAME, ""),
        ("node_ids", SAME, ""),
    ],
    "ray._private.services": [("get_node_ip_address", SAME, "")],
    "ray._private.async_compat": [
        ("has_async_methods", SAME, ""),
        ("is_async_func", SAME, ""),
        ("sync_to_async", SAME, ""),
    ],
    "ray._private.profiling": [("profile", SAME, "")],
    "ray._private.worker": [
        (
            "global_worker",
            DIFFERENT,
            "mode, connected, namespace, node, the ids, gcs_client.address, and of core_worker the counts of objects and "
            "current_actor_is_asyncio; other attributes are refused",
        ),
        ("RemoteFunctionNoArgs", IMPORT, ""),
        ("logger", SAME, ""),
        ("print_to_stdstream", SAME, ""),
        ("print_worker_logs", SAME, ""),
        ("_wait_generators_bulk", SAME, ""),
    ],
    "ray._private.log_monitor": [
        ("LogMonitor", DIFFERENT, "finds no files: agents collect the output of workers"),
        ("LogFileInfo", IMPORT, ""),
        ("WORKER_LOG_PATTERN", SAME, ""),
        ("RUNTIME_ENV_SETUP_PATTERN", SAME, ""),
        ("RAY_RUNTIME_ENV_LOG_TO_DRIVER_ENABLED", SAME, ""),
        ("is_proc_alive", SAME, ""),
    ],
    "ray._private.utils": [("get_ray_doc_version", SAME, ""), ("get_ray_temp_dir", SAME, "")],
    "ray._common.network_utils": [
        (name, SAME, "") for name in ("build_address", "find_free_port", "is_localhost", "parse_address")
    ],
    "ray.util.state.exception": [("RayStateApiException", SAME, "")],
    "ray._private.client_mode_hook": [("is_client_mode_enabled", SAME, "False")],
    "ray._private.runtime_env.constants": [("RAY_JOB_CONFIG_JSON_ENV_VAR", SAME, "")],
}

OPTIONS = [
    (
        "num_cpus, num_gpus, memory, resources",
        SAME,
        "a request for what is busy or not there waits; if no node has it, a warning follows after five seconds",
    ),
    (
        "scheduling_strategy, placement_group, placement_group_bundle_index, placement_group_capture_child_tasks",
        SAME,
        "",
    ),
    (
        "label_selector, fallback_strategy",
        SAME,
        "labels of a node: `ray start --labels`, Cluster.add_node(labels=…), `troupe join --labels`",
    ),
    ("runtime_env", DIFFERENT, "as RuntimeEnv above"),
    ("object_store_memory", DIFFERENT, "accepted with a warning, as in Ray; nothing is reserved"),
    ("name, namespace, get_if_exists, lifetime", SAME, ""),
    ("max_concurrency, concurrency_groups", SAME, ""),
    (
        "num_returns, _generator_backpressure_num_objects",
        SAME,
        "a function that yields is streaming unless it says another number",
    ),
    ("max_retries, retry_exceptions", SAME, "a task whose worker died runs again"),
    ("max_calls", DIFFERENT, "0 or 1; as in Ray a task with devices has a process of its own"),
    ("max_restarts, max_task_retries", SAME, ""),
]

COMMANDS = [
    (
        "ray start --head",
        DIFFERENT,
        "listens on loopback; with --node-ip-address of another interface on all, with TLS and a token",
    ),
    (
        "ray start --address",
        DIFFERENT,
        "`ray start --head` prints the whole command, with TROUPE_TOKEN and TROUPE_FINGERPRINT",
    ),
    ("ray stop", SAME, "sessions and nodes of this user on this machine"),
    ("ray status", SAME, ""),
]

_INTRODUCTION = """# Programs written for Ray

`python -m troupe.ray SCRIPT`, or `-m MODULE`, runs a program written for Ray 2.60 on Troupe: `import ray` gives `troupe.ray`, in the program
and in all its processes, and a `ray` command is on PATH. `import troupe.ray as ray` does the same for one module. With `--adapter verl` or
`--adapter roll` before SCRIPT, worker groups of that framework are roles of Troupe: [adapters.md](adapters.md).

The wheel installs no `ray` command. For shell scripts that call `ray start` and `ray stop`, `python -m troupe.ray install-cli` puts one beside
the interpreter's other programs (into a virtual environment, say), `python -m troupe.ray install-cli FOLDER` into another folder of PATH. It
replaces no `ray` of another package; removing the file uninstalls it. Without it: `python -m troupe.ray.scripts start --head`.

```python
import troupe.ray as ray

ray.init(num_cpus=4)

@ray.remote
def square(x):
    return x * x

print(ray.get([square.remote(i) for i in range(4)]))
```

What there is, is what training frameworks use. Everything else raises `NotImplementedError`, which names the nearest thing in Troupe.
For an absent module (`import ray.data`, `from ray import tune`) that is an `ImportError` too, for an absent attribute an `AttributeError`,
so that programs which take a part of Ray to be optional go on without it; `importlib.util.find_spec("ray.tune")` gives None.
*same*: as in Ray. *different*: the note says how. *import only*: the import succeeds, a use is refused.

Devices, CPUs, memory and other resources of these programs are held in the books of the placement service, as those of Troupe's own roles are: on one
head no device is granted to both, and `troupe gpus`, `reservations` and `explain` show them by their jobs.

Environment variables of Ray that have an effect: RAY_ADDRESS, RAY_TMPDIR, RAY_OVERRIDE_RESOURCES (pretended devices),
RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1 (processes without GPUs see none; otherwise they see
those of the driver) and RAY_IGNORE_UNHANDLED_ERRORS (an error of a call whose reference is dropped unread is otherwise logged).

On a head that is shared, all these programs use the namespace `ray` of Troupe, or the one that TROUPE_NAMESPACE names. A team's credential
([security.md](security.md)) is for one namespace: `TROUPE_NAMESPACE=rl TROUPE_TOKEN_FILE=rl.token RAY_ADDRESS=nats://HOST:PORT python train.py`.

This page is made from the code: `python -m troupe.ray._names > docs/ray.md`.
"""

_CHECKED = """## Frameworks on Ray and on troupe.ray

`make frameworks GITS=DIR PYTHON=/path/to/python` runs programs and tests of frameworks on both, and prints what came out side by side. `DIR` holds their git
directories, `PYTHON` has Ray, torch and what they import; `python/tests/upstream/frameworks.json` says what is run, and of which commit. Nothing of them is in
this tree. On two cores that other work shared:

| framework | what | on Ray | on troupe.ray |
|---|---|---|---|
| slime (624b824a) | its placement group, training group (gloo), lock and train loop, with stand-ins for its engines | 16 of 16, 153 s | 16 of 16, 73 s; the same losses to the last digit |
| RLinf (a3816b59) | `test_placement.py`: placement of workers on nodes and devices | 38 of 38, 50 s | 38 of 38, 49 s |
"""


def rows() -> list[tuple[str, str, str, str]]:
    """Returns (module, name, status, note) for every name."""
    return [(module, *row) for module, names in NAMES.items() for row in names]


def _table(first: str, found: list[tuple[str, str, str]]) -> str:
    lines = [f"| {first} | status | note |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {status} | {note} |" for name, status, note in found])


def _refusals() -> list[tuple[str, str]]:
    from . import _options, _refused
    from .scripts import scripts

    found = [(f"option `{name}`", instead) for name, instead in _options._NEAREST.items()]
    found += [(f"`{name}`", instead) for name, instead in _refused.NEAREST.items()]
    found += [(f"`ray {name}` on the command line", instead) for name, instead in scripts._REFUSED.items()]
    imported = [
        *_refused.IMPORT_ONLY_MODULES,
        *(f"{m}.{n}" for m, names in _refused.IMPORT_ONLY.items() for n in names),
    ]
    found += [(f"use of `{name}`, which can be imported", _refused._nearest(name)) for name in imported]
    found += [
        ("`ray://` addresses (Ray Client)", 'init(address="HOST:PORT")'),
        ("`init(local_mode=True)`", "init()"),
        ("`init(job_config=…)`", "init(namespace=…, runtime_env=…)"),
        ("`ray.util.collective` but is_group_initialized", "torch.distributed"),
        ("`put(_tensor_transport=…, _owner=…)`", "troupe.put"),
        (
            "`runtime_env` with conda, pip, uv, container, nsight",
            "an interpreter that has what is needed: py_executable",
        ),
    ]
    return found


def document() -> str:
    """Returns the text of docs/ray.md."""
    from . import _session
    from .scripts import scripts

    parts = [_INTRODUCTION]
    for module, names in NAMES.items():
        parts.append(f"## {module}\n\n{_table('name', names)}\n")
    parts.append(f"## Options of actors and tasks\n\n{_table('options', OPTIONS)}\n")
    parts.append(
        f"## The ray command\n\n{_table('command', COMMANDS)}\n\nWithout effect: "
        f"{', '.join(f'`{o}`' for o in scripts._WITHOUT_EFFECT)}.\n"
    )
    parts.append(
        f"## Parameters of init without effect\n\n{', '.join(f'`{p}`' for p in sorted(_session._WITHOUT_EFFECT))}.\n"
    )
    refused = "\n".join(f"| {what} | {instead} |" for what, instead in _refusals())
    parts.append(_CHECKED)
    parts.append(f"## Refused\n\n| what | nearest in Troupe |\n|---|---|\n{refused}\n")
    return "\n".join(parts)


def resolve(module: str, name: str) -> object:
    """Returns the object of this package that a row names."""
    found = importlib.import_module(f"{__package__}{module[3:]}")
    return getattr(found, name)


if __name__ == "__main__":
    print(document(), end="")
