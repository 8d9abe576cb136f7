"""The face of the package, and what importing it costs."""

import subprocess
import sys

import troupe

PUBLIC = {
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
}


def test_everything_public_is_in_one_flat_place():
    assert set(troupe.__all__) == PUBLIC
    import types

    shown = {n for n, v in vars(troupe).items() if not n.startswith("_") and not isinstance(v, types.ModuleType)}
    assert shown == PUBLIC


def test_exceptions_form_one_tree():
    for name in PUBLIC:
        value = getattr(troupe, name)
        if isinstance(value, type) and issubclass(value, BaseException):
            assert issubclass(value, troupe.Error), name
    assert issubclass(troupe.TimedOutError, TimeoutError)
    assert issubclass(troupe.InvalidError, ValueError)
    assert issubclass(troupe.UnavailableError, ConnectionError)


def test_the_host_imports_next_to_nothing():
    heavy = ("numpy", "torch", "asyncio", "logging", "subprocess", "inspect", "cloudpickle", "multiprocessing")
    text = f"import sys, troupe.worker; print(' '.join(m for m in {heavy} if m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()
    assert out == []


def test_errors_say_where():
    e = troupe.WorkerLostError(
        "gone",
        role="r",
        rank=3,
        node="n1",
        method="m",
        details={"signal": "SIGKILL", "exit_code": "-1", "last_lines": "a\nb"},
    )
    assert str(e) == "r[3] m on n1: gone"
    assert (e.signal, e.exit_code, e.last_lines) == ("SIGKILL", -1, ["a", "b"])
    import pickle

    again = pickle.loads(pickle.dumps(e))
    assert type(again) is troupe.WorkerLostError and str(again) == str(e) and again.signal == "SIGKILL"
