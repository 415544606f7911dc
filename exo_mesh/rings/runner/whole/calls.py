"""The answers of a whole-model instance to the calls of a ring's driver."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from exo_mesh.domain.request import GenerateRequest
from exo_mesh.errors import InputError, MeshError, StageLostError
from exo_mesh.rings.runner.calls import events_message
from exo_mesh.rings.runner.mailbox import CallerUpdate
from exo_mesh.rings.runner.whole.driver import WholeDriver
from exo_mesh.wire.calls import GENERATE, RECALL
from exo_mesh.wire.driver_codec import request_from_proto
from exo_mesh.wire.peer_call import AnyAnswer, StreamAnswer, answer
from exo_mesh.wire.plan_codec import ballot_from_proto
from exo_mesh.wire.proto import driver_pb2 as pb
from exo_mesh.wire.unknown_fields import require_known


class WholeDriverService:
    """Passes requests to the driver, and its answers to the callers."""

    def __init__(self, driver: WholeDriver) -> None:
        self._driver = driver

    def answers(self) -> list[AnyAnswer]:
        """The answers to the calls of entry peers; such a driver takes no images."""
        return [StreamAnswer(GENERATE, self._generate), answer(RECALL, self._recall)]

    async def _generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateEvents, None]:
        """Ends after the event with a finish or the message with an error; a cancelled call stops the engine."""
        try:
            wanted = self._checked(request)
        except MeshError as exc:
            yield events_message([CallerUpdate(self._driver.plan.ballot, exc)])
            return
        async with aclosing(self._driver.answer(wanted)) as updates:
            async for update in updates:
                yield events_message([update])

    async def _recall(self, request: pb.RecallRequest) -> pb.RecallReply:
        """Says whether an answer is kept here, and how much of it."""
        num_events = self._driver.replays.num_tokens(request.key_hash)
        return pb.RecallReply(found=num_events is not None, num_tokens=num_events or 0)

    def _checked(self, request: pb.GenerateRequest) -> GenerateRequest:
        plan = self._driver.plan
        ballot = ballot_from_proto(request.ballot)
        if request.instance_id != plan.instance_id or ballot != plan.ballot:
            raise StageLostError(f"instance {request.instance_id} at ballot {ballot} is not in force on this runner")
        require_known(request)
        try:
            return request_from_proto(request)
        except ValueError as exc:
            raise InputError(str(exc)) from exc
