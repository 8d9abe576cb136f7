"""Calls to several actors at once. Actors that are ranks of one role (_forming.py) are reached by a single call of the
core, which encodes and publishes arguments shared by several ranks only once. Calls to single actors of the group stay
in order with group calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import _errors, _pieces
from . import _context, _host, _objects, _state, actor
from ._objects import ERROR, ObjectRef
from .actor import ActorHandle, Pending


def call(handles: Sequence[Any], name: str, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[ObjectRef]:
    """Calls a method of several actors, each with its own arguments, and returns the references to the results."""
    own = [actor.CallOptions(h._info, name, {}) for h in handles]
    if len(handles) < 2 or any(o.group != own[0].group or o.returns != 1 or o.retries for o in own):
        return [
            actor.call_actor(h._info, h._hold, name, o, args, kwargs)
            for h, o, (args, kwargs) in zip(handles, own, calls, strict=True)
        ]
    pending, pieces = _pending(handles, name, own[0], calls)
    refs = [ObjectRef(p.entries[0]) for p in pending]
    if not _send(pending, pieces):
        for p in pending:
            p.own_arguments()
            p.client.submit(p)
    return refs


def _pending(
    handles: Sequence[ActorHandle],
    name: str,
    options: actor.CallOptions,
    calls: Sequence[tuple[tuple[object, ...], Mapping[str, object]]],
) -> tuple[list[Pending], list[list[int]]]:
    """Returns the calls, and lists of the positions that share the same arguments."""
    state = _state.require()
    task_id = state.store.task_id()
    parent = _context.current.get()
    found: dict[Any, tuple[Any, list[int]]] = {}
    pending = []
    for i, (handle, (args, kwargs)) in enumerate(zip(handles, calls, strict=True)):
        client = actor.client_of(handle._info.actor_id)
        key = _pieces.identity(args, kwargs)
        if key not in found:
            if kwargs or not options.least <= len(args) <= options.most:
                client.check(handle._info, name, args, kwargs)
            title = f"{handle._info.module}.{handle._info.class_name}.{name}"
            found[key] = (actor.split_arguments(title, args, kwargs, copy=False), [])
        arguments, positions = found[key]
        positions.append(i)
        entry = state.store.new(task_id, i + 1)
        made = actor.Pending(client, task_id, options, arguments, [entry], handle._hold)
        entry.call = made
        if parent is not None:
            parent.children.add(entry)
        pending.append(made)
    return pending, [positions for _, positions in found.values()]


def _send(pending: list[Any], pieces: list[list[int]]) -> bool:
    """Sends the calls as one, if each could be sent now. Returns False if they must be sent separately."""
    process = _state.require().process
    clients = [p.client for p in pending]
    if len(set(clients)) < len(clients):
        return False
    for p in pending:
        if p.waits_for(process) is not None or any(r._entry._done and r._entry.kind == ERROR for r in p.refs):
            return False
    taken = []
    try:
        for client in clients:
            if not client.take_turn():
                return False
            taken.append(client)
        return _send_as_one(pending, pieces)
    finally:
        for client in taken:
            client.end_turn()


def _send_as_one(pending: list[Any], pieces: list[list[int]]) -> bool:
    """Sends the calls as one. Runs in the turn of every client, so no other call of this process to these actors is
    sent meanwhile."""
    workers = [p.client.worker_for(p) for p in pending]
    cluster = workers[0].cluster if workers[0] is not None else None
    if (
        cluster is None
        or len(workers) != cluster.world_size
        or any(w is None or w.cluster is not cluster for w in workers)
    ):
        return False
    first = pending[0]
    group = first.options.group
    method = "call" if not group and "call" in cluster._modes else _host.method_of_group(group)
    by_rank = {w.rank: p for w, p in zip(workers, pending, strict=True)}
    extra: dict[str, Any] = {}
    if method != "call":
        extra = {
            "from": _state.require().process,
            "number": [by_rank[r].client.next_number(group) for r in range(cluster.world_size)],
        }
    bodies: list[Any] = [None] * cluster.world_size
    for positions in pieces:
        p = pending[positions[0]]
        body: tuple[tuple[Any, ...], dict[str, Any]] = (
            (first.id, p.options.method, p.frame, actor.dependencies(p.refs) if p.refs else [], 1, extra),
            {},
        )
        for i in positions:
            bodies[workers[i].rank] = body
    try:
        future = _pieces.send(cluster, method, bodies, collect_all=True)
    except _errors.Error as err:
        for p in pending:
            if method != "call":
                p.client.reuse_number(group)
            p.client._lost(p, err)
        return True
    for rank, p in by_rank.items():
        p.frame = []
        p.await_answer(future[rank])
    _objects.sent()
    return True
