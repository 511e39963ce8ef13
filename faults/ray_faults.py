"""The table of Ray's exceptions, by full class name, so that reading it needs no Ray.

What Ray 2.60 really raises, and when, is held by tests on a running cluster. A test also holds that
every exception that ``ray.exceptions`` exports has a row.
"""

from __future__ import annotations

from typing import Final

_R: Final = "ray.exceptions."

RAY: Final[dict[str, str]] = {
    _R + "RayError": "INTERNAL.RAY",
    _R + "RayTaskError": "TASK.FAILED",
    _R + "UserCodeException": "TASK.FAILED",
    _R + "CrossLanguageError": "TASK.FAILED",
    _R + "UnserializableException": "TASK.UNSERIALIZABLE",
    _R + "WorkerCrashedError": "TASK.WORKER_CRASHED",
    _R + "RuntimeEnvSetupError": "TASK.ENVIRONMENT",
    _R + "TaskUnschedulableError": "TASK.UNSCHEDULABLE",
    _R + "TaskPlacementGroupRemoved": "TASK.UNSCHEDULABLE",
    _R + "RayActorError": "ACTOR.DIED",
    _R + "ActorDiedError": "ACTOR.DIED",
    _R + "ActorUnavailableError": "ACTOR.UNAVAILABLE",
    _R + "ActorPlacementGroupRemoved": "ACTOR.DIED",
    _R + "ActorUnschedulableError": "TASK.UNSCHEDULABLE",
    _R + "PendingCallsLimitExceeded": "ACTOR.TOO_MANY_PENDING",
    _R + "ActorAlreadyExistsError": "CONFIG.INVALID",
    _R + "ActorHandleNotFoundError": "ACTOR.DIED",
    _R + "AsyncioActorExit": "ACTOR.DIED",
    _R + "LocalRayletDiedError": "NODE.DIED",
    _R + "NodeDiedError": "NODE.DIED",
    _R + "OutOfMemoryError": "NODE.OUT_OF_MEMORY",
    _R + "OutOfDiskError": "OBJECT.STORE_FULL",
    _R + "ObjectStoreFullError": "OBJECT.STORE_FULL",
    _R + "ObjectLostError": "OBJECT.LOST",
    _R + "ObjectFreedError": "OBJECT.LOST",
    _R + "ObjectFetchTimedOutError": "OBJECT.LOST",
    _R + "ObjectReconstructionFailedError": "OBJECT.LOST",
    _R + "ReferenceCountingAssertionError": "OBJECT.LOST",
    _R + "PlasmaObjectNotAvailable": "OBJECT.LOST",
    _R + "OwnerDiedError": "OBJECT.OWNER_DIED",
    _R + "OufOfBandObjectRefSerializationException": "TASK.FAILED",
    _R + "GetTimeoutError": "TIMEOUT.RAY_GET",
    _R + "TaskCancelledError": "CANCEL.REMOTE",
    _R + "RpcError": "NODE.NETWORK",
    _R + "AuthenticationError": "CONFIG.INVALID",
    _R + "ObjectRefStreamEndOfStreamError": "INTERNAL.RAY",
    _R + "StreamingGeneratorReplayInconsistentError": "INTERNAL.RAY",
    _R + "RaySystemError": "INTERNAL.RAY",
    _R + "RayChannelError": "INTERNAL.RAY",
    _R + "RayChannelTimeoutError": "INTERNAL.RAY",
    _R + "RayCgraphCapacityExceeded": "INTERNAL.RAY",
    _R + "RayDirectTransportError": "INTERNAL.RAY",
}

TASK_ERROR: Final = _R + "RayTaskError"

# Beneath a RayTaskError these happened to something that our callee called, and the name says so:
# `RayTaskError(ActorDiedError)` is an instance of RayActorError although our callee is alive.
NESTED: Final[dict[str, str]] = {
    "ACTOR.DIED": "ACTOR.NESTED_DIED",
    "TIMEOUT.RAY_GET": "TIMEOUT.NESTED",
    "TIMEOUT.DEADLINE": "TIMEOUT.NESTED",
}

# Ray keeps only text of these; the name of what was raised has to be read from it.
TEXT_ONLY: Final = frozenset({"TASK.UNSERIALIZABLE", "INTERNAL.RAY"})
