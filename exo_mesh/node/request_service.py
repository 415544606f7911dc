"""Runs and cancels the requests that enter here, and finds requests of other entry peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from exo_mesh.domain.request import GenerateRequest, RequestEvent
from exo_mesh.errors import NodeStoppingError, NotReadyError
from exo_mesh.mesh.membership.port import raise_bugs
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.rings.serving.calls import cancel
from exo_mesh.rings.serving.wiring import ServingParts


class RequestService:
    """The requests of clients. streams: the running ones, also for callers other than the client. kept_answers: the
    finished ones that later requests may refer to. phase: see Health.describe."""

    def __init__(
        self, membership: Membership, host: StageHost, serving: ServingParts, phase: Callable[[], str]
    ) -> None:
        self._membership = membership
        self._host = host
        self._serving = serving
        self._phase = phase
        self.streams = serving.streams
        self.kept_answers = serving.kept

    def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        """Runs a request on an instance of the model, and places an instance if there is none.

        Raises MeshErrors at any point; ends after the event whose `finish` is set. Closing the iterator cancels the
        request.
        """
        if self._phase() == "stopping":
            raise NodeStoppingError(
                "this node is stopping and accepts no new requests; send the request to another peer"
            )
        if self._host.draining:
            raise NotReadyError("this node is draining and accepts no new requests; send the request to another peer")
        return self._serving.router.generate(model, request)

    async def cancel(self, request_id: str, key_id: str | None = None) -> bool:
        """Cancels a request at any reachable peer, by any id that its client saw; False if it is unknown. With a
        key_id, a request with another API key counts as unknown."""
        calls, everybody = self._membership.calls, self._membership.everybody
        answers = await asyncio.gather(  # a client may use one x-request-id at several peers
            *(cancel(calls, peer.id, request_id, key_id) for peer in everybody), return_exceptions=True
        )
        raise_bugs(answers)
        return any(answer is True for answer in answers)
