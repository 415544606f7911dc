"""Finds out the kind of a model server, its models, and its abilities with each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.whole.text_pieces import TextPiece, text_of
from exo_mesh.errors import EngineError, MeshError, ModelError, OverloadError, StageLostError
from exo_mesh_openai.body import Continuing
from exo_mesh_openai.client import JsonReply, ServerClient
from exo_mesh_openai.failures import error_of_value
from exo_mesh_openai.kinds import (
    EXO_MESH,
    LLAMA_SERVER,
    LM_STUDIO,
    OLLAMA,
    OTHER,
    SGLANG,
    VLLM,
    ServerKind,
)

MAX_MODELS = 256
"""Models of one server that the mesh knows; a server with more has a catalogue of models that are not all on disk."""

MAX_NAME = 500

OLLAMA_CONTEXT = 4096
"""The smallest context that Ollama gives a model by default. It cuts longer prompts without saying so."""

_OWNERS: Mapping[str, ServerKind] = {"llamacpp": LLAMA_SERVER, "vllm": VLLM, "sglang": SGLANG, "exo-mesh": EXO_MESH}
"""What these servers write into `owned_by` of each model."""

_PROBE = "a text that a template repeats"


class FoundModel(msgspec.Struct, frozen=True):
    """A model as its server describes it. context_limit, slots: 0 if the server does not say."""

    served_name: str
    context_limit: int = 0
    slots: int = 0


class FoundServer(msgspec.Struct, frozen=True):
    """A model server that is up."""

    kind: ServerKind
    models: tuple[FoundModel, ...]

    def model(self, served_name: str, where: str) -> FoundModel:
        """The model of this name. Raises ModelError that lists the models of the server."""
        for model in self.models:
            if model.served_name == served_name:
                return model
        names = ", ".join(model.served_name for model in self.models[:10]) or "none"
        raise ModelError(f"the model server {where} has no model {served_name}; it has: {names}")


class ShownModels:
    """Replies of Ollama to /api/show, which do not change while a model stays the same. Bounded."""

    def __init__(self, most: int = 4 * MAX_MODELS) -> None:
        self._most = most
        self._shown: dict[tuple[str, str, object], Mapping[str, Any]] = {}

    async def show(self, client: ServerClient, name: str, created: object) -> Mapping[str, Any]:
        """What Ollama says of a model; {} if it says nothing. created: changes if the model does."""
        key = (client.address.base, name, created)
        if key not in self._shown:
            reply = await client.ask("/api/show", {"model": name})
            while len(self._shown) >= self._most:
                del self._shown[next(iter(self._shown))]
            self._shown[key] = _object(reply.value) if reply.status == 200 else {}
        return self._shown[key]


async def find_server(client: ServerClient, shown: ShownModels | None = None) -> FoundServer:
    """What the server is and has. Raises StageLostError if it does not answer, and EngineError if it refuses the key or
    is no OpenAI-style server."""
    reply = await client.ask("/v1/models")
    if reply.status != 200:
        raise error_of_value(reply.status, reply.value, client.address.where)
    entries = _object(reply.value).get("data")
    if not isinstance(entries, list):
        raise EngineError(f"the server {client.address.where} sent no list of models: it is no OpenAI-style server")
    known = [_object(entry) for entry in entries[:MAX_MODELS]]
    known = [entry for entry in known if isinstance(entry.get("id"), str) and 0 < len(entry["id"]) <= MAX_NAME]
    owners = {entry.get("owned_by") for entry in known}
    kind = next((kind for owner, kind in _OWNERS.items() if owner in owners), None)
    if kind is LLAMA_SERVER:
        return FoundServer(kind, await _of_llama_server(client, known))
    if kind is EXO_MESH:
        return FoundServer(kind, _of_a_mesh(known))
    if kind is VLLM or kind is SGLANG:
        return FoundServer(kind, _plain(known))
    return await _by_their_own_api(client, known, shown or ShownModels())


async def check_server(client: ServerClient, kind: ServerKind, served_name: str) -> None:
    """Raises EngineError if the server does not have the model now, or does not answer."""
    try:
        if kind is LLAMA_SERVER:
            reply = await client.ask("/health")
            if reply.status != 200:
                raise error_of_value(reply.status, reply.value, client.address.where)
            return
        reply = await client.ask("/v1/models")
        if reply.status != 200:
            raise error_of_value(reply.status, reply.value, client.address.where)
        entries = _object(reply.value).get("data")
        if not any(_object(entry).get("id") == served_name for entry in _list(entries)):
            raise EngineError(f"the model server {client.address.where} has no model {served_name} any more")
    except EngineError:
        raise
    except MeshError as exc:
        raise EngineError(str(exc)) from exc


async def find_continuing(client: ServerClient, kind: ServerKind, served_name: str) -> Continuing:
    """What the server can continue. llama-server is asked to render a begun answer, because that depends on its version
    and on the model's template; other kinds either can or cannot."""
    if kind.continues == "none":
        return Continuing()
    if kind is not LLAMA_SERVER:
        return Continuing(text=True)
    text, reasoning = await asyncio.gather(
        _renders(client, served_name, {"content": _PROBE}),
        _renders(client, served_name, {"content": "", "reasoning_content": _PROBE}),
    )
    return Continuing(text, text and reasoning)


async def count_tokens(client: ServerClient, kind: ServerKind, served_name: str, begun: Sequence[TextPiece]) -> int:
    """Tokens of the beginning of an answer, by the server's tokenizer. A server that does not count leaves the number
    of pieces, of which each is a token as a rule."""
    text = text_of(begun, "reasoning") + text_of(begun)
    body = {"content": text, "prompt": text, "model": served_name, "add_special_tokens": False, "add_special": False}
    try:
        value = _object((await client.ask("/tokenize", body)).value) if kind.continues != "none" else {}
    except (StageLostError, EngineError):
        value = {}
    tokens = value.get("tokens")
    return len(tokens) if isinstance(tokens, list) else sum(bool(piece.text) for piece in begun)


async def _renders(client: ServerClient, served_name: str, begun: Mapping[str, str]) -> bool:
    """Whether llama-server renders a begun message so that it stays open."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", **begun}]
    body = {
        "model": served_name,
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    try:
        reply = await client.ask("/apply-template", body)
    except StageLostError:
        return False
    prompt = _object(reply.value).get("prompt")
    return reply.status == 200 and isinstance(prompt, str) and prompt.endswith(_PROBE)


async def _of_llama_server(client: ServerClient, entries: Iterable[Mapping[str, Any]]) -> tuple[FoundModel, ...]:
    """The models of a llama-server: usually one, whose context and slots /props knows."""
    reply = await client.ask("/props")
    if reply.status == 503:
        raise OverloadError(f"the model server {client.address.where} is loading its model")
    props = _object(reply.value) if reply.status == 200 else {}
    context = _number(_object(props.get("default_generation_settings")).get("n_ctx"))
    slots = _number(props.get("total_slots"))
    return tuple(
        FoundModel(entry["id"], context or _number(_object(entry.get("meta")).get("n_ctx_train")), slots)
        for entry in entries
    )


async def _by_their_own_api(client: ServerClient, entries: list[Mapping[str, Any]], shown: ShownModels) -> FoundServer:
    """Ollama and LM Studio have an API of their own that says more. A server without either is of the kind OTHER."""
    version, studio = await asyncio.gather(_ask(client, "/api/version"), _ask(client, "/api/v0/models"))
    if isinstance(_object(studio.value).get("data"), list):
        return FoundServer(LM_STUDIO, _of_lm_studio(entries, _list(studio.value["data"])))
    if isinstance(_object(version.value).get("version"), str):
        return FoundServer(OLLAMA, await _of_ollama(client, entries, shown))
    return FoundServer(OTHER, _plain(entries))


async def _ask(client: ServerClient, path: str) -> JsonReply:
    """As ask; a server that knows no such path may even hang up."""
    try:
        return await client.ask(path)
    except (StageLostError, EngineError):
        return JsonReply(0, None)


def _plain(entries: Iterable[Mapping[str, Any]]) -> tuple[FoundModel, ...]:
    return tuple(FoundModel(entry["id"], _number(entry.get("max_model_len"))) for entry in entries)


def _of_a_mesh(entries: Iterable[Mapping[str, Any]]) -> tuple[FoundModel, ...]:
    """Models that the nodes of another mesh compute. Models that it only passes on to model servers are left out: two
    meshes that name each other would pass a request on for ever."""
    return tuple(
        FoundModel(entry["id"], _number(entry.get("context_length"))) for entry in entries if not entry.get("served_by")
    )


def _of_lm_studio(entries: Iterable[Mapping[str, Any]], details: Iterable[object]) -> tuple[FoundModel, ...]:
    """Models that write text, with the context that they are loaded with, else their longest."""
    known = {str(detail.get("id")): detail for detail in map(_object, details)}
    found = []
    for entry in entries:
        detail = known.get(entry["id"], {})
        if detail.get("type", "llm") in ("llm", "vlm"):
            context = _number(detail.get("loaded_context_length")) or _number(detail.get("max_context_length"))
            found.append(FoundModel(entry["id"], context))
    return tuple(found)


async def _of_ollama(
    client: ServerClient, entries: Iterable[Mapping[str, Any]], shown: ShownModels
) -> tuple[FoundModel, ...]:
    """Models that write text, with their loaded context, else the context that they will get."""
    running = {
        str(entry.get("name")): _number(entry.get("context_length"))
        for entry in map(_object, _list(_object((await _ask(client, "/api/ps")).value).get("models")))
    }
    found = []
    for entry in entries:
        details = await shown.show(client, entry["id"], entry.get("created"))
        capabilities = details.get("capabilities")
        if isinstance(capabilities, list) and "completion" not in capabilities:
            continue
        found.append(FoundModel(entry["id"], running.get(entry["id"]) or _ollama_context(details)))
    return tuple(found)


def _ollama_context(details: Mapping[str, Any]) -> int:
    """The context that Ollama gives a model when it loads it: what its Modelfile says, else the smallest default, and
    never more than the model was trained for."""
    info = _object(details.get("model_info"))
    trained = max((_number(value) for key, value in info.items() if key.endswith(".context_length")), default=0)
    parameters = details.get("parameters")
    words = [line.split() for line in parameters.splitlines()] if isinstance(parameters, str) else []
    chosen = next(
        (int(line[1]) for line in words if len(line) == 2 and line[0] == "num_ctx" and line[1].isdecimal()), 0
    )
    wanted = chosen or OLLAMA_CONTEXT
    return min(wanted, trained) if trained else wanted


def with_default_slots(model: FoundModel, kind: ServerKind, slots: int) -> FoundModel:
    """The model with a number of slots: its server's, else the options', else the default of the kind."""
    return replace(model, slots=model.slots or slots or kind.slots)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value[:MAX_MODELS] if isinstance(value, list) else []


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40 else 0
