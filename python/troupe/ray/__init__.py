"""Ray's API on Troupe: `import troupe.ray as ray`, or `python -m troupe.ray SCRIPT` for programs that say `import ray`.

Modules, and what is in each:
    __init__, _session      init, shutdown, namespaces, implicit init
    _state                  the current session; control_call and control_async ask the control service
    _control                the service that knows jobs, actors, names, handles, workers of tasks
    _placement              resources of nodes, placement groups, which request runs where
    _objects                ObjectRef, get, put, wait, cancel; Promise: a reference whose value is set later
    _host                   the process of an actor or of a worker for tasks
    actor, remote_function  decorated classes and functions, handles
    _options                options and their validation; refuse() makes the error of what is not supported
    exceptions, runtime_context, runtime_env, _ids
    util, cluster_utils, _private, experimental, _raylet, scripts      ray.util and the rest
"""
