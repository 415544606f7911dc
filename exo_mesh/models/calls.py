"""The calls about models and their files: one row each, this node's answers, and what peers answer, as values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from msgspec.structs import replace

from exo_mesh.domain.agreement import RangeReport, Report, TensorShape
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.spans import Spans, common, merged
from exo_mesh.engine.contract import ModelSurvey
from exo_mesh.errors import InputError, MeshError, TransportError, error_from_code
from exo_mesh.mesh.membership.peers import MAX_PEERS
from exo_mesh.mesh.membership.port import Calls
from exo_mesh.models.card_json import card_from_json, card_to_json, survey_from_json, survey_to_json
from exo_mesh.models.local_files import Holding, Layers, Wants
from exo_mesh.models.self_tested import SelfTested
from exo_mesh.weights.fetched import FetchedFile
from exo_mesh.wire.call_access import ANYBODY, owner
from exo_mesh.wire.channel_options import MAX_MESSAGE_BYTES
from exo_mesh.wire.incoming import MAX_BYTES
from exo_mesh.wire.peer_call import CALL_S, PeerCall, PeerStream
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import plan_pb2

SURVEY_S = 120.0
"""Deadline for a node that first has to import an engine's library and trace a model to find its legal cuts."""

SELF_TEST_S = 180.0
"""Deadline for a node that imports an engine's library, writes a few layers in float32 and computes them."""

INTRODUCE_S = 120.0
"""Deadline for a peer that copies the tokenizer and the headers of a model: up to 150 MB, and the link may be Wi-Fi."""

TEXT_FILES_S = 60.0
"""Deadline for reading text files: a tokenizer may have 20 MB, and the link may be Wi-Fi."""

MAX_SPANS = 1024
"""Most spans of one file. A stage of 80 layers has about this many; the fetch plan cuts the file at each of them."""

# The deadline of a question about an engine is SURVEY_S longer.
DESCRIBE_MODEL = PeerCall(
    "DescribeModel",
    pb.DescribeModelRequest,
    pb.DescribeModelReply,
    ANYBODY,
    deadline_s=CALL_S,
    reply_bytes=4 * MAX_BYTES,
)
# The reply has samples of the outputs of up to eight layer ranges.
SELF_TEST = PeerCall(
    "SelfTest",
    pb.SelfTestRequest,
    pb.SelfTestReply,
    ANYBODY,
    deadline_s=SELF_TEST_S + CALL_S,
    reply_bytes=MAX_MESSAGE_BYTES,
)
# A message has a chunk of 1 MiB and the name of its file.
READ_TEXT_FILES = PeerStream(
    "ReadTextFiles",
    pb.ReadTextFilesRequest,
    pb.TextFile,
    ANYBODY,
    deadline_s=TEXT_FILES_S,
    reply_bytes=MAX_BYTES + 64 * 1024,
)
# In an open mesh from peers only, never from the hub: see FetchesForPeers.
INTRODUCE = PeerCall("Introduce", pb.IntroduceRequest, pb.IntroduceReply, ANYBODY, deadline_s=INTRODUCE_S)
DESCRIBE_FILES = PeerCall(
    "DescribeFiles",
    pb.DescribeFilesRequest,
    pb.DescribeFilesReply,
    ANYBODY,
    deadline_s=CALL_S,
    reply_bytes=4 * MAX_BYTES,
)
# The same as for INTRODUCE.
PULL = PeerCall("Pull", pb.PullRequest, pb.PullReply, ANYBODY, deadline_s=INTRODUCE_S)
DROP_MODEL = PeerCall(
    "DropModel", pb.DropModelRequest, pb.DropModelReply, owner("exo-mesh rm MODEL"), deadline_s=2 * CALL_S
)
DELETE_CARD = PeerCall(
    "DeleteCard", pb.DeleteCardRequest, pb.DeleteCardReply, owner("exo-mesh models delete MODEL"), deadline_s=CALL_S
)


async def answer_describe_model(
    file_card: Callable[[str], ModelCard],
    survey_here: Callable[[ModelCard, str], Awaitable[ModelSurvey]],
    request: pb.DescribeModelRequest,
) -> pb.DescribeModelReply:
    """With an engine, the reply also has what that engine says about the model. file_card: see Catalogue. survey_here:
    see Surveys."""
    try:
        card = await asyncio.to_thread(file_card, request.model)
    except MeshError as exc:
        return pb.DescribeModelReply(found=False, error_code=exc.code, error_message=str(exc))
    if not request.engine:
        return pb.DescribeModelReply(found=True, card_json=card_to_json(card))
    survey = await survey_here(card, request.engine)
    cut = replace(card, legal_cuts=survey.legal_cuts)  # for peers of older versions
    return pb.DescribeModelReply(found=True, card_json=card_to_json(cut), survey_json=survey_to_json(survey))


async def describe_model(calls: Calls, peer_id: str, model: str) -> ModelCard:
    """A node's card of a model. Raises UnknownModelError or ModelError if it has none."""
    reply = await calls.call(peer_id, DESCRIBE_MODEL, pb.DescribeModelRequest(model=model))
    if not reply.found:
        raise error_from_code(reply.error_code, reply.error_message)
    return card_from_json(reply.card_json)


async def survey_model(calls: Calls, peer_id: str, card: ModelCard, engine: str) -> ModelSurvey | None:
    """What an engine of a node says about a model; None if the node has other files of that name."""
    request = pb.DescribeModelRequest(model=card.name, engine=engine)
    reply = await calls.call(peer_id, DESCRIBE_MODEL, request, SURVEY_S + CALL_S)
    theirs = card_from_json(reply.card_json)
    if theirs.digest != card.digest:
        return None
    if not reply.survey_json:  # a peer of an older version sends cuts only
        return ModelSurvey(theirs.legal_cuts)
    return survey_from_json(reply.survey_json, card.num_layers)


async def answer_self_test(
    run: Callable[[str, str, str, Sequence[tuple[int, int]]], Awaitable[SelfTested]], request: pb.SelfTestRequest
) -> pb.SelfTestReply:
    """run: see SelfTests."""
    ranges = [(item.start, item.stop) for item in request.ranges]
    found = await run(request.model, request.model_digest, request.engine, ranges)
    results = [
        pb.RangeResult(
            range=pb.LayerRange(start=result.range[0], stop=result.range[1]),
            outputs=[pb.NamedValues(name=name, values=values) for name, values in result.outputs.items()],
            inputs=[_spec(*spec) for spec in result.inputs],
            given=[_spec(*spec) for spec in result.given],
        )
        for result in found.results
    ]
    return pb.SelfTestReply(version=found.version, native_dtype=found.native_dtype, results=results)


def _spec(name: str, dtype: str, item_shape: Sequence[int]) -> plan_pb2.TensorSpec:
    return plan_pb2.TensorSpec(name=name, dtype=dtype, item_shape=item_shape)


async def self_test(
    calls: Calls, peer_id: str, card: ModelCard, engine: str, ranges: Sequence[tuple[int, int]], build: str
) -> Report:
    """The outputs of an engine of a node for these layers. build: names the engine in the report. Raises TransportError
    if the values are not float32."""
    import numpy as np

    request = pb.SelfTestRequest(
        model=card.name,
        model_digest=card.digest,
        engine=engine,
        ranges=[pb.LayerRange(start=start, stop=stop) for start, stop in ranges],
    )
    reply = await calls.call(peer_id, SELF_TEST, request)
    found = []
    for result in reply.results:
        if any(len(values.values) % 4 for values in result.outputs):
            raise TransportError(f"a self-test of {build} has values that are not float32")
        outputs = {values.name: np.frombuffer(values.values, "<f4") for values in result.outputs}
        inputs, given = (tuple(_shape(spec) for spec in specs) for specs in (result.inputs, result.given))
        found.append(RangeReport(result.range.start, result.range.stop, outputs, inputs, given))
    return Report(build, reply.native_dtype, tuple(found))


def _shape(spec: plan_pb2.TensorSpec) -> TensorShape:
    return spec.name, tuple(spec.item_shape)


async def answer_read_text_files(
    local_dir: Callable[[str], Path], request: pb.ReadTextFilesRequest
) -> AsyncGenerator[pb.TextFile, None]:
    """local_dir: see Catalogue."""
    from exo_mesh.models.text_sending import text_files

    model_dir = await asyncio.to_thread(local_dir, request.model)
    files = text_files(model_dir, images=request.takes_image_files, later=request.takes_later_text_files)
    async with aclosing(files):
        async for name, chunk in files:
            yield pb.TextFile(name=name, chunk=chunk)


async def read_text_files(calls: Calls, peer_id: str, model: str) -> AsyncGenerator[tuple[str, bytes], None]:
    """The tokenizer and configuration files of a node's model, in chunks, each with the name of its file."""
    request = pb.ReadTextFilesRequest(model=model, takes_image_files=True, takes_later_text_files=True)
    async with aclosing(calls.stream(peer_id, READ_TEXT_FILES, request)) as items:
        async for item in items:
            yield item.name, item.chunk


async def answer_introduce(
    introduce_here: Callable[[str, str, str, str, bool], Awaitable[None]], request: pb.IntroduceRequest, caller: str
) -> pb.IntroduceReply:
    """introduce_here: see FetchesForPeers."""
    await introduce_here(request.model, request.model_digest, request.repo, request.revision, not caller)
    return pb.IntroduceReply()


async def introduce(
    calls: Calls, peer_id: str, model: str, digest: str = "", *, repo: str = "", revision: str = ""
) -> None:
    """Let a node get config, tokenizer and headers of a model from its peers if it lacks them; with `repo`, from that
    repository of the hub."""
    request = pb.IntroduceRequest(model=model, model_digest=digest, repo=repo, revision=revision)
    await calls.call(peer_id, INTRODUCE, request)


async def answer_pull(
    pull_here: Callable[[str, str, Wants, str, bool], Awaitable[None]], request: pb.PullRequest, caller: str
) -> pb.PullReply:
    """pull_here: see FetchesForPeers."""
    wants = wants_from_proto(request.wants)
    await pull_here(request.model, request.model_digest, wants, request.hub_user, not caller)
    return pb.PullReply()


async def pull(calls: Calls, peer_id: str, model: str, digest: str, wants: Wants, hub_user: str = "") -> None:
    """Let a node start to fetch its part of `wants`. hub_user: see FetchNeed."""
    request = pb.PullRequest(model=model, model_digest=digest, wants=wants_to_proto(wants), hub_user=hub_user)
    await calls.call(peer_id, PULL, request)


async def answer_drop_model(
    drop: Callable[[str, bool, bool], Awaitable[int | None]], request: pb.DropModelRequest
) -> pb.DropModelReply:
    """drop: see Downloads."""
    freed = await drop(request.model, request.files, request.staged)
    return pb.DropModelReply(found=freed is not None, freed_bytes=freed or 0)


async def drop_model(calls: Calls, peer_id: str, model: str, *, files: bool, staged: bool = False) -> int | None:
    """Let a node stop fetching a model, and delete what was fetched if `files`; with `staged`, delete the staged copies
    of all models that nothing uses. Returns the bytes freed, or None if there was nothing to drop."""
    reply = await calls.call(peer_id, DROP_MODEL, pb.DropModelRequest(model=model, files=files, staged=staged))
    return reply.freed_bytes if reply.found else None


async def answer_delete_card(
    delete_own: Callable[[str], Awaitable[bool]], request: pb.DeleteCardRequest
) -> pb.DeleteCardReply:
    """delete_own: see CardShelf."""
    return pb.DeleteCardReply(found=await delete_own(request.model))


async def delete_card(calls: Calls, peer_id: str, model: str) -> bool:
    """Delete the custom model card that a node has of a model. False if it has none."""
    return (await calls.call(peer_id, DELETE_CARD, pb.DeleteCardRequest(model=model))).found


async def answer_describe_files(
    holding_of: Callable[[str], Awaitable[Holding | None]], request: pb.DescribeFilesRequest
) -> pb.DescribeFilesReply:
    """holding_of: see Downloads.holding."""
    holding = await holding_of(request.model)
    return pb.DescribeFilesReply(found=False) if holding is None else holding_to_proto(holding)


async def describe_files(calls: Calls, peer_id: str, model: str) -> Holding | None:
    """Which bytes of a model a node has; None if it has none."""
    reply = await calls.call(peer_id, DESCRIBE_FILES, pb.DescribeFilesRequest(model=model))
    return holding_from_proto(reply) if reply.found else None


def holding_to_proto(holding: Holding) -> pb.DescribeFilesReply:
    return pb.DescribeFilesReply(
        found=True,
        model_digest=holding.digest,
        repo=holding.repo,
        revision=holding.revision,
        files=[
            pb.FileSpans(
                name=name, size=file.size, sha256=file.sha256, spans=[edge for s in file.present for edge in s]
            )
            for name, file in holding.files.items()
        ],
    )


def holding_from_proto(reply: pb.DescribeFilesReply) -> Holding:
    """Reads a peer's files. Files that are cut into too many spans are ignored."""
    files = {
        file.name: FetchedFile(file.size, file.sha256[:64], list(_spans(file)))
        for file in reply.files
        if len(file.spans) <= 2 * MAX_SPANS
    }
    return Holding(reply.model_digest, reply.repo[:200], reply.revision[:200], files)


def wants_to_proto(wants: Wants) -> list[pb.PeerLayers]:
    return [
        pb.PeerLayers(peer=peer_id, whole=True)
        if layers is None
        else pb.PeerLayers(peer=peer_id, layers=pb.LayerRange(start=layers[0], stop=layers[1]))
        for peer_id, layers in wants.items()
    ]


def wants_from_proto(messages: Sequence[pb.PeerLayers]) -> dict[str, Layers]:
    """Reads what peers want. Raises InputError for an empty layer range, or for more peers than a mesh may have."""
    if len(messages) > MAX_PEERS:
        raise InputError(f"files are wanted for {len(messages)} peers; a mesh has at most {MAX_PEERS}")
    for one in messages:
        if not one.whole and one.layers.start >= one.layers.stop:
            raise InputError(f"layers {one.layers.start} to {one.layers.stop} are wanted, which is an empty range")
    return {one.peer: None if one.whole else (one.layers.start, one.layers.stop) for one in messages}


def _spans(file: pb.FileSpans) -> Spans:
    """Puts spans in the required form: in order, separate, inside the file."""
    pairs = zip(file.spans[::2], file.spans[1::2], strict=False)
    return common(merged(pairs), ((0, file.size),))
