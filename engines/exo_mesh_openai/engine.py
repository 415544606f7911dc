"""The engine: one model of an OpenAI-style server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
from msgspec.structs import replace

from exo_mesh.domain.request import FinishReason
from exo_mesh.domain.whole.text_pieces import TextUsage
from exo_mesh.domain.whole.text_request import TextEnd, TextEvent, TextRequest
from exo_mesh.engine.contract import LoadProgress
from exo_mesh.engine.whole import WholeLoadRequest
from exo_mesh.errors import EngineError, InputError, MeshError, OverloadError, StageLostError
from exo_mesh_openai.body import Begin, Continuing, body_of, path_of, way_to_begin
from exo_mesh_openai.client import Deadlines, ServerClient
from exo_mesh_openai.failures import NoPrefillError
from exo_mesh_openai.kinds import OTHER, ServerKind
from exo_mesh_openai.look import OWN_SERVER
from exo_mesh_openai.options import OpenAiOptions, ServerAddress, read_options
from exo_mesh_openai.probing import (
    check_server,
    count_tokens,
    find_continuing,
    find_server,
    with_default_slots,
)
from exo_mesh_openai.progress import AnswerProgress
from exo_mesh_openai.sse import StreamEvent
from exo_mesh_openai.stream import ReplyStream, stalled
from exo_mesh_openai.supervised import SupervisedServer

LOAD_PROBE_S = 10.0


class OpenAiEngine:
    """Serves one model of a server. Holds no task of its own; each answer is one HTTP request.

    A stalled server counts as a lost stage, because the request can go on elsewhere.
    """

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self.slots = 1
        self.continues = False
        self._deadlines = deadlines
        self._client: ServerClient | None = None
        self._own: SupervisedServer | None = None
        self._kind: ServerKind = OTHER
        self._can = Continuing()
        self._served_name = ""

    async def load(self, request: WholeLoadRequest, progress: LoadProgress) -> None:
        """Find the model at its server, or start a llama-server for it. See WholeModelEngine.load."""
        options = read_options(request.options)
        try:
            if request.model.server == OWN_SERVER:
                await self._start_own(options, request.model.served_name, progress)
            else:
                address = _address(options, request.model.server)
                progress(0, 1)
                await self._connect(address, options.key, options, request.model.served_name)
                progress(1, 1)
        except BaseException:
            await self.close()
            raise

    async def _start_own(self, options: OpenAiOptions, served_name: str, progress: LoadProgress) -> None:
        if options.own is None:
            raise InputError("the option binary is missing: it names the llama-server to start", param="binary")
        self._own = SupervisedServer(options.own)
        address = await self._own.start(served_name, progress)
        await self._connect(address, self._own.key, options, served_name)

    async def _connect(self, address: ServerAddress, key: str, options: OpenAiOptions, served_name: str) -> None:
        deadlines = self._deadlines or Deadlines(first_token_s=options.first_token_s)
        self._client = ServerClient(address, key, deadlines)
        prober = ServerClient(address, key, replace(deadlines, probe_s=LOAD_PROBE_S))
        try:
            found = await find_server(prober)
            if self._own is not None and found.models:
                served_name = found.models[0].served_name
            model = with_default_slots(found.model(served_name, address.where), found.kind, options.slots)
            self._can = await find_continuing(prober, found.kind, served_name)
        except (StageLostError, OverloadError) as exc:
            raise EngineError(str(exc)) from exc
        finally:
            await prober.close()
        self._kind, self._served_name = found.kind, served_name
        self.slots, self.continues = model.slots, self._can.text

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """See WholeModelEngine.generate. The limit is for the whole answer, with its given beginning."""
        client, loop = self._loaded(), asyncio.get_running_loop()
        deadlines, first_token_s = client.deadlines, client.deadlines.first_token_s
        deadline_at = loop.time() + first_token_s
        begin, begun_tokens = way_to_begin(request, self._can), 0
        if begin is Begin.CONTINUE:
            begun_tokens = await count_tokens(client, self._kind, self._served_name, request.begun)
        if begun_tokens >= request.max_tokens:
            yield TextEnd(FinishReason.LENGTH, TextUsage(None, begun_tokens))
            return
        try:
            response = await self._ask(client, request, begin, begun_tokens, deadline_at)
        except NoPrefillError:
            if begin is not Begin.CONTINUE:
                raise
            begin, begun_tokens = Begin.REPEAT, 0
            response = await self._ask(client, request, begin, begun_tokens, deadline_at)
        stream = ReplyStream(client, response, deadline_at, first_token_s)
        try:
            answer = AnswerProgress(request, begin, client.address.where, begun_tokens)
            while not answer.is_over and (events := await self._read(stream, answer)) is not None:
                num_before, was_finished = answer.num_pieces, answer.is_finished
                for event in events:
                    for piece in answer.pieces_of(event):
                        yield piece
                if answer.is_finished and not was_finished:
                    stream.allow(deadlines.usage_s)
                elif answer.num_pieces > num_before:
                    stream.allow(deadlines.between_tokens_s)
            yield answer.end()
        finally:
            stream.close()

    async def check(self) -> None:
        """See WholeModelEngine.check."""
        client = self._loaded()
        if self._own is not None and (defect := self._own.defect()):
            raise EngineError(defect)
        try:
            await check_server(client, self._kind, self._served_name)
        except EngineError as exc:
            raise EngineError(str(await self._lost(exc))) from exc

    def memory_bytes(self) -> int:
        """Resident bytes of the llama-server that this engine has started; 0 for any other server."""
        return self._own.memory_bytes() if self._own is not None else 0

    async def close(self) -> None:
        """Close all connections, and end the llama-server that this engine has started."""
        if self._client is not None:
            await self._client.close()
        if self._own is not None:
            await self._own.close()

    def _loaded(self) -> ServerClient:
        if self._client is None:
            raise EngineError("the engine is not loaded")
        return self._client

    async def _ask(
        self, client: ServerClient, request: TextRequest, begin: Begin, begun_tokens: int, deadline_at: float
    ) -> aiohttp.ClientResponse:
        """The stream of the answer. Raises NoPrefillError if the server refuses to continue it."""
        body = body_of(self._kind, self._served_name, request, begin, self._can, begun_tokens)
        try:
            async with asyncio.timeout_at(deadline_at):
                return await client.stream(path_of(request), body)
        except TimeoutError as exc:
            raise stalled(client, client.deadlines.first_token_s) from exc
        except StageLostError as exc:
            raise await self._lost(exc) from exc

    async def _read(self, stream: ReplyStream, answer: AnswerProgress) -> list[StreamEvent] | None:
        """The next events; None at the end. After the end of the answer only token counts can be missing."""
        try:
            return await stream.read()
        except StageLostError as exc:
            if answer.is_finished:
                return None
            raise await self._lost(exc) from exc

    async def _lost(self, exc: MeshError) -> MeshError:
        """The error for a broken connection; the reason is known if the server is our own."""
        if self._own is not None and (defect := await self._own.wait_for_defect()):
            return StageLostError(defect)
        return exc


def _address(options: OpenAiOptions, where: str) -> ServerAddress:
    for server in options.servers:
        if server.where == where:
            return server
    raise InputError(f"the option servers does not name the server {where}", param="servers")
