"""The contract of whole-model engines: they take a whole model, sample by themselves, and talk text.

Such an engine usually speaks to a model server beside the node. Its calls are coroutines on the event loop of a runner
process, and must not block it. exo_mesh/engine/contract.py has the other contract, of engines that run a layer range.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from exo_mesh.domain.whole.served import ServedModel, ServerReport
from exo_mesh.domain.whole.text_request import TextEvent, TextRequest
from exo_mesh.engine.contract import Availability, LoadProgress


class WholeLoadRequest(msgspec.Struct, frozen=True):
    """The model that an engine must make ready. options: as for the engine's `ModelServer.look`."""

    model: ServedModel
    options: Mapping[str, str] = msgspec.field(default_factory=dict)


class WholeModelEngine(Protocol):
    """Serves one whole model. All calls come from one event loop, after `load` has returned.

    slots: the most requests at once; the caller queues further ones. continues: whether `generate` can go on after the
    beginning of an answer. For an engine that cannot, the caller asks for the whole answer again, and ends the request
    with an error if the new answer does not begin with what the client already has.
    """

    slots: int
    continues: bool

    async def load(self, request: WholeLoadRequest, progress: LoadProgress) -> None:
        """Make the model ready, and set `slots` and `continues`. Raises ModelError if the server does not have the
        model, or EngineError."""

    def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Yield the pieces of an answer as they come, and a TextEnd at the end. Closing the generator early stops the
        computation if the server can.

        Raises InputError or ContextLengthError if the request cannot be served as it is, OverloadError if the server is
        busy, EngineError if it failed, and StageLostError if it is gone: the request then continues elsewhere.
        """

    async def check(self) -> None:
        """Raises EngineError, with the reason, if the model cannot serve requests now. Called every few seconds."""

    def memory_bytes(self) -> int:
        """Bytes that this engine's own processes take on this machine; 0 if the server is not its own."""

    async def close(self) -> None:
        """Free all; the object is not used afterwards."""


class WholeModelProvider(Protocol):
    """The object through which the core finds and creates a whole-model engine, with the members of EngineProvider."""

    name: str
    kind: Literal["whole-model"]

    def availability(self) -> Availability: ...

    def supports(self, architecture: str) -> bool:
        """Whether it serves models of this architecture: SERVED_ARCHITECTURE for models of a server."""

    def version(self) -> str: ...

    def create(self) -> WholeModelEngine:
        """Make an engine; called once, in a runner process."""


@runtime_checkable
class ModelServer(Protocol):
    """The part of a whole-model provider that finds out which models its servers have. The node calls it every few
    seconds on its own event loop, so its imports must be cheap."""

    async def look(self, options: Mapping[str, str]) -> Sequence[ServerReport]:
        """One report for each server that the options name, or that is found on this machine; () if there is none.

        A server that does not answer within 2 s has a report with an error. Raises InputError for bad options.
        """
