"""Troupe: named groups of GPU workers on a message bus.

import troupe

class Trainer(troupe.Worker):
    @troupe.register(dispatch_mode=troupe.Dispatch.DP_MP_COMPUTE)
    def train_step(self, batch):
        ...

with troupe.init():
    trainers = troupe.Cluster(name="actor_train", worker_cls=Trainer, worker_config=troupe.WorkerConfig(world_size=4))
    losses = trainers.train_step(batch)
"""

from ._actor import Queue, actor
from ._batch import Batch
from ._cluster import Cluster, WorkerHandle
from ._codec import Tensor
from ._config import RankInfo, WorkerConfig
from ._deaths import Death
from ._driver import driver, serve
from ._empty import empty
from ._errors import (
    ApplicationError,
    BusyError,
    CancelledError,
    ClosedError,
    ConflictError,
    EncodeError,
    Error,
    ExistsError,
    FencedError,
    InternalError,
    InvalidError,
    MalformedError,
    MembershipChanged,
    NoSpaceError,
    NotFoundError,
    OutcomeUnknownError,
    PanicError,
    RefusedError,
    TimedOutError,
    UnavailableError,
    VersionError,
    WorkerLostError,
)
from ._future import Future, RankFuture, as_completed, get, wait
from ._item import Item
from ._pipeline import Pipeline
from ._reference import Reference, put
from ._register import Broadcast, Dispatch, Execute, Scatter, Split, register
from ._rendezvous import Rendezvous, rendezvous
from ._resources import Reservation, ResourceManager
from ._result_stream import ResultStream
from ._rollouts import Rollouts
from ._router import Router
from ._session import Session, init, is_initialized, shutdown
from ._span import span
from ._stage import Stage, Stream
from ._tasks import available_resources, cluster_resources, get_actor, kill, nodes, remote
from ._weights import Box, Version, Weights, weights
from ._worker import Call, Worker, current_call

__version__ = "0.1.0"

__all__ = [
    "ApplicationError",
    "Batch",
    "Box",
    "Broadcast",
    "BusyError",
    "Call",
    "CancelledError",
    "ClosedError",
    "Cluster",
    "ConflictError",
    "Death",
    "Dispatch",
    "EncodeError",
    "Error",
    "Execute",
    "ExistsError",
    "FencedError",
    "Future",
    "InternalError",
    "InvalidError",
    "Item",
    "MalformedError",
    "MembershipChanged",
    "NoSpaceError",
    "NotFoundError",
    "OutcomeUnknownError",
    "PanicError",
    "Pipeline",
    "Queue",
    "RankFuture",
    "RankInfo",
    "Reference",
    "RefusedError",
    "Rendezvous",
    "Reservation",
    "ResourceManager",
    "ResultStream",
    "Rollouts",
    "Router",
    "Scatter",
    "Session",
    "Split",
    "Stage",
    "Stream",
    "Tensor",
    "TimedOutError",
    "UnavailableError",
    "Version",
    "VersionError",
    "Weights",
    "Worker",
    "WorkerConfig",
    "WorkerHandle",
    "WorkerLostError",
    "actor",
    "as_completed",
    "available_resources",
    "cluster_resources",
    "current_call",
    "driver",
    "empty",
    "get",
    "get_actor",
    "init",
    "is_initialized",
    "kill",
    "nodes",
    "put",
    "register",
    "remote",
    "rendezvous",
    "serve",
    "shutdown",
    "span",
    "wait",
    "weights",
]
