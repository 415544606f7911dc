"""The exception tree of exo-mesh.

MeshError
├── InputError            the caller's fault; carries the offending parameter
│   ├── UnknownModelError     no peer has this model
│   │   └── NotFetchedError       and this caller may not start a download from the hub
│   ├── UnknownPeerError      no peer is called so
│   ├── NoInstanceError       the model has no instance, and this node places none for a request
│   ├── ContextLengthError    prompt + requested output exceed the context limit
│   ├── UnknownAnswerError    no peer keeps the answer that the request refers to
│   └── KeyReusedError        an Idempotency-Key was used before for another request
├── ModelError            a checkpoint or architecture on disk cannot be used; names the file and tensor
├── FetchError            files of a model could not be fetched; carries the remedy
├── PlacementError        no set of peers can hold the model; carries the arithmetic
│   └── PendingPlacementError not yet: figures of peers are missing, or a needed peer is away
├── ReservationError      a peer refused a plan, with numbers or with the ballot it has promised
├── CrashLoopError        runners of this model crash repeatedly on every peer that can hold it
├── QuarantinedError      the model got stuck on every peer that can hold it; they wait before they retry
├── EngineError           an engine failed while loading or computing
│   ├── RankLostError         a rank of a tensor group did not connect, is gone, or is stuck in a frame
│   └── CanaryError           a tensor group computes another result than one machine would
├── TransportError        a peer or stream cannot be reached, or broke the protocol
│   ├── StrangerError         the other end belongs to another mesh: its secret differs, or one end has none
│   └── PeerVersionError      a peer runs another version, which does not know the call, a field or an operation
├── OpenMeshError         a peer of an open mesh obeys this call only from its own machine, or from a live peer
├── StageLostError        a stage of the ring that runs a request is gone
├── InstanceDeletedError  the instance that a request ran on was deleted
├── OverloadError         a bounded queue is full; try again after `retry_after_s`
│   ├── BodiesWaitError       other large request bodies take the room of this one
│   └── MemoryPressureError   a machine of the ring is short of memory; the message has its numbers
├── NotReadyError         the node drains or stops; send the request to another peer
├── NodeStoppingError     the node stops; the client can continue the request at another peer
├── StopPendingError      the node stops or restarts already, so it cannot be restarted
├── NoStoreError          the mesh has no model store
├── WebToolsOffError      the operator of this node has not turned the web tools, or their search, on
├── DeadlineError         a wait ended without an answer
├── NoInvitationError     this code of an invitation is not valid: it was used, has expired or was withdrawn
├── WrongCodeError        the code of an invitation is wrong
├── SupersededError       the client sent the request again with its Idempotency-Key; it goes on in the new call
└── CancelledRequestError the request was cancelled by its owner

Each class has a `code`: a stable word that travels between processes, and that the HTTP layer turns into a status.
"""

from __future__ import annotations

from collections import abc


class MeshError(Exception):
    """Base class of all errors that exo-mesh raises on purpose. `str(error)` is one clear sentence for a person."""

    code = "internal_error"


def code_of(error: BaseException) -> str:
    """The code of an error that ended something: its own; "cancelled" for the cancellation of a task; the code of an
    internal error for any other Exception."""
    if isinstance(error, MeshError):
        return error.code
    return MeshError.code if isinstance(error, Exception) else CancelledRequestError.code


class InputError(MeshError):
    """The caller's input is at fault. `param` names the offending field, if there is one; details: JSON values for
    programs."""

    code = "invalid_request"

    def __init__(
        self, message: str, *, param: str | None = None, details: abc.Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.details = details


class UnknownModelError(InputError):
    """No reachable peer has the requested model."""

    code = "model_not_found"


class NotFetchedError(UnknownModelError):
    """No peer has the model. The hub may have it, but the caller may not start downloads."""


class UnknownPeerError(InputError):
    """No known peer has the given id, name or leading digits of an id."""

    code = "not_found"


class NoInstanceError(InputError):
    """The model has no instance, and the node that got the request places none by itself."""

    code = "no_instance"


class ContextLengthError(InputError):
    """The prompt and the requested output do not fit the context limit."""

    code = "context_length_exceeded"


class UnknownAnswerError(InputError):
    """No peer keeps the answer that a request refers to, or the caller may not read it."""

    code = "response_not_found"


class KeyReusedError(InputError):
    """An Idempotency-Key was used before for another request; a key is valid for one request."""

    code = "idempotency_key_reused"

    def __init__(self, message: str, *, param: str | None = "Idempotency-Key") -> None:
        super().__init__(message, param=param)


class ModelError(MeshError):
    """A checkpoint or its architecture cannot be used; the message names the file and the tensor or key."""

    code = "model_unusable"


def with_remedy(text: str, remedy: str) -> str:
    """Joins a message and its remedy; returns the message alone if no remedy is known."""
    return f"{text}; {remedy}" if remedy else text


class FetchError(MeshError):
    """Files of a model could not be fetched. remedy: what a person can do. is_final: a retry does not help before
    that."""

    code = "fetch_failed"

    def __init__(self, message: str, *, remedy: str = "", is_final: bool = False) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.is_final = is_final

    @property
    def full(self) -> str:
        """The message and the remedy in one text, for readers who see nothing else of the error."""
        return with_remedy(str(self), self.remedy)


class PlacementError(MeshError):
    """No set of peers can hold the model; the message says what is needed, what is available, and what would help.

    The same is available as values: `reason` is a stable word (listed under "Refusals" in
    docs/how-it-works/placement.md), `have` the usable bytes of each considered peer.
    """

    code = "no_placement"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        need_bytes: int | None = None,
        have: abc.Iterable[tuple[str, int]] = (),
        remedy: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.need_bytes = need_bytes
        self.have = tuple(have)
        self.remedy = remedy

    @property
    def details(self) -> dict[str, object]:
        """The numbers as plain JSON values; empty if there are none."""
        if not self.reason:
            return {}
        have = [{"peer": peer_id, "usable_bytes": usable} for peer_id, usable in self.have]
        return {"reason": self.reason, "need_bytes": self.need_bytes, "have": have, "remedy": self.remedy}


class PendingPlacementError(PlacementError):
    """No plan was found now, but one may be found soon."""

    code = "pending"


class ReservationError(MeshError):
    """A peer refused its part of a plan. usable_bytes: memory that it could give, if memory was the reason. why: the
    code of a CrashLoopError or QuarantinedError, if one of these was."""

    code = "reservation_refused"

    def __init__(self, message: str, *, peer_id: str, usable_bytes: int | None = None, why: str = "") -> None:
        super().__init__(message)
        self.peer_id = peer_id
        self.usable_bytes = usable_bytes
        self.why = why


class CrashLoopError(MeshError):
    """Runners of a model crash repeatedly on every peer that could hold it; the message has the last cause."""

    code = "crash_loop"


class QuarantinedError(MeshError):
    """A model got stuck on every peer that could hold it, before it worked there; these peers wait before they
    retry."""

    code = "quarantined"


class EngineError(MeshError):
    """An engine failed while loading or computing."""

    code = "engine_error"


class RankLostError(EngineError):
    """A rank of a tensor group did not connect, is gone, or is stuck in a frame: the whole group ends."""

    code = "rank_lost"


class CanaryError(EngineError):
    """A tensor group computes another result than one machine would, or its ranks disagree; the message has layer and
    difference. The same peers may form a new group once; after a second failure they form none."""

    code = "canary_failed"


class TransportError(MeshError):
    """A peer or stream cannot be reached, or it broke the protocol."""

    code = "transport_error"


class StrangerError(TransportError):
    """The other end of a connection belongs to another mesh: its secret differs, or only one of the two has a
    secret."""


class PeerVersionError(TransportError):
    """A peer of another version does not know a call, a field of a request or an operation. Only that request fails."""

    code = "peer_version"


class OpenMeshError(MeshError):
    """A peer of an open mesh obeys this call only from its own machine, or only from a live peer; the message says what
    to type there."""

    code = "open_mesh"


class StageLostError(MeshError):
    """A stage of the ring that runs a request is gone."""

    code = "stage_lost"


class OverloadError(MeshError):
    """A bounded queue is full."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BodiesWaitError(OverloadError):
    """This node holds other large request bodies now."""

    code = "bodies_wait"


class MemoryPressureError(OverloadError):
    """A machine is short of memory, so a request or a placement is refused; the message has peer, numbers and
    remedy."""

    code = "memory_pressure"


class NoInvitationError(MeshError):
    """The code of an invitation is not valid: it was used, has expired, was withdrawn, or had too many wrong tries."""

    code = "no_invitation"


class WrongCodeError(MeshError):
    """The code of an invitation is wrong."""

    code = "wrong_code"


class NotReadyError(MeshError):
    """This node accepts no requests now."""

    code = "not_ready"


class NodeStoppingError(MeshError):
    """The entry peer of the request stops. Another peer accepts the request, and with an Idempotency-Key continues
    it."""

    code = "node_stopping"


class StopPendingError(MeshError):
    """The node stops or restarts already."""

    code = "stop_pending"


class NoStoreError(MeshError):
    """The mesh has no model store."""

    code = "no_store"


class WebToolsOffError(MeshError):
    """The operator of this node has not turned the web tools on, or named no search service."""

    code = "web_tools_off"


class DeadlineError(MeshError):
    """A wait ended without an answer."""

    code = "deadline_exceeded"


class SupersededError(MeshError):
    """The client sent the same request again with its Idempotency-Key; the request goes on in the new call."""

    code = "superseded"


class InstanceDeletedError(MeshError):
    """The instance that a request ran on, or waited for, was deleted on purpose."""

    code = "instance_deleted"


class CancelledRequestError(MeshError):
    """The request was cancelled by its owner."""

    code = "cancelled"


_BY_CODE: dict[str, type[MeshError]] = {
    cls.code: cls
    for cls in (
        MeshError,
        NoInvitationError,
        WrongCodeError,
        StopPendingError,
        InputError,
        UnknownModelError,
        NoInstanceError,
        ContextLengthError,
        UnknownAnswerError,
        KeyReusedError,
        ModelError,
        FetchError,
        PlacementError,
        PendingPlacementError,
        CrashLoopError,
        QuarantinedError,
        EngineError,
        RankLostError,
        CanaryError,
        TransportError,
        PeerVersionError,
        OpenMeshError,
        StageLostError,
        OverloadError,
        BodiesWaitError,
        MemoryPressureError,
        NotReadyError,
        NodeStoppingError,
        NoStoreError,
        WebToolsOffError,
        DeadlineError,
        SupersededError,
        InstanceDeletedError,
        CancelledRequestError,
    )
}


def error_from_code(code: str, message: str) -> MeshError:
    """Rebuilds an error that another process reported as `(code, message)`; an unknown code makes a MeshError."""
    error = _BY_CODE.get(code, MeshError)(message)
    error.code = code
    return error
