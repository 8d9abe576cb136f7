"""Exceptions of Ray's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class RayError(Exception):
    """The base class of all exceptions of this package."""


class CrossLanguageError(RayError):
    """A task in another language failed."""


class TaskCancelledError(RayError):
    """The task was cancelled."""

    def __init__(self, task_id: object = None, error_message: str | None = None) -> None:
        self.task_id = task_id
        self.error_message = error_message
        super().__init__(task_id, error_message)

    def __str__(self) -> str:
        if self.error_message:
            return self.error_message
        return (
            "This task or its dependency was cancelled"
            if self.task_id is None
            else f"Task: {self.task_id} was cancelled. {self.error_message or ''}"
        )


class RayTaskError(RayError):
    """A task or method raised an exception. The exception that get raises is also an instance of the cause's class."""

    def __init__(
        self,
        function_name: str,
        traceback_str: str,
        cause: BaseException,
        proctitle: str | None = None,
        pid: int | None = None,
        ip: str | None = None,
        actor_repr: str | None = None,
        actor_id: str | None = None,
    ) -> None:
        super().__init__(function_name, traceback_str, cause, proctitle, pid, ip)
        self.function_name = function_name
        self.traceback_str = traceback_str
        self.cause = cause
        self.proctitle, self.pid, self.ip = proctitle, pid, ip
        self.actor_repr = actor_repr
        self.actor_id = actor_id
        if self.traceback_str is None:
            raise TypeError("traceback_str must be a text")

    def as_instanceof_cause(self) -> RayTaskError:
        """Returns this error as an instance of the cause's class as well, if that class allows it."""
        cause_cls = type(self.cause)
        if isinstance(self.cause, RayError) and not isinstance(self.cause, RayTaskError):
            return self
        if issubclass(RayTaskError, cause_cls) or isinstance(self.cause, RayTaskError):
            return self
        try:
            return self._dual(cause_cls)
        except Exception:
            return self

    def _dual(self, cause_cls: type) -> RayTaskError:
        error = self

        class cls(RayTaskError, cause_cls):  # type: ignore[misc]
            def __new__(cls, cause: BaseException) -> Self:
                return (
                    cause_cls.__new__(cls, *cause.args) if hasattr(cause, "exceptions") else super().__new__(cls, cause)
                )  # an exception group

            def __init__(self, cause: BaseException) -> None:
                self.cause = cause
                self.args = (cause,)

            def __getattr__(self, name: str) -> object:
                if name.startswith("__") or name == "cause":
                    raise AttributeError(name)
                return getattr(self.cause, name)

            def __str__(self) -> str:
                return error_text

            def __reduce__(self) -> tuple[object, ...]:
                return _dual_again, (error,)

        error_text = str(self)
        cls.__name__ = cls.__qualname__ = f"RayTaskError({cause_cls.__name__})"
        cls.__module__ = RayTaskError.__module__
        made = cls(self.cause)
        for name in ("function_name", "traceback_str", "proctitle", "pid", "ip", "actor_repr", "actor_id"):
            made.__dict__[name] = getattr(self, name)
        made.__cause__ = self.cause
        return made

    def __str__(self) -> str:
        """Returns the remote traceback, without frames of this package."""
        return self.traceback_str.rstrip("\n")

    def __reduce__(self) -> tuple[object, ...]:
        return _task_error, (
            type(self),
            self.function_name,
            self.traceback_str,
            self.cause,
            self.proctitle,
            self.pid,
            self.ip,
            self.actor_repr,
            self.actor_id,
        )


def _task_error(cls: type, *fields: object) -> object:
    return cls(*fields)


def _dual_again(error: RayTaskError) -> RayTaskError:
    return error.as_instanceof_cause()


class LocalRayletDiedError(RayError):
    """The agent of the node died."""


class WorkerCrashedError(RayError):
    """The worker process of a task died."""

    def __str__(self) -> str:
        return self.args[0] if self.args else "The worker died unexpectedly while executing this task."


class RayActorError(RayError):
    """The actor died or cannot be reached."""

    BASE_ERROR_MSG = "The actor experienced an error before finishing this task."

    def __init__(
        self,
        actor_id: str | None = None,
        error_msg: str = BASE_ERROR_MSG,
        actor_init_failed: bool = False,
        preempted: bool = False,
    ) -> None:
        super().__init__(actor_id, error_msg, actor_init_failed, preempted)
        self.actor_id = actor_id
        self.error_msg = error_msg
        self._actor_init_failed = actor_init_failed
        self._preempted = preempted

    def __str__(self) -> str:
        return self.error_msg

    @property
    def preempted(self) -> bool:
        return self._preempted

    @property
    def actor_init_failed(self) -> bool:
        return self._actor_init_failed


class ActorDiedError(RayActorError):
    """The actor is dead: it was killed, its process ended, or its constructor raised."""

    BASE_ERROR_MSG = "The actor died unexpectedly before finishing this task."

    def __init__(self, cause: object = None, error_msg: str | None = None, actor_id: str | None = None) -> None:
        message = error_msg or self.BASE_ERROR_MSG
        failed = isinstance(cause, RayTaskError)
        if failed:
            message = f"The actor died because of an error raised in its creation task, {cause}"
        elif isinstance(cause, str):
            message = cause
        super().__init__(actor_id, message, actor_init_failed=failed)
        self.init_cause = cause if failed else None

    def __reduce__(self) -> tuple[object, ...]:
        return ActorDiedError, (self.init_cause, self.error_msg, self.actor_id)


class ActorUnavailableError(RayActorError):
    """The actor is temporarily unreachable."""


class ActorAlreadyExistsError(ValueError, RayError):
    """The name is taken by an existing actor."""


class ActorHandleNotFoundError(ValueError, RayError):
    """The handle belongs to another cluster."""


class ActorPlacementGroupRemoved(RayError):
    """The placement group of the actor was removed."""


class TaskPlacementGroupRemoved(RayError):
    """The placement group of the task was removed."""


class ActorUnschedulableError(RayError):
    """The actor can never be scheduled."""

    def __init__(self, error_message: str = "") -> None:
        super().__init__(error_message)
        self.error_message = error_message


class TaskUnschedulableError(RayError):
    """The task can never be scheduled."""

    def __init__(self, error_message: str = "") -> None:
        super().__init__(error_message)
        self.error_message = error_message


class ObjectLostError(RayError):
    """No copy of the object is left."""

    def __init__(self, object_ref_hex: str = "", owner_address: object = None, call_site: str = "") -> None:
        super().__init__(object_ref_hex, owner_address, call_site)
        self.object_ref_hex, self.owner_address, self.call_site = object_ref_hex, owner_address, call_site

    def __str__(self) -> str:
        return f"Failed to retrieve object {self.object_ref_hex}: no copy is left."


class ObjectFetchTimedOutError(ObjectLostError):
    """The object could not be fetched in time."""


class ReferenceCountingAssertionError(ObjectLostError, AssertionError):
    """The object was freed while a reference to it was in use."""

    def __str__(self) -> str:
        return f"Object {self.object_ref_hex} was freed while a reference to it was in use."


class ObjectFreedError(ObjectLostError):
    """The object was freed."""


class OwnerDiedError(ObjectLostError):
    """The process that owns the object died."""

    def __str__(self) -> str:
        return f"Failed to retrieve object {self.object_ref_hex}: the process that owns it has died."


class ObjectReconstructionFailedError(ObjectLostError):
    """The object cannot be recomputed."""


class ObjectStoreFullError(RayError):
    """The object store has no space for the object."""


class OutOfDiskError(RayError):
    """The disk is full."""


class OutOfMemoryError(RayError):
    """A worker was killed by the OOM killer."""


class NodeDiedError(RayError):
    """The node died."""


class GetTimeoutError(RayError, TimeoutError):
    """get did not receive the value within its timeout."""


class PlasmaObjectNotAvailable(RayError):
    """The object is not available yet."""


class AsyncioActorExit(RayError):
    """Raised inside an async actor to end it."""


class UnserializableException(RayError):
    """The exception of the task cannot be pickled; only its text is kept."""


class RuntimeEnvSetupError(RayError):
    """The runtime environment could not be set up."""

    def __init__(self, error_message: str | None = None) -> None:
        super().__init__(error_message)
        self.error_message = error_message

    def __str__(self) -> str:
        return f"Failed to set up runtime environment.\n{self.error_message or ''}"


class RaySystemError(RayError):
    """The runtime itself failed."""

    def __init__(self, client_exc: object = "", traceback_str: str | None = None) -> None:
        super().__init__(client_exc)
        self.client_exc, self.traceback_str = client_exc, traceback_str

    def __str__(self) -> str:
        return f"System error: {self.client_exc}"


class ObjectRefStreamEndOfStreamError(RayError):
    """A generator has no more objects."""


class RpcError(RayError):
    """A message to another process failed."""

    def __init__(self, message: str, rpc_code: int | None = None) -> None:
        super().__init__(message, rpc_code)
        self.message, self.rpc_code = message, rpc_code

    def __str__(self) -> str:
        return self.message


class PendingCallsLimitExceeded(RayError):
    """The actor has more pending calls than its max_pending_calls."""


class RayChannelError(RaySystemError):
    """A channel failed."""


class RayChannelTimeoutError(RayChannelError, TimeoutError):
    """A channel timed out."""


class RayCgraphCapacityExceeded(RaySystemError):
    """A compiled graph has too many executions in flight."""


class RayDirectTransportError(RaySystemError):
    """A direct transfer of a tensor failed. It is never raised."""


class StreamingGeneratorReplayInconsistentError(RaySystemError):
    """A generator that ran again yielded other values. It is never raised."""


class OufOfBandObjectRefSerializationException(RayError):
    """A reference was pickled outside of a call. It is never raised."""


class UserCodeException(RayError):
    """Code of the program failed. It is never raised."""


class AuthenticationError(RayError):
    """The token was rejected."""
