"""The control service: jobs, actors and their names, handles, workers for tasks, and through _placement.py the resources.

One object serves a session; its methods run on one event loop, so its state needs no lock. Calls of actors and tasks do not pass
here: callers ask once where an actor is, or for the lease of a worker, and then call it themselves.

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

_IDLE_WORKERS = 1.0  # seconds that a worker for tasks without work is kept beyond the number of CPUs
_IDLE_LONG = 60.0  # and up to that number
_EXPECTED = 10.0  # seconds in which the request of a creator comes after a handle of the actor
_TURN = 10.0  # seconds that a call waits for an earlier one of its caller that does not come
_DEATH_PATIENCE = 10.0  # seconds in which the end of a process is seen that a caller has lost
_REFRESH = 0.5  # seconds between two looks at the nodes
_NODE_PATIENCE = 2.0  # seconds in which the end of a node is seen that could start no process
_DEAD_KEPT = 10_000  # dead actors that are remembered

class Actor:
    def __init__(self, actor_id: str, spec: dict[str, Any]) -> None:
        self.id = actor_id
        self.spec = spec  # job, name, namespace, detached, demand, strategy, env, class_name, construct, groups, kind, handle, restarts, group
        self.state = PENDING
        group = spec.get("group")  # its name and the rank in it
        self.role = _ids.process_name(*group) if group else f"actor-{actor_id}"  # of the process; a restart has another
        self.restarted = 0
        self.exiting = ""  # why the process ends on purpose, which is no reason to restart it
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the process of this role
        self.cluster: Any = None
        self.cause: list[Any] | None = None  # the frame of the exception that callers get
        self.node_id = ""
        self.pid = 0
        self.started = 0.0
        self.holders: dict[str, int] = {}  # handles by process
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # ALIVE or DEAD
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
        self.spent = False  # runs no more tasks
        self.dead = False


class Control:
    """The methods of this class are what other processes ask for."""

    def __init__(self) -> None:
        self._placement = _placement.Placement()
        self._jobs: dict[str, dict[str, Any]] = {}
        self._actors: dict[str, Actor] = {}
        self._names: dict[tuple[str, str], str] = {}  # (namespace, name): actor id
        self._workers: dict[str, Worker] = {}
        self._leases: dict[str, Worker] = {}
        self._leasing: dict[str, asyncio.Task[Any]] = {}
        self._processes: dict[str, str] = {}  # processes by name, and their job
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._beside = False
        self._declared: dict[str, Any] = {}
        self._address = ""
        self._refresher: asyncio.Task[None] | None = None
        self._awaited: dict[str, tuple[asyncio.Future[None], dict[str, int]]] = {}  # actors that handles came of before themselves, and who has these
        self._groups: dict[str, _groups.Group] = {}  # by name, groups that are being formed or were broken up
        self._turns: dict[str, dict[Any, Any]] = {}  # by caller, the number of its next call, and those that wait for their turn

    async def ask(self, caller: str, number: int, method: str, *args: Any) -> Any:
        """Calls a method of this object; the calls of one caller begin in the order of their numbers, from 0 on."""
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
        """The calls of this object wake none of the threads of its process that wait for answers."""
        self._beside = True
        _core.get().stay_beside()

    # Jobs.

    async def register_job(self, job: dict[str, Any]) -> dict[str, Any]:
        """A driver begins: its process name, folder, environment, search path; resources it pretends, if it started the session."""
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
        """Ends the job of a driver that goes without a word."""
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
        """Takes over the nodes that the head knows, now and every half second from then on. declared: amounts that the first node pretends."""
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
                pass  # the head is away; the next look may find it

    async def _refresh(self) -> None:
        from .._session import current
        from ._heads import IP_LABEL

        session = current(start=False)
        rows = await session.core.ask("nodes", runtime=session.id).aget()
        there = sorted((n for n in rows if n["rank"] >= 0 and n["state"] != "lost"), key=lambda n: n["rank"])
        if not there and self._placement.nodes:
            return  # a head that has just returned knows none yet
        first = next(iter(self._placement.nodes.values()), None)
        found = []
        for node in there:
            head = node is there[0] if first is None else node["node"] == first.name
            address = (node["labels"] or {}).get(IP_LABEL) or self._address or "127.0.0.1"
            total = _placement.totals(node, address, head, self._declared if head else None)
            found.append({"name": node["node"], "address": address, "total": total})
        self._end_keys(self._placement.rpc_refresh(found).pop("kill"), _NODE_DIED)

    async def end_job(self, job_id: str) -> None:
        """A driver ends: what it and its workers created ends, except detached actors."""
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
        """Registers an actor and begins to start it. With a name that is taken: that actor's with get_if_exists, else refused."""
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
            await asyncio.wait([ended], timeout=_DEATH_PATIENCE if actor.cluster is not None else _NODE_PATIENCE)  # the watch knows the reason
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
        """The actor's rank in the role of its group; None if it has no group, or its group was broken up."""
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
        """All actors of a group have been created: so many."""
        self._group(name).set_size(size)

    async def _watch_actor(self, actor: Actor, role: str, cluster: Any) -> None:
        """Waits for the end of an actor's process."""
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
        """The process of an actor has died: the actor is restarted where restarts are left, else it is dead."""
        if actor.state == DEAD or actor.role != role:
            return
        left = actor.spec["restarts"]
        if reason == _NODE_DIED and actor.state in (PENDING, STARTING, RESTARTING):
            left = left + 1 if left >= 0 else left  # it had not begun: another node takes it
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
        """An actor ends its process on purpose."""
        if actor_id in self._actors:
            self._actors[actor_id].exiting = why

    def _free_name(self, actor: Actor) -> None:
        key = (actor.spec["namespace"], actor.spec.get("name") or "")
        if self._names.get(key) == actor.id:
            del self._names[key]

    def _end_actor(self, actor: Actor, reason: str, crashed: bool = False) -> None:
        """The actor is dead: its resources are free, its process ends, callers are told the reason. Its name is free too; that of one
        whose process crashed once no handle is left."""
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
        """A process has ended: the handles that it held are gone, and the actors it created end."""
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
        """An actor whose handle has come before the request of its creator."""
        if actor_id not in self._awaited:
            self._awaited[actor_id] = (asyncio.get_running_loop().create_future(), {})
        await asyncio.wait([self._awaited[actor_id][0]], timeout=_EXPECTED)
        if actor_id not in self._actors:
            self._awaited.pop(actor_id, None)
        return self._actors.get(actor_id)

    async def actor_info(self, actor_id: str) -> dict[str, Any]:
        """Where an actor is, once that is known: {"role"}; {"dead": frame of the exception} if it is dead or unknown."""
        actor = self._actors.get(actor_id) or await self._expected(actor_id)
        if actor is None:
            return {"dead": None}
        if actor.state not in (ALIVE, DEAD):
            await asyncio.shield(actor.settled)
        if actor.state == DEAD:
            return {"dead": actor.cause}
        return {"role": actor.role, "restarts": bool(actor.spec["restarts"])}

    async def actor_lost(self, actor_id: str, role: str, patience: float | None = _DEATH_PATIENCE) -> dict[str, Any]:
        """What became of an actor whose process of that role is gone, once that is known: {"dead": frame of the exception},
        {"restarts": True}, or {} if the process lives on. Without patience: waits for its end."""
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
        """A process has a handle that it had not."""
        actor = self._actors.get(actor_id)
        if actor is None:
            waited = self._awaited.setdefault(actor_id, (asyncio.get_running_loop().create_future(), {}))
            waited[1][process] = waited[1].get(process, 0) + 1
            await self._expected(actor_id)
        elif actor.state != DEAD:
            actor.holders[process] = actor.holders.get(process, 0) + 1

    async def handle_dropped(self, actor_id: str, process: str) -> None:
        """A process has no handle any more; the last one ends the actor."""
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
        """One that is being constructed ends when it is: its constructor may matter."""
        if actor.state in (ALIVE, PENDING, RESTARTING):
            self._end_actor(actor, _OUT_OF_SCOPE)

    async def kill_actor(self, actor_id: str, no_restart: bool = True) -> Any:
        """Ends an actor at once, or with no_restart=False its process: the actor is restarted where restarts are left. The frame of the
        exception for its callers, if it is dead."""
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

    # Workers for tasks.

    async def lease(self, lease_id: str, job_id: str, demand: dict[str, float], strategy: Any, env: dict[str, Any], captures: Any) -> dict[str, Any]:
        """A worker for tasks with these resources: waits until they are free and the worker is up."""
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
        """The request is withdrawn, if it still waits."""
        task = self._leasing.get(lease_id)
        if task is not None:
            task.cancel()

    async def _idle_worker(self, job_id: str, env: dict[str, Any], allocation: Any, captures: Any) -> Worker:
        devices = sorted(name for name, ids in allocation.devices.items() if ids)  # a worker with devices runs no tasks without
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
        """The caller has no more work for the worker; spent: its process ends."""
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
        """Ends workers that have had no work for long."""
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
        """Ends a worker without work, unless others need it: for objects or actors of its tasks."""
        if any(a.spec["owner"] == worker.role and a.state != DEAD and not a.spec["detached"] for a in self._actors.values()):
            return
        try:
            if await worker.cluster.workers[0]["owns"].remote():
                return
        except _errors.Error:
            pass  # its end is seen elsewhere
        if not worker.lease:
            self._end_worker(worker)

    # Resources.

    async def placement(self, method: str, *args: Any) -> Any:
        """Calls rpc_<method> of the placement, which may be async. A result {"kill": [keys], …} ends the actors and leases of these keys."""
        result = getattr(self._placement, "rpc_" + method)(*args)
        if hasattr(result, "__await__"):
            result = await result
        if isinstance(result, dict):
            self._end_keys(result.pop("kill", ()), _GROUP_REMOVED)
        return result

    def _end_keys(self, keys: Any, reason: str) -> None:
        """Ends the actors and leases that held these resources."""
        for key in keys:
            if key in self._actors and reason == _NODE_DIED:
                self._process_lost(self._actors[key], self._actors[key].role, reason)
            elif key in self._actors:
                self._end_actor(self._actors[key], reason)
            elif key in self._leases:
                self._end_worker(self._leases[key])

    # Roles.

    def _process(self, job_id: str, env: dict[str, Any], allocation: Any, devices: dict[str, list[str]], assigned: dict[str, Any]) -> _groups.Process:
        """A process for an actor or for tasks, on the node of the allocation."""
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
        """Starts a role with these processes as its ranks."""
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
        """Ends a role: its process at once, by itself where it can."""
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
    """Waits until a call has failed with its process, which runs its exit functions first, or until their time is over."""
    try:
        await asyncio.wait_for(call, _groups.GENTLE_EXIT)
    except (_errors.Error, asyncio.TimeoutError):
        pass


_GROUP_REMOVED = "The actor is dead because its worker process was ended: its placement group was removed."
_NODE_DIED = "The actor died because its node has died."
_OUT_OF_SCOPE = "The actor is dead because all references to the actor were removed."
