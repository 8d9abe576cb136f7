"""Everything that crosses between Python and the Go core: constants, records, functions and requests.

Made from the Go sources by `go test ./cmd/libtroupe -run TestSeam -update`; do not edit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import NamedTuple

u64, i64, i32, address, text = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p

ALIGN = 64
ANSWER = 1
ANSWER_FAILED = 1
ANSWER_MORE = 2
ANSWER_SENDS = 8
ANSWER_TAKES = 4
CALL = 4
CALL_COLLECT_ALL = 4
CALL_CONTROL = 8
CALL_KEEP = 64
CALL_MORE = 16
CALL_NO_COLLECT = 2
CALL_NO_WAIT = 32
CALL_ON_DEVICE = 128
CALL_STREAMS = 1
CANCEL = 5
CAUSE = 4
COMBINED = 16
FAILED = 1
FREED = 9
GET_HERE = 2
GET_READY = 1
KEPT = 64
LARGE = 65536
LAST = 2
META_ITEMS = 4
META_NO_DATA = 1
META_ON_DEVICE = 8
META_PIPELINE = 2
NONE = 8
OUTPUT_END = 0
OUTPUT_FLUSHED = 3
OUTPUT_STDERR = 2
OUTPUT_STDOUT = 1
OVER = 2
PUT_FAILED = 1
RESULT = 3
SHARED = 32
SIDE_TOKEN = 4611686018427387904
STAGE_CANCELLED = 2
STAGE_GROUPED = 1
STATUS_INVALID = -3
STATUS_MORE = 1
STATUS_OK = 0
STATUS_PANIC = -1
STATUS_REFUSED = -5
STATUS_RESIZED = -6
STATUS_SMALL = -4
STATUS_UNKNOWN = -2
STOPPED = 6
VALUE = 7
WANTED = 8

# Records of fixed size, and the offsets of their fields; cmd/libtroupe/seam.go says what follows each.


class CompletionHead:
    layout = Struct("=IIQiIQQQ")
    size = 48
    kind, flags, token, rank, meta, body, address, release = 0, 4, 8, 16, 20, 24, 32, 40


class CallHead:
    layout = Struct("=IIqIIIIII")
    size = 40
    flags, parts, timeout, plan, need, method, object, args, inside = 0, 4, 8, 16, 20, 24, 28, 32, 36


class CallPart:
    layout = Struct("=QQ")
    size = 16
    length, address = 0, 8


class CallScope:
    layout = Struct("=QQ")
    size = 16
    served, span = 0, 8


class CallMeta:
    layout = Struct("=QQIIIIII")
    size = 40
    sequence, deadline, trace, flags, session, method, object, caller = 0, 8, 16, 20, 24, 28, 32, 36


class StageHead:
    layout = Struct("=QII")
    size = 16
    number, meta, flags = 0, 8, 12


class OutputHead:
    layout = Struct("=II")
    size = 8
    kind, length = 0, 4


class WantedMeta:
    layout = Struct("=Q")
    size = 8
    runtime = 0


FUNCTIONS = (
    ("troupe_version", text, ()),
    ("troupe_init", i32, ()),
    ("troupe_ask", i32, (u64, address, address, u64)),
    ("troupe_plan", i64, (u64, address, u64, address, u64)),
    ("troupe_call", i32, (u64, u64, address, u64)),
    ("troupe_world", i32, (u64,)),
    ("troupe_cancel", i32, (u64,)),
    ("troupe_take", i64, (address, u64)),
    ("troupe_side", i32, ()),
    ("troupe_take_side", i64, (address, u64)),
    ("troupe_push", i32, ()),
    ("troupe_answer", i32, (u64, i32, address, u64)),
    ("troupe_cancelled", i32, (u64,)),
    ("troupe_alloc", address, (u64,)),
    ("troupe_empty", address, (u64,)),
    ("troupe_copy", i32, (address, address, u64)),
    ("troupe_release", i32, (u64,)),
    ("troupe_trim", i32, (u64, address, u64)),
    ("troupe_forking", u64, ()),
    ("troupe_forked", i32, (u64, i32)),
    ("troupe_output", i32, ()),
    ("troupe_error", i64, (address, u64)),
    ("troupe_lent", i32, ()),
    ("troupe_take_lent", i64, (address, u64)),
    ("troupe_lend", i64, (u64,)),
    ("troupe_fill", i32, (u64, u64, i32, address, u64)),
    ("troupe_count_device", i32, (u64, i32, u64)),
    ("troupe_put", i64, (u64, i32, address, u64, address, u64)),
    ("troupe_promise", i64, (u64, i32)),
    ("troupe_count", i32, (u64, address, u64, i32)),
    ("troupe_place", i64, (u64, u64, address, u64)),
    ("troupe_get", i32, (u64, u64, address, u64, i32, address, u64)),
    ("troupe_inside", i32, (u64, u64, address, u64)),
    ("troupe_span", u64, (address, u64, address, u64)),
    ("troupe_span_trace", i64, (u64, address, u64)),
    ("troupe_span_end", i32, (u64, i32)),
    ("troupe_weights", i64, (u64, address, u64, address, u64)),
)


class Request(NamedTuple):
    """A request to the core, as one of the functions below makes it. A field that is None is left out."""

    op: str
    fields: Mapping[str, object]


def attach(*, runtime: int, name: str) -> Request:
    return Request("attach", locals())


def changed(*, cluster: int, epoch: int, timeout: float | None = None) -> Request:
    return Request("changed", locals())


def close(*, runtime: int, now: bool | None = None) -> Request:
    return Request("close", locals())


def create(*, runtime: int, spec: Mapping[str, object], background: bool) -> Request:
    return Request("create", locals())


def deaths(*, cluster: int, seen: int, side: bool | None = None) -> Request:
    return Request("deaths", locals())


def describe(*, cluster: int) -> Request:
    return Request("describe", locals())


def destroy(*, cluster: int) -> Request:
    return Request("destroy", locals())


def driver(*, runtime: int, name: str) -> Request:
    return Request("driver", locals())


def end_created(*, runtime: int, now: bool | None = None) -> Request:
    return Request("end_created", locals())


def flush_output(*, runtime: int) -> Request:
    return Request("flush_output", locals())


def hand_over(*, runtime: int, timeout: float | None = None) -> Request:
    return Request("hand_over", locals())


def health(*, cluster: int) -> Request:
    return Request("health", locals())


def info(*, cluster: int) -> Request:
    return Request("info", locals())


def interrupt(*, cluster: int, ranks: Sequence[int]) -> Request:
    return Request("interrupt", locals())


def kill(*, cluster: int, ranks: Sequence[int] | None = None) -> Request:
    return Request("kill", locals())


def measured(*, runtime: int, measured: Sequence[Mapping[str, object]]) -> Request:
    return Request("measured", locals())


def members(*, cluster: int) -> Request:
    return Request("members", locals())


def nodes(*, runtime: int) -> Request:
    return Request("nodes", locals())


def open(
    *,
    bus: Mapping[str, object],
    namespace: str,
    name: str,
    lease: float,
    private: bool,
    output: Mapping[str, object],
    cli: Mapping[str, object],
) -> Request:
    return Request("open", locals())


def open_handle(*, runtime: int, handle: object) -> Request:
    return Request("open_handle", locals())


def pipeline_abort(*, id: int, item: str) -> Request:
    return Request("pipeline_abort", locals())


def pipeline_attach(*, runtime: int, name: str) -> Request:
    return Request("pipeline_attach", locals())


def pipeline_check(*, text: str) -> Request:
    return Request("pipeline_check", locals())


def pipeline_close(*, id: int) -> Request:
    return Request("pipeline_close", locals())


def pipeline_dead(*, id: int) -> Request:
    return Request("pipeline_dead", locals())


def pipeline_drain(*, id: int, timeout: float | None = None) -> Request:
    return Request("pipeline_drain", locals())


def pipeline_drop_dead(*, id: int, seqs: Sequence[int], all: bool) -> Request:
    return Request("pipeline_drop_dead", locals())


def pipeline_join(*, id: int, stage: str, cluster: int, ranks: Sequence[int], timeout: float | None = None) -> Request:
    return Request("pipeline_join", locals())


def pipeline_leave(*, id: int, stage: str, cluster: int, ranks: Sequence[int], timeout: float | None = None) -> Request:
    return Request("pipeline_leave", locals())


def pipeline_open(
    *, runtime: int, by: str, text: str, clusters: Sequence[int], functions: int, take_over: bool, grace: float
) -> Request:
    return Request("pipeline_open", locals())


def pipeline_pause(*, id: int, stage: str) -> Request:
    return Request("pipeline_pause", locals())


def pipeline_put(
    *, id: int, stream: str, items: Sequence[Mapping[str, object]], timeout: float | None = None
) -> Request:
    return Request("pipeline_put", locals())


def pipeline_remove(*, runtime: int, name: str) -> Request:
    return Request("pipeline_remove", locals())


def pipeline_resume(*, id: int, stage: str) -> Request:
    return Request("pipeline_resume", locals())


def pipeline_retry_dead(*, id: int, seqs: Sequence[int], all: bool) -> Request:
    return Request("pipeline_retry_dead", locals())


def pipeline_scale(*, id: int, stage: str, workers: int) -> Request:
    return Request("pipeline_scale", locals())


def pipeline_stats(*, id: int) -> Request:
    return Request("pipeline_stats", locals())


def pipeline_stop(*, id: int) -> Request:
    return Request("pipeline_stop", locals())


def pipeline_take(*, id: int, stream: str, count: int, timeout: float | None = None) -> Request:
    return Request("pipeline_take", locals())


def pipeline_taken(*, id: int, loan: int, done: bool) -> Request:
    return Request("pipeline_taken", locals())


def pipeline_version(*, id: int, version: float) -> Request:
    return Request("pipeline_version", locals())


def progress(*, runtime: int, name: str) -> Request:
    return Request("progress", locals())


def references(*, runtime: int) -> Request:
    return Request("references", locals())


def rendezvous(
    *,
    verb: str,
    group: str,
    timeout: float | None = None,
    epoch: int | None = None,
    round: int | None = None,
    keys: Sequence[str] | None = None,
    values: Sequence[bytes] | None = None,
    delta: int | None = None,
    waits: bool | None = None,
) -> Request:
    return Request("rendezvous", locals())


def replace(*, cluster: int, rank: int, reason: str, timeout: float | None = None) -> Request:
    return Request("replace", locals())


def reservation(*, runtime: int, name: str) -> Request:
    return Request("reservation", locals())


def reserve(
    *,
    runtime: int,
    holder: str,
    wait: float,
    nodes: int | None = None,
    devices: int | None = None,
    bundles: Sequence[Mapping[str, object]] | None = None,
    strategy: str | None = None,
    id: str | None = None,
) -> Request:
    return Request("reserve", locals())


def resize(*, cluster: int, replicas: int, timeout: float | None = None) -> Request:
    return Request("resize", locals())


def roles(*, runtime: int) -> Request:
    return Request("roles", locals())


def rollouts_attach(*, runtime: int, name: str) -> Request:
    return Request("rollouts_attach", locals())


def rollouts_batch(*, id: int, count: int, timeout: float | None = None) -> Request:
    return Request("rollouts_batch", locals())


def rollouts_close(*, id: int) -> Request:
    return Request("rollouts_close", locals())


def rollouts_done(*, id: int, loan: int) -> Request:
    return Request("rollouts_done", locals())


def rollouts_finish(
    *, id: int, loan: int, turn: int, last: bool, version: float, fields: Sequence[Mapping[str, object]]
) -> Request:
    return Request("rollouts_finish", locals())


def rollouts_open(
    *,
    runtime: int,
    name: str,
    by: str,
    spec: Mapping[str, object],
    after: float,
    turn_timeout: float,
    stale: float,
    replicas: int,
) -> Request:
    return Request("rollouts_open", locals())


def rollouts_put(
    *, id: int, source: str, number: int, fields: Sequence[Mapping[str, object]], timeout: float | None = None
) -> Request:
    return Request("rollouts_put", locals())


def rollouts_redispatch(*, id: int, group: int) -> Request:
    return Request("rollouts_redispatch", locals())


def rollouts_release(*, id: int, loan: int) -> Request:
    return Request("rollouts_release", locals())


def rollouts_remove(*, runtime: int, name: str) -> Request:
    return Request("rollouts_remove", locals())


def rollouts_scoring(*, id: int, field: str, count: int, timeout: float | None = None) -> Request:
    return Request("rollouts_scoring", locals())


def rollouts_set(*, id: int, group: int, index: int, name: str, fields: Sequence[Mapping[str, object]]) -> Request:
    return Request("rollouts_set", locals())


def rollouts_stats(*, id: int) -> Request:
    return Request("rollouts_stats", locals())


def rollouts_take(*, id: int, timeout: float | None = None) -> Request:
    return Request("rollouts_take", locals())


def rollouts_version(*, id: int, version: float) -> Request:
    return Request("rollouts_version", locals())


def router_abort(*, id: int, request: str) -> Request:
    return Request("router_abort", locals())


def router_call(
    *, id: int, request: str, key: str, body: bytes, again: bool, scope: bytes, timeout: float | None = None
) -> Request:
    return Request("router_call", locals())


def router_close(*, id: int) -> Request:
    return Request("router_close", locals())


def router_join(*, id: int, cluster: int, ranks: Sequence[int], timeout: float | None = None) -> Request:
    return Request("router_join", locals())


def router_leave(*, id: int, cluster: int, ranks: Sequence[int], timeout: float | None = None) -> Request:
    return Request("router_leave", locals())


def router_open(
    *, method: str, abort: str, credits: int, waiting: int, sticky: bool, clusters: Sequence[int]
) -> Request:
    return Request("router_open", locals())


def router_resume(*, id: int) -> Request:
    return Request("router_resume", locals())


def router_scale(*, id: int, cluster: int, workers: int, timeout: float | None = None) -> Request:
    return Request("router_scale", locals())


def router_stats(*, id: int) -> Request:
    return Request("router_stats", locals())


def router_suspend(*, id: int) -> Request:
    return Request("router_suspend", locals())


def serve(*, runtime: int, name: str, class_name: str, object: str, table: Mapping[str, object]) -> Request:
    return Request("serve", locals())


def sessions(*, runtime: int, timeout: float | None = None) -> Request:
    return Request("sessions", locals())


def show_output(*, runtime: int, name: str) -> Request:
    return Request("show_output", locals())


def stacks(*, cluster: int, ranks: Sequence[int]) -> Request:
    return Request("stacks", locals())


def started(*, cluster: int, timeout: float | None = None) -> Request:
    return Request("started", locals())


def timeline(*, runtime: int) -> Request:
    return Request("timeline", locals())


def unfinished(*, runtime: int, now: bool | None = None) -> Request:
    return Request("unfinished", locals())


def unreserve(*, id: str) -> Request:
    return Request("unreserve", locals())


def wait_ready(*, cluster: int, timeout: float | None = None) -> Request:
    return Request("wait_ready", locals())


def weights_bind(
    *,
    runtime: int,
    name: str,
    use: str,
    tensors: Sequence[Mapping[str, object]],
    device: str | None = None,
    binding: int | None = None,
) -> Request:
    return Request("weights_bind", locals())


def weights_commit(*, runtime: int, name: str, version: Mapping[str, object]) -> Request:
    return Request("weights_commit", locals())


def weights_fill(
    *, runtime: int, name: str, version: Mapping[str, object], first: int, addresses: Sequence[int]
) -> Request:
    return Request("weights_fill", locals())


def weights_loaded(
    *, runtime: int, name: str, version: Mapping[str, object], took: float | None = None, failure: str | None = None
) -> Request:
    return Request("weights_loaded", locals())


def weights_move(
    *, runtime: int, number: int, buckets: Sequence[Mapping[str, object]], failure: str | None = None
) -> Request:
    return Request("weights_move", locals())


def weights_next(*, runtime: int, name: str, version: Mapping[str, object], timeout: float | None = None) -> Request:
    return Request("weights_next", locals())


def weights_publish(
    *, runtime: int, name: str, step: int, mode: str, ranks: Sequence[int], timeout: float | None = None
) -> Request:
    return Request("weights_publish", locals())


def weights_stage(
    *, runtime: int, name: str, version: Mapping[str, object], whole: bool, epoch: int, timeout: float | None = None
) -> Request:
    return Request("weights_stage", locals())


def weights_status(*, runtime: int, name: str) -> Request:
    return Request("weights_status", locals())


def worker_close() -> Request:
    return Request("worker_close", locals())


def worker_fail(*, error: Mapping[str, object]) -> Request:
    return Request("worker_fail", locals())


def worker_open(*, assignment: str) -> Request:
    return Request("worker_open", locals())


def worker_start() -> Request:
    return Request("worker_start", locals())


def worker_stop(*, grace: float) -> Request:
    return Request("worker_stop", locals())
