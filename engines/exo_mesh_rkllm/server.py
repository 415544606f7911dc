"""The calls of a RKLLAMA server besides answers: which interface it has, its models, loading and unloading."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from exo_mesh.base.printable import printable
from exo_mesh.errors import EngineError, ModelError, StageLostError
from exo_mesh_rkllm.dialects import Dialect
from exo_mesh_rkllm.exchange import connection_lost
from exo_mesh_rkllm.options import MOST_MODELS
from exo_mesh_rkllm.replies import ALREADY_LOADED, refusal

CONNECT_S = 5.0
CALL_S = 10.0
"""Deadline of a call that computes nothing."""

LOAD_S = 180.0
"""Deadline of loading a model. 8 GB from an SD card take some 100 s."""

MAX_REPLY_BYTES = 1_048_576
MAX_MODEL_NAME = 200

_WELCOME = re.compile(r"rk-?llama", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:[A-Za-z0-9.\-_]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_LISTS = {Dialect.OLLAMA: "/api/tags", Dialect.OPENAI: "/v1/models", Dialect.NATIVE: "/models"}


class BoardReply(msgspec.Struct, frozen=True):
    """The answer to a call. value: the body as JSON; its text if it is no JSON."""

    status: int
    value: Any

    def field(self, name: str) -> Any:
        """A field of an answer that is a JSON object; None without it."""
        return self.value.get(name) if isinstance(self.value, Mapping) else None


def new_session() -> aiohttp.ClientSession:
    """A session for one server, over plain HTTP. Each request has a connection of its own, so that none is found broken
    when a server was restarted; a proxy of the environment is not used."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=True, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"X-Loaded-By": "exo-mesh"},
        trust_env=False,
    )


class RkllamaServer:
    """A server at an address, "host:port". Every call raises StageLostError if it cannot be reached, and EngineError
    if it does not answer in time."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        if _ADDRESS.fullmatch(address) is None:
            raise EngineError(f"{printable(address, 100)} is not an address of a server, host:port")
        self.session = session
        self.url = f"http://{address}"

    async def probe(self) -> tuple[Dialect, tuple[str, ...] | None]:
        """The best interface that the server has, and the names of its models; None if that interface cannot list
        them. Raises EngineError if the server is no RKLLAMA."""
        welcome = await self.call("GET", "/")
        is_rkllama = welcome.status == 200 and _WELCOME.search(json.dumps(welcome.value)) is not None
        if is_rkllama:
            for dialect in _LISTS:
                if (names := await self._listed(dialect)) is not None:
                    return dialect, names
        if is_rkllama or welcome.status == 404:
            # servers of this form need not have a page at /
            health = await self.call("GET", "/health")
            if health.status == 200:
                return Dialect.DOCUMENTED, None
        what = "has none of the interfaces that this engine knows" if is_rkllama else "is no RKLLAMA"
        raise EngineError(f"the server at {self.url} {what}: its / says {printable(json.dumps(welcome.value), 100)}")

    async def models(self, dialect: Dialect) -> tuple[str, ...] | None:
        """The names of its models; None if this interface cannot list them. Raises EngineError for another answer."""
        if dialect not in _LISTS:
            return None
        found = await self._listed(dialect)
        if found is None:
            raise EngineError(f"RKLLAMA does not list its models at {_LISTS[dialect]}")
        return found

    async def load(self, dialect: Dialect, model: str) -> None:
        """Load a model. It is no error if the model is loaded already. Raises ModelError if the server cannot."""
        if dialect is Dialect.DOCUMENTED:
            reply = await self.call("POST", "/model/load", {"model": model, "model_name": model}, LOAD_S)
        else:
            reply = await self.call("POST", "/load_model", {"model_name": model}, LOAD_S)
        # a server of today answers 200 with an error if this very model is loaded; an old one has room for one model
        # only, and answers 400 if any is
        said = str(reply.field("error") or "")
        if ALREADY_LOADED.search(said):
            if reply.status != 200 and not await self._is_current(model):
                await self.unload(dialect, model)
                reply = await self.call("POST", "/load_model", {"model_name": model}, LOAD_S)
                said = str(reply.field("error") or "")
            else:
                return
        if reply.status != 200 or said:
            reason = refusal(reply.status, reply.value)
            raise reason if isinstance(reason, ModelError) else ModelError(f"RKLLAMA cannot load {model}: {reason}")

    async def unload(self, dialect: Dialect, model: str) -> None:
        """Unload a model. It is no error if it is not loaded."""
        if dialect is not Dialect.DOCUMENTED:
            await self.call("POST", "/unload_model", {"model_name": model}, LOAD_S)

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, within_s: float = CALL_S
    ) -> BoardReply:
        """Make one call, and return its answer, whatever its status."""
        try:
            async with (
                asyncio.timeout(within_s),
                self.session.request(method, self.url + path, json=body, allow_redirects=False) as response,
            ):
                content = bytearray()
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > MAX_REPLY_BYTES:
                        raise EngineError(f"RKLLAMA sent more than {MAX_REPLY_BYTES} bytes for {path}")
                return BoardReply(response.status, _as_json(bytes(content)))
        except aiohttp.ClientError as exc:  # before TimeoutError: a timeout of connecting is both
            raise connection_lost(exc) from exc
        except TimeoutError as exc:
            raise EngineError(f"RKLLAMA did not answer {path} within {within_s:g} s") from exc
        except OSError as exc:
            raise connection_lost(exc) from exc

    async def _listed(self, dialect: Dialect) -> tuple[str, ...] | None:
        reply = await self.call("GET", _LISTS[dialect])
        entries = reply.field("data" if dialect is Dialect.OPENAI else "models")
        if reply.status != 200 or not isinstance(entries, list):
            return None
        names = [_name(entry) for entry in entries[:MOST_MODELS]]
        return tuple(dict.fromkeys(name for name in names if name))

    async def _is_current(self, model: str) -> bool:
        """Whether an old server, which holds one model, holds this one."""
        try:
            reply = await self.call("GET", "/current_model")
        except (EngineError, StageLostError):
            return False
        return reply.status == 200 and reply.field("model_name") == model


def _name(entry: Any) -> str:
    """The name in an entry of a list of models; "" for an entry that has none, or an unprintable one."""
    name = (entry.get("name") or entry.get("id")) if isinstance(entry, Mapping) else entry
    if isinstance(name, str) and name.isprintable() and len(name) <= MAX_MODEL_NAME:
        return name
    return ""


def _as_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")
