"""The control service: jobs, actors, actor names and handles, task workers, and, through _placement.py, resources.

One instance serves a session. Its methods run on one event loop, so its state needs no lock. Actor calls and tasks do not pass through it:
callers ask once for an actor's process or for a worker lease, and then call that process directly.

    PENDING ──resources──► STARTING ──constructor──► ALIVE ──kill, exit, last handle──► DEAD
       ▲└───────────────────────┴── error, kill ─────┼──────────────────────────────────►
       └── RESTARTING ◄── the process died, restarts are left ──┘
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from typing import Any

from .. import _core, _errors
from .._cluster import Cluster
from . import _groups, _ids, _placement

PENDING, STARTING, ALIVE, RESTARTING, DEAD = "PENDING_CREATION", "DEPENDENCIES_UNREADY", "ALIVE", "RESTARTING", "DEAD"

_IDLE_WORKERS = 1.0  # seconds an idle task worker is kept if there are more idle workers than CPUs
_IDLE_LONG = 60.0  # seconds the other idle task workers are kept
_EXPECTED = 10.0  # seconds allowed between the arrival of an actor's handle and of the request to create it
_TURN = 10.0  # seconds a call waits for an earlier call of the same caller that has not arrived
_DEATH_PATIENCE = 10.0  # seconds allowed for noticing the death of a process that a caller has lost
_REFRESH = 0.5  # seconds between refreshes of the node list
_NODE_PATIENCE = 2.0  # seconds allowed for noticing the death of a node that failed to start a process
_DEAD_KEPT = 10_000  # number of dead actors to remember

class Actor:
    def __init__(self, actor_id: str, spec: dict[str, Any]) -> None:
        self.id = actor_id
        self.spec = spec  # as built by actor._create; the reason of its death is added to it
        self.state = PENDING
        group = spec.get("group")  # the name of the actor group, and the actor's rank in it
        self.role = _ids.process_name(*group) if group else f"actor-{actor_id}"  # role of the current process; each restart gets a new one
        self.restarted = 0
        self.exiting = ""  # reason of an intentional exit; such an actor is not restarted
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when the current process has ended
        self.cluster: Any = None
        self.cause: list[Any] | None = None  # frame of the exception that callers receive
        self.node_id = ""
        self.pid = 0
        self.started = 0.0
        self.holders: dict[str, int] = {}  # number of handles, by process
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when the actor is ALIVE or DEAD
        self.task: asyncio.Task[None] | None = None
        self.kill_reason = ""


class Worker:
    """A process that runs tasks."""

    def __init__(self, id: str, key: str, node_id: str) -> None:
        self.id, self.key, self.node_id = id, key, node_id
        self.role = f"worker-{id}"
        self.cluster: Any = None
        self.idle_since = 0.0
        self.lease = ""
        self.spent = False  # whether the worker accepts no more tasks
        self.dead = False


class Control:
    """The control service. Other processes call its public methods."""

    def __init__(self) -> None:
        self._placement = _placement.Placement()
        self._jobs: dict[str, dict[str, Any]] = {}
        self._actors: dict[str, Actor] = {}
        self._names: dict[tuple[str, str], str] = {}  # actor ids, by (namespace, name)
        self._workers: dict[str, Worker] = {}
        self._leases: dict[str, Worker] = {}
        self._leasing: dict[str, asyncio.Task[Any]] = {}
        self._processes: dict[str, str] = {}  # job ids, by process name
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._beside = False
        self._declared: dict[str, Any] = {}
        self._address = ""
        self._refresher: asyncio.Task[None] | None = None
        self._awaited: dict[str, tuple[asyncio.Future[None], dict[str, int]]] = {}  # actors not created yet: creation future and handle counts, by id
        self._groups: dict[str, _groups.Group] = {}  # actor groups being formed or broken up, by name
        self._turns: dict[str, dict[Any, Any]] = {}  # by caller, the number of its next call and the futures of calls waiting for their turn

    async def ask(self, caller: str, number: int, method: str, *args: Any) -> Any:
        """Calls a method of this object. The calls of one caller start in the order of their numbers, which begin at 0."""
        if not self._beside:
            self._stay_beside()
        turns = self._turns.setdefault(caller, {"next": 0})
        if number != turns["next"]:
            turns[number] = asyncio.get_running_loop().create_future()
            await asyncio.wait([turns[number]], timeout=_TURN)
            turns.pop(number, None)
        turns["next"] = max(turns["next"], number + 1)
        waiting = turns.get(number + 1)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
        return await getattr(self, method)(*args)

    def _stay_beside(self) -> None:
        """Directs this thread's completions to the side queue, so that they wake no thread of this process that waits for an answer."""
        self._beside = True
        _core.get().stay_beside()

    # Jobs.

    async def register_job(self, job: dict[str, Any]) -> dict[str, Any]:
        """Registers the job of a driver: its process name, directory, environment and search path, and, if the driver started the session,
        the resources that it declares."""
        job_id = f"{len(self._jobs) + 1:02x}000000"
        self._jobs[job_id] = job
        self._processes[job["process"]] = job_id
        self._spawn(self._watch_driver(job_id, job["process"]))
        if not self._placement.nodes:
            await self.refresh_nodes(job.get("resources"), job.get("node_ip") or "")
        else:
            await self.refresh_nodes()
        nodes = list(self._placement.nodes.values())
        return {"job_id": job_id, "node_id": nodes[0].node_id, "node_ip": nodes[0].address, "node": nodes[0].name}

    async def _watch_driver(self, job_id: str, process: str) -> None:
        """Ends the job of a driver that disappears without ending it."""
        from .._future import Asked
        from .._session import current

        session = current(start=False)
        try:
            fields = await Asked(session.core, "attach", runtime=session.id, name=process)
            cluster = Cluster.__new__(Cluster)
            cluster._setup(session, fields)
            await cluster.died()
        except _errors.Error:
            pass
        await self.end_job(job_id)

    async def refresh_nodes(self, declared: dict[str, Any] | None = None, address: str = "") -> None:
        """Updates the nodes from the head's list, immediately and from then on every _REFRESH seconds. declared: resources that the first
        node claims to have."""
        if not self._beside:
            self._stay_beside()
        if declared is not None:
            self._declared, self._address = declared, address
        await self._refresh()
        if self._refresher is None:
            self._refresher = self._spawn(self._refresh_on())

    async def _refresh_on(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH)
            try:
                await self._refresh()
            except _errors.Error:
                pass  # the head is unreachable; a later refresh may succeed

    async def _refresh(self) -> None:
        from .._session import current
        from ._heads import IP_LABEL

        session = current(start=False)
        rows = await session.core.ask("nodes", runtime=session.id).aget()
        there = sorted((n for n in rows if n["rank"] >= 0 and n["state"] != "lost"), key=lambda n: n["rank"])
        if not there and self._placement.nodes:
            return  # a head that has just restarted lists no nodes yet
        first = next(iter(self._placement.nodes.values()), None)
        found = []
        for node in there:
            head = node is there[0] if first is None else node["node"] == first.name
            address = (node["labels"] or {}).get(IP_LABEL) or self._address or "127.0.0.1"
            total = _placement.totals(node, address, head, self._declared if head else None)
            found.append({"name": node["node"], "address": address, "total": total})
        self._end_keys(self._placement.rpc_refresh(found).pop("kill"), _NODE_DIED)

    async def end_job(self, job_id: str) -> None:
        """Ends a job: everything that its driver and workers created, except detached actors."""
        for process in [p for p, j in self._processes.items() if j == job_id]:
            self._processes.pop(process, None)
            self._turns.pop(process, None)
            self._end_keys(self._placement.owner_ended(process), _GROUP_REMOVED)
        for actor in list(self._actors.values()):
            if actor.spec["job"] == job_id and not actor.spec["detached"] and actor.state != DEAD:
                self._end_actor(actor, "The actor is dead because its owner has died: the job has finished.")
        for worker in [w for w in self._workers.values() if w.key.startswith(job_id)]:
            self._end_worker(worker)
        for name in [n for n in self._groups if n.startswith(job_id)]:
            self._groups.pop(name).break_up()

    # Actors.

    async def create_actor(self, actor_id: str, spec: dict[str, Any], process: str) -> dict[str, Any]:
        """Registers an actor and starts it. If the name is taken, returns the existing actor with get_if_exists, and a refusal without."""
        name = spec.get("name")
        if name:
            key = (spec["namespace"], name)
            there = self._names.get(key)
            if there is not None:
                if spec.get("get_if_exists") and self._actors[there].state != DEAD:
                    return {"existing": self._descriptor(self._actors[there])}
                return {"taken": True}
            self._names[key] = actor_id
        actor = self._actors[actor_id] = Actor(actor_id, spec)
        waited = self._awaited.pop(actor_id, None)
        if waited is not None:
            actor.holders.update(waited[1])
            waited[0].set_result(None)
        actor.holders[process] = actor.holders.get(process, 0) + 1
        actor.task = self._spawn(self._start_actor(actor))
        self._forget_dead()
        return {}

    async def _start_actor(self, actor: Actor) -> None:
        role, ended = actor.role, actor.ended
        try:
            allocation = await self._placement.acquire(actor.id, actor.spec["demand"], actor.spec["strategy"])
            if actor.state == DEAD:
                self._placement.release(actor.id)
                return
            actor.state, actor.node_id = STARTING, allocation.node_id
            devices = {k: v for k, v in allocation.devices.items() if v}
            assigned = {"kind": actor.spec["kind"], "groups": actor.spec["groups"], "actor_id": actor.id, "actor_name": actor.spec.get("name") or "",
                        "class_name": actor.spec["class_name"], "placement": actor.spec.get("captures"), "demand": actor.spec["demand"],
                        "namespace": actor.spec["namespace"], "restarted": actor.restarted}  # fmt: skip
            process = self._process(actor.spec["job"], actor.spec["env"], allocation, devices, assigned)
            cluster = await self._joined(actor, process)
            if cluster is None and actor.state != DEAD:
                role = actor.role
                cluster = await self._create_role(role, [process])
            if cluster is None:
                return
            if actor.state == DEAD or actor.role != role:
                self._spawn(self._destroy(cluster))
                return
            actor.cluster = cluster
            self._processes[role] = actor.spec["job"]
            self._spawn(self._watch_actor(actor, role, cluster))
            handle = cluster.workers[0]
            kind, frame = await handle["construct"].remote(*actor.spec["construct"])
            if actor.role != role:
                return
            if kind == "error":
                actor.cause = frame
                self._end_actor(actor, "")
                return
            actor.pid = frame
        except asyncio.CancelledError:
            raise
        except _placement.Unschedulable as err:
            from . import _objects, exceptions

            kind = exceptions.ActorPlacementGroupRemoved if isinstance(err, _placement.GroupRemoved) else exceptions.ActorUnschedulableError
            actor.cause = _objects._dump_error(kind(str(err)))
            self._end_actor(actor, str(err))
            return
        except Exception as err:
            await asyncio.wait([ended], timeout=_DEATH_PATIENCE if actor.cluster is not None else _NODE_PATIENCE)  # _watch_actor reports the reason
            if actor.role == role:
                self._end_actor(actor, actor.kill_reason or f"The actor died because it could not be started: {err}")
            return
        if actor.state == DEAD or actor.role != role:
            return
        if actor.spec.get("group"):
            self._groups.pop(actor.spec["group"][0], None)
        actor.state, actor.started = ALIVE, time.time()
        if not actor.spec["restarts"]:
            actor.spec["construct"] = None
        if not actor.settled.done():
            actor.settled.set_result(None)
        if not actor.holders and not actor.spec["detached"]:
            self._end_actor(actor, _OUT_OF_SCOPE)

    async def _joined(self, actor: Actor, process: _groups.Process) -> _groups.Rank | None:
        """Returns the actor's rank in the role of its group; None if it has no group or the group was broken up."""
        if not actor.spec.get("group"):
            return None
        name, rank = actor.spec["group"]
        found: _groups.Rank | None = await self._group(name).join(rank, process)
        if found is None:
            actor.spec["group"], actor.role = None, f"actor-{actor.id}"
        return found

    def _group(self, name: str) -> _groups.Group:
        return self._groups.setdefault(name, _groups.Group(name, self._create_role))

    async def group_size(self, name: str, size: int) -> None:
        """Sets the size of a group, once all its actors have been created."""
        self._group(name).set_size(size)

    async def _watch_actor(self, actor: Actor, role: str, cluster: Any) -> None:
        """Waits until an actor's process ends, and handles it."""
        detail = ""
        try:
            if (err := (await cluster.died()).error) is not None:
                raise err
        except _errors.Error as err:
            exit_code = getattr(err, "exit_code", None)
            number = getattr(err, "signal", None)
            detail = f"exit code {exit_code}" if exit_code is not None else f"signal {number}" if number else str(err)
        kind = "INTENDED_USER_EXIT" if actor.exiting else "SYSTEM_ERROR"
        reason = f"The actor is dead because its worker process has died. Worker exit type: {kind} Worker exit detail: {actor.exiting or detail}"
        self._process_lost(actor, role, actor.kill_reason or reason)

    def _process_lost(self, actor: Actor, role: str, reason: str) -> None:
        """Handles the death of an actor's process: restarts the actor if restarts are left, otherwise marks it dead."""
        if actor.state == DEAD or actor.role != role:
            return
        left = actor.spec["restarts"]
        if reason == _NODE_DIED and actor.state in (PENDING, STARTING, RESTARTING):
            left = left + 1 if left >= 0 else left  # not charged as a restart: the actor had not started, so another node takes it
        if actor.exiting or not left or actor.cause is not None or not (actor.holders or actor.spec["detached"]):
            self._end_actor(actor, reason, crashed=not actor.exiting)
            return
        actor.spec["restarts"] = left - 1 if left > 0 else left
        actor.restarted += 1
        old, actor.cluster, actor.kill_reason = actor.cluster, None, ""
        actor.role = f"actor-{actor.id}-{actor.restarted}"
        if actor.settled.done():
            actor.settled = asyncio.get_running_loop().create_future()
        actor.state = RESTARTING
        ended, actor.ended = actor.ended, asyncio.get_running_loop().create_future()
        ended.set_result(None)
        self._end_process(role)
        actor.task = self._spawn(self._restart_actor(actor, old))

    async def _restart_actor(self, actor: Actor, old: Any) -> None:
        if old is not None:
            await self._destroy(old)
        self._placement.release(actor.id)
        await self._start_actor(actor)

    async def actor_exits(self, actor_id: str, why: str) -> None:
        """Records that an actor's process exits intentionally."""
        if actor_id in self._actors:
            self._actors[actor_id].exiting = why

    def _free_name(self, actor: Actor) -> None:
        key = (actor.spec["namespace"], actor.spec.get("name") or "")
        if self._names.get(key) == actor.id:
            del self._names[key]

    def _end_actor(self, actor: Actor, reason: str, crashed: bool = False) -> None:
        """Marks an actor dead: frees its resources, ends its process, and gives callers the reason. Also frees its name, except that the
        name of a crashed actor stays taken until its last handle is dropped."""
        if actor.state == DEAD:
            return
        if actor.cause is None:
            from . import _objects, exceptions

            name = actor.spec["class_name"]
            error = exceptions.ActorDiedError(f"The actor {name} (ActorID {actor.id}) died unexpectedly before finishing this task. {reason}", None, actor.id)
            actor.cause = _objects._dump_error(error)
        was, actor.state = actor.state, DEAD
        actor.spec["reason"] = reason
        if not crashed or not actor.holders or actor.spec["detached"]:
            self._free_name(actor)
        for future in (actor.settled, actor.ended):
            if not future.done():
                future.set_result(None)
        if actor.spec.get("group") and actor.cluster is None:
            self._group(actor.spec["group"][0]).break_up()
        if was in (PENDING, RESTARTING) and actor.task is not None:
            actor.task.cancel()
        if actor.cluster is not None:
            self._spawn(self._kill_role(actor))
        else:
            self._placement.release(actor.id)
        self._end_process(actor.role)

    async def _kill_role(self, actor: Actor) -> None:
        await self._destroy(actor.cluster, gentle=actor.spec.get("reason") == _OUT_OF_SCOPE)
        self._placement.release(actor.id)

    def _end_process(self, process: str) -> None:
        """Handles the end of a process: drops its handles and ends the actors it created."""
        self._processes.pop(process, None)
        self._turns.pop(process, None)
        self._end_keys(self._placement.owner_ended(process), _GROUP_REMOVED)
        for actor in list(self._actors.values()):
            if actor.state == DEAD and actor.holders.pop(process, None) is not None and not actor.holders:
                self._free_name(actor)
            if actor.state == DEAD or actor.spec["detached"]:
                continue
            if actor.spec["owner"] == process:
                self._end_actor(actor, "The actor is dead because its owner has died.")
            elif actor.holders.pop(process, None) is not None and not actor.holders:
                self._out_of_scope(actor)

    async def _expected(self, actor_id: str) -> Actor | None:
        """Waits for an actor whose handle arrived before the request to create it."""
        if actor_id not in self._awaited:
            self._awaited[actor_id] = (asyncio.get_running_loop().create_future(), {})
        await asyncio.wait([self._awaited[actor_id][0]], timeout=_EXPECTED)
        if actor_id not in self._actors:
            self._awaited.pop(actor_id, None)
        return self._actors.get(actor_id)

    async def actor_info(self, actor_id: str) -> dict[str, Any]:
        """Waits until the actor has started or died and returns {"role", "restarts"}, or {"dead": frame of the exception}, with None as the
        frame if it is unknown."""
        actor = self._actors.get(actor_id) or await self._expected(actor_id)
        if actor is None:
            return {"dead": None}
        if actor.state not in (ALIVE, DEAD):
            await asyncio.shield(actor.settled)
        if actor.state == DEAD:
            return {"dead": actor.cause}
        return {"role": actor.role, "restarts": bool(actor.spec["restarts"])}

    async def actor_lost(self, actor_id: str, role: str, patience: float | None = _DEATH_PATIENCE) -> dict[str, Any]:
        """Waits for the end of the actor's process of that role and returns {"dead": frame of the exception} or {"restarts": True}; {} if
        the process is still alive after patience seconds. patience None: waits without limit."""
        actor = self._actors.get(actor_id)
        if actor is None:
            return {"dead": None}
        if actor.state != DEAD and actor.role == role:
            await asyncio.wait([actor.ended], timeout=patience)
        return {"dead": actor.cause} if actor.state == DEAD else {"restarts": True} if actor.role != role else {}

    async def actor_state(self, actor_id: str) -> str:
        actor = self._actors.get(actor_id)
        return DEAD if actor is None else actor.state

    async def actor_handle(self, actor_id: str) -> dict[str, Any] | None:
        actor = self._actors.get(actor_id)
        return None if actor is None else self._descriptor(actor)

    async def named_actor(self, namespace: str, name: str) -> dict[str, Any] | None:
        found = self._names.get((namespace, name))
        return None if found is None or self._actors[found].state == DEAD else self._descriptor(self._actors[found])

    def _descriptor(self, actor: Actor) -> dict[str, Any]:
        return {"handle": actor.spec["handle"], "actor_id": actor.id}

    async def named_actors(self, namespace: str | None) -> list[list[str]]:
        return [[ns, name] for (ns, name), id in self._names.items() if (namespace is None or ns == namespace) and self._actors[id].state != DEAD]

    async def actors(self) -> list[dict[str, Any]]:
        return [
            {"actor_id": a.id, "class_name": a.spec["class_name"], "state": a.state, "name": a.spec.get("name") or "", "job_id": a.spec["job"],
             "node_id": a.node_id, "pid": a.pid, "ray_namespace": a.spec["namespace"], "death_cause": a.spec.get("reason"), "is_detached": a.spec["detached"],
             "required_resources": a.spec["demand"], "num_restarts": a.restarted}
            for a in self._actors.values()
        ]  # fmt: skip

    async def handle_taken(self, actor_id: str, process: str) -> None:
        """Counts a new handle of a process."""
        actor = self._actors.get(actor_id)
        if actor is None:
            waited = self._awaited.setdefault(actor_id, (asyncio.get_running_loop().create_future(), {}))
            waited[1][process] = waited[1].get(process, 0) + 1
            await self._expected(actor_id)
        elif actor.state != DEAD:
            actor.holders[process] = actor.holders.get(process, 0) + 1

    async def handle_dropped(self, actor_id: str, process: str) -> None:
        """Removes a handle of a process; the last one ends the actor."""
        actor = self._actors.get(actor_id)
        if actor is None or process not in actor.holders:
            return
        actor.holders[process] -= 1
        if actor.holders[process] <= 0:
            del actor.holders[process]
        if actor.holders:
            return
        if actor.state == DEAD:
            self._free_name(actor)
        elif not actor.spec["detached"]:
            self._out_of_scope(actor)

    def _out_of_scope(self, actor: Actor) -> None:
        """Ends an actor without handles. An actor under construction ends only afterwards, because its constructor may have effects."""
        if actor.state in (ALIVE, PENDING, RESTARTING):
            self._end_actor(actor, _OUT_OF_SCOPE)

    async def kill_actor(self, actor_id: str, no_restart: bool = True) -> Any:
        """Kills an actor, or with no_restart=False only its process, so that the actor restarts if restarts are left. Returns the frame of
        the exception for its callers if the actor is dead."""
        actor = self._actors.get(actor_id)
        if actor is None:
            return None
        if actor.state == DEAD:
            self._free_name(actor)
            return actor.cause
        actor.kill_reason = "The actor is dead because it was killed by `ray.kill`."
        if not no_restart:
            if actor.cluster is not None:
                self._process_lost(actor, actor.role, actor.kill_reason)
            return None
        self._end_actor(actor, actor.kill_reason)
        return actor.cause

    def _forget_dead(self) -> None:
        if len(self._actors) > _DEAD_KEPT:
            for old in [a for a in self._actors.values() if a.state == DEAD][: _DEAD_KEPT // 10]:
                del self._actors[old.id]

    # Task workers.

    async def lease(self, lease_id: str, job_id: str, demand: dict[str, float], strategy: Any, env: dict[str, Any], captures: Any) -> dict[str, Any]:
        """Leases a task worker with these resources; waits until they are free and the worker has started."""
        task = asyncio.current_task()
        assert task is not None
        self._leasing[lease_id] = task
        try:
            allocation = await self._placement.acquire(lease_id, demand, strategy)
        except asyncio.CancelledError:
            return {"cancelled": True}
        except _placement.Unschedulable as err:
            from . import _objects, exceptions

            kind = exceptions.TaskPlacementGroupRemoved if isinstance(err, _placement.GroupRemoved) else exceptions.TaskUnschedulableError
            return {"error": str(err), "unschedulable": _objects._dump_error(kind(str(err)))}
        finally:
            self._leasing.pop(lease_id, None)
        try:
            worker = await self._idle_worker(job_id, env, allocation, captures)
        except BaseException as err:
            self._placement.release(lease_id)
            if isinstance(err, Exception):
                return {"error": str(err)}
            raise
        worker.lease = lease_id
        self._leases[lease_id] = worker
        return {"role": worker.role, "devices": allocation.devices, "node_id": allocation.node_id}

    async def cancel_lease(self, lease_id: str) -> None:
        """Withdraws a lease request that is still waiting."""
        task = self._leasing.get(lease_id)
        if task is not None:
            task.cancel()

    async def _idle_worker(self, job_id: str, env: dict[str, Any], allocation: Any, captures: Any) -> Worker:
        devices = sorted(name for name, ids in allocation.devices.items() if ids)  # a worker that has had devices takes no tasks without
        key = job_id + hashlib.sha1(json.dumps([env, allocation.node_id, devices], sort_keys=True).encode()).hexdigest()
        for worker in reversed(list(self._workers.values())):
            if worker.key == key and not worker.lease and not worker.dead and not worker.spent and worker.cluster is not None:
                return worker
        worker = Worker(os.urandom(14).hex(), key, allocation.node_id)
        worker.lease = "starting"
        self._workers[worker.id] = worker
        assigned: dict[str, Any] = {"kind": "task", "groups": {}, "worker_id": worker.id, "placement": None}
        try:
            worker.cluster = await self._create_role(worker.role, [self._process(job_id, env, allocation, {}, assigned)])
        except BaseException:
            self._workers.pop(worker.id, None)
            raise
        self._processes[worker.role] = job_id
        self._spawn(self._watch_worker(worker))
        if self._reaper is None:
            self._reaper = self._spawn(self._reap())
        return worker

    async def _watch_worker(self, worker: Worker) -> None:
        try:
            await worker.cluster.died()
        except _errors.Error:
            pass
        self._end_worker(worker)

    def _end_worker(self, worker: Worker) -> None:
        if worker.dead:
            return
        worker.dead = True
        self._workers.pop(worker.id, None)
        if worker.lease in self._leases:
            del self._leases[worker.lease]
            self._placement.release(worker.lease)
        self._end_process(worker.role)
        if worker.cluster is not None:
            self._spawn(self._destroy(worker.cluster))

    async def end_lease(self, lease_id: str, spent: bool = False) -> None:
        """Returns the worker of a lease; spent: its process ends."""
        worker = self._leases.pop(lease_id, None)
        if worker is not None:
            worker.lease, worker.idle_since, worker.spent = "", time.monotonic(), spent
            self._placement.release(lease_id)
            if spent:
                self._spawn(self._retire(worker))

    async def suspend(self, lease_id: str) -> None:
        if lease_id in self._leases:
            self._placement.suspend(lease_id)

    async def resume(self, lease_id: str) -> None:
        if lease_id in self._leases:
            self._placement.resume(lease_id)

    async def _reap(self) -> None:
        """Ends workers that have been idle for too long."""
        while True:
            await asyncio.sleep(_IDLE_WORKERS)
            now = time.monotonic()
            idle = sorted((w for w in self._workers.values() if not w.lease and w.cluster is not None), key=lambda w: -w.idle_since)
            kept = max(1, int(sum(n.total.get("CPU", 0) for n in self._placement.nodes.values())))
            kept = min(kept, os.cpu_count() or 1)
            for i, worker in enumerate(idle):
                if now - worker.idle_since > (_IDLE_LONG if i < kept else _IDLE_WORKERS) or worker.spent:
                    await self._retire(worker)

    async def _retire(self, worker: Worker) -> None:
        """Ends an idle worker, unless other processes need its objects or actors created by its tasks are alive."""
        if any(a.spec["owner"] == worker.role and a.state != DEAD and not a.spec["detached"] for a in self._actors.values()):
            return
        try:
            if await worker.cluster.workers[0]["owns"].remote():
                return
        except _errors.Error:
            pass  # _watch_worker handles its death
        if not worker.lease:
            self._end_worker(worker)

    # Resources.

    async def placement(self, method: str, *args: Any) -> Any:
        """Calls rpc_<method> of the placement, which may be async. If the result has {"kill": [keys]}, ends the actors and leases with
        these keys."""
        result = getattr(self._placement, "rpc_" + method)(*args)
        if hasattr(result, "__await__"):
            result = await result
        if isinstance(result, dict):
            self._end_keys(result.pop("kill", ()), _GROUP_REMOVED)
        return result

    def _end_keys(self, keys: Any, reason: str) -> None:
        """Ends the actors and leases that held these resources. If their node died, actors may restart."""
        for key in keys:
            if key in self._actors and reason == _NODE_DIED:
                self._process_lost(self._actors[key], self._actors[key].role, reason)
            elif key in self._actors:
                self._end_actor(self._actors[key], reason)
            elif key in self._leases:
                self._end_worker(self._leases[key])

    # Roles.

    def _process(self, job_id: str, env: dict[str, Any], allocation: Any, devices: dict[str, list[str]], assigned: dict[str, Any]) -> _groups.Process:
        """Describes a process for an actor or for tasks, on the node of the allocation."""
        job = self._jobs[job_id]
        variables = {**job["env"], **env.get("env_vars", {})}
        if devices.get("GPU") and "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" not in variables:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices["GPU"])
        elif job["visible_devices"] is not None:
            variables.setdefault("CUDA_VISIBLE_DEVICES", job["visible_devices"])
        if not devices.get("GPU") and assigned["kind"] != "task" and variables.get("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1") != "0":
            variables.setdefault("CUDA_VISIBLE_DEVICES", "")
        program = {"job": job_id, "executable": env.get("py_executable") or job["executable"], "dir": env.get("working_dir") or job["dir"],
                   "kind": assigned["kind"], "groups": assigned["groups"]}  # fmt: skip
        fields = {**assigned, "devices": devices, "node_id": allocation.node_id, "node_ip": self._placement.nodes[allocation.node_id].address, "env": env}
        return _groups.Process(allocation.node, program, variables, fields)

    async def _create_role(self, name: str, processes: list[_groups.Process]) -> Any:
        """Starts a role whose ranks are these processes."""
        from .._session import current

        session = current(start=False)
        program = processes[0].program
        job = self._jobs[program["job"]]
        config = {
            "ray": {"ranks": [p.fields for p in processes], "job_id": program["job"], "job_process": job["process"], "troupe_ray": job["troupe_ray"],
                    "address": job["address"], "control": self.role, "job_namespace": job["namespace"]},
            "driver": session.session, "pickle": True, "sys_path": job["sys_path"], "python": job["python"], "troupe": job["package"], "shipped": False,
        }  # fmt: skip
        spec = {
            "name": name, "class": "ray", "world": len(processes), "mesh": {"tp": 1, "pp": 1, "cp": 1, "dp": 0}, "config": config,
            "command": [program["executable"], "-m", "troupe.ray._process"],
            "dir": program["dir"], "queue_limit": 1_000_000,
            "ordered": False, "detached": False, "start_timeout": 0.0, "stop_grace": 0.0, "own_variables": True, "policy": "ignore" if len(processes) > 1 else "", "restarts": 0,
            "strategy": "", "bundles": [{"node": p.node} for p in processes],
            **({"env": processes[0].variables} if len(processes) == 1 else {"rank_env": [p.variables for p in processes]}),
            **job["fork"],
        }  # fmt: skip
        fields = await session.core.ask("create", runtime=session.id, spec=spec).aget()
        cluster = Cluster.__new__(Cluster)
        cluster._setup(session, fields)
        return cluster

    async def _destroy(self, cluster: Any, gentle: bool = False) -> None:
        """Ends a role: asks its process to exit, waits for that if gentle, then destroys the role."""
        if isinstance(cluster, _groups.Rank):
            await cluster.end(gentle)
            return
        try:
            gone = cluster.workers[0]["exit"].remote(gentle)
            if gentle:
                await _ended(gone)
            await cluster._core.ask("destroy", cluster=cluster._open()._id).aget()
        except _errors.Error:
            pass

    role = "ray-control"

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _ended(call: Any) -> None:
    """Waits until a call fails because its process has exited, after running its exit functions, or until their time is up."""
    try:
        await asyncio.wait_for(call, _groups.GENTLE_EXIT)
    except (_errors.Error, asyncio.TimeoutError):
        pass


_GROUP_REMOVED = "The actor is dead because its worker process was ended: its placement group was removed."
_NODE_DIED = "The actor died because its node has died."
_OUT_OF_SCOPE = "The actor is dead because all references to the actor were removed."
