"""The driver's answers to the calls of entry peers: Generate streams token ids in answer to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import replace
from functools import lru_cache

from exo_mesh.domain.plan import Plan
from exo_mesh.domain.request import GenerateRequest, Prefilled, PrefixReport, PromptLogprobs, Queued, Tokens
from exo_mesh.errors import ContextLengthError, InputError, MeshError, OverloadError, StageLostError
from exo_mesh.rings.runner.inbox import Cancel, Submit, Unpark
from exo_mesh.rings.runner.mailbox import CallerUpdate, Drawn, DriverNews, Laps, Mailbox
from exo_mesh.rings.runner.picture_store import PictureStore
from exo_mesh.rings.runner.worker import Worker
from exo_mesh.wire.calls import GENERATE, PUT_IMAGE, RECALL, UPLOAD_S
from exo_mesh.wire.driver_codec import (
    PIECE,
    event_to_proto,
    prefix_to_proto,
    prompt_to_proto,
    request_from_proto,
    specs_from_proto,
    traces_to_proto,
)
from exo_mesh.wire.peer_call import AnyAnswer, StreamAnswer, UploadAnswer, answer
from exo_mesh.wire.plan_codec import ballot_from_proto, ballot_to_proto
from exo_mesh.wire.proto import driver_pb2 as pb
from exo_mesh.wire.unknown_fields import require_known


class DriverService:
    """Passes requests to the worker, and its answers to the callers."""

    def __init__(self, plan: Plan, worker: Worker) -> None:
        self._plan = plan
        self._worker = worker
        self._pictures = PictureStore()

    def change(self, plan: Plan) -> None:
        """Accept requests for this plan from now on, and refuse those for the plan before; running calls continue."""
        self._plan = plan

    def answers(self) -> list[AnyAnswer]:
        """The answers to the calls of entry peers."""
        return [
            StreamAnswer(GENERATE, self._generate),
            answer(RECALL, self._recall),
            UploadAnswer(PUT_IMAGE, self._put_image),
        ]

    async def _generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateEvents, None]:
        """Ends after the event with a finish or the message with an error; a cancelled call frees the sequence."""
        try:
            wanted = self._checked(request)
        except MeshError as exc:
            yield events_message([CallerUpdate(self._plan.ballot, exc)])
            return
        mailbox = Mailbox()
        self._worker.rest.used()
        self._worker.inbox.put_nowait(Submit(wanted, mailbox))
        try:
            while True:
                message = events_message(await mailbox.next())
                if mailbox.parked:
                    self._worker.inbox.put_nowait(Unpark(wanted.request_id, mailbox))
                yield message
                if message.error_code or any(event.finish for event in message.events):
                    return
        finally:
            # after a regular end the driver no longer knows the request, and this changes nothing
            self._worker.inbox.put_nowait(Cancel(wanted.request_id, mailbox))

    async def _recall(self, request: pb.RecallRequest) -> pb.RecallReply:
        """Says whether an answer is kept here, and how many tokens of it."""
        driver = self._worker.driver
        num_tokens = driver.replays.num_tokens(request.key_hash) if driver is not None else None
        return pb.RecallReply(found=num_tokens is not None, num_tokens=num_tokens or 0)

    async def _put_image(self, pieces: AsyncIterator[pb.ImagePiece]) -> pb.PutImageReply:
        """Keeps the pixels of an image for the request that follows."""
        try:
            async with asyncio.timeout(UPLOAD_S):
                await self._pictures.receive(PIECE.read(piece) async for piece in pieces)
        except TimeoutError as exc:
            raise InputError("the pixels of an image came too slowly") from exc
        return pb.PutImageReply()

    def _checked(self, request: pb.GenerateRequest) -> GenerateRequest:
        plan = self._plan
        ballot = ballot_from_proto(request.ballot)
        if request.instance_id != plan.instance_id or ballot != plan.ballot:
            raise StageLostError(f"instance {request.instance_id} at ballot {ballot} is not in force on this runner")
        require_known(request)
        try:
            wanted = request_from_proto(request)
            if request.images:
                wanted = replace(wanted, pictures=self._pictures.pictures(specs_from_proto(request.images)))
        except ValueError as exc:
            raise InputError(str(exc)) from exc
        if len(wanted.prompt_ids) + wanted.max_tokens > plan.context_limit:
            raise ContextLengthError(
                f"{len(wanted.prompt_ids)} prompt tokens and {wanted.max_tokens} output tokens exceed the context "
                f"limit of {plan.context_limit} tokens"
            )
        return wanted


def events_message(updates: Iterable[CallerUpdate]) -> pb.GenerateEvents:
    """One message with all updates in order, under the ballot of the last one. Written by hand: the codec takes twice
    as long for each token."""
    message = pb.GenerateEvents()
    for update in updates:
        news = update.news
        if type(news) is not Drawn:
            _add(news, message)
        elif news.is_plain:
            message.events.add(index=update.index, token_id=news.draws[0].token_id)
        else:
            message.events.extend(map(event_to_proto, news.events(update.index)))
    message.ballot.CopyFrom(_ballot(update.ballot))
    return message


_ballot = lru_cache(maxsize=8)(ballot_to_proto)


def _add(news: DriverNews, message: pb.GenerateEvents) -> None:
    match news:
        case Tokens(events):
            message.events.extend(map(event_to_proto, events))
        case Prefilled(num_tokens):
            message.prefilled = num_tokens or message.prefilled
        case Queued(place, length, wait_s):
            message.queued, message.queue_length, message.wait_s = place, length, wait_s
        case PromptLogprobs(entries):
            message.prompt.extend(prompt_to_proto(entries))
        case Laps(frames):
            message.trace.extend(traces_to_proto(frames))
        case PrefixReport():
            message.prefix.CopyFrom(prefix_to_proto(news))
        case MeshError():
            message.error_code, message.error_message = news.code, str(news)
            message.wait_s = news.retry_after_s if isinstance(news, OverloadError) else 0.0
