"""The options of this engine, checked."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from exo_mesh.domain.addresses import base_path
from exo_mesh.errors import InputError
from exo_mesh.weights.names import is_model_name
from exo_mesh_openai.argv import BACKENDS, SPEC_TYPES, LlamaServerFlags, needs_draft

OPTIONS = (
    "backends",
    "binary",
    "context",
    "draft_model",
    "first_token_s",
    "key_file",
    "model",
    "models_dir",
    "names",
    "no_spec",
    "servers",
    "slots",
    "spec_n_max",
    "spec_type",
    "stands_for",
)

MAX_SERVERS = 64
MAX_KEY = 4096
MAX_CONTEXT = 1 << 24
MAX_SLOTS = 1024
MAX_DRAFT = 64
FIRST_TOKEN_S = 120.0
"""Longest default wait for the first token: a long prompt on a CPU takes minutes."""
MAX_FIRST_TOKEN_S = 3600.0

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class ServerAddress(msgspec.Struct, frozen=True):
    """A server. base: its URL without the last "/v1". where: "host:port", as ServedModel.server has it."""

    base: str
    where: str


class OwnServer(msgspec.Struct, frozen=True):
    """The llama-server that this engine starts itself. models: directories with GGUF files, or one such file."""

    binary: Path
    models: tuple[Path, ...]
    flags: LlamaServerFlags


@dataclass(frozen=True, slots=True)
class OpenAiOptions:
    """All options of this engine. key: the bearer key for the servers, "" for none; it is in no message and no repr.

    names: by the server's own name of a model, its name in the mesh. stands_for: by either name, the model that is the
    same.
    slots: requests at once for a server that does not say how many it computes; 0: a default for its kind.
    """

    servers: tuple[ServerAddress, ...] = ()
    key: str = field(default="", repr=False)
    names: Mapping[str, str] = field(default_factory=dict)
    stands_for: Mapping[str, str] = field(default_factory=dict)
    slots: int = 0
    first_token_s: float = FIRST_TOKEN_S
    own: OwnServer | None = None


def read_options(options: Mapping[str, str]) -> OpenAiOptions:
    """The options, checked. Reads the key file. Raises InputError that names the option."""
    for name in options:
        if name not in OPTIONS:
            raise InputError(f"engine openai has no option {json.dumps(name)}; it has: {', '.join(OPTIONS)}")
    return OpenAiOptions(
        servers=_servers(options.get("servers", "")),
        key=_key(options.get("key_file", "")),
        names=_models(options, "names"),
        stands_for=_models(options, "stands_for"),
        slots=_number(options, "slots", MAX_SLOTS),
        first_token_s=_seconds(options, "first_token_s", FIRST_TOKEN_S, MAX_FIRST_TOKEN_S),
        own=_own_server(options),
    )


def _wrong(option: str, why: str) -> InputError:
    return InputError(f"engine openai, option {option}: {why}", param=option)


def _servers(text: str) -> tuple[ServerAddress, ...]:
    servers = tuple(_server(part.strip()) for part in text.split(",") if part.strip())
    if len(servers) > MAX_SERVERS:
        raise _wrong("servers", f"{len(servers)} servers are named, at most {MAX_SERVERS} are allowed")
    places = [server.where for server in servers]
    for where in places:
        if places.count(where) > 1:
            raise _wrong("servers", f"{where} is named twice")
    return servers


def _server(text: str) -> ServerAddress:
    """The address in a URL. Credentials would end up in status pages, so they belong in the key file."""
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError as exc:
        raise _wrong("servers", f"{json.dumps(text)} is no URL: {exc}") from exc
    if url.username is not None or url.password is not None:
        raise _wrong("servers", "a URL with a user name or password is not allowed; put the key into a key_file")
    if url.scheme not in ("http", "https") or not host or any(ord(letter) <= 32 for letter in text):
        raise _wrong("servers", f"{json.dumps(text)} is not an http or https URL, such as http://127.0.0.1:8080")
    if url.query or url.fragment:
        raise _wrong("servers", f"{json.dumps(text)} has a query or a fragment, which a base URL cannot have")
    host = f"[{host}]" if ":" in host else host
    port = port or (443 if url.scheme == "https" else 80)
    return ServerAddress(f"{url.scheme}://{host}:{port}{base_path(url.path)}", f"{host}:{port}")


def _key(text: str) -> str:
    """The key in a file that only its owner can read."""
    if not text:
        return ""
    path = Path(text).expanduser()
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:  # a pipe would block
            mode = os.fstat(stream.fileno()).st_mode
            content = stream.read(MAX_KEY + 1)
    except OSError as exc:
        raise _wrong("key_file", f"{path} cannot be read: {exc.strerror}") from exc
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise _wrong("key_file", f"{path} must be a file that only its owner can read: chmod 600 {path}")
    key = content.removeprefix(codecs.BOM_UTF8).strip()
    if not 0 < len(key) <= MAX_KEY or any(not 33 <= byte <= 126 for byte in key):
        raise _wrong("key_file", f"{path} must hold one key of printable ASCII characters, and nothing else")
    return key.decode()


def _models(options: Mapping[str, str], option: str) -> Mapping[str, str]:
    """A JSON object from names of models to names in the mesh."""
    text = options.get(option, "")
    if not text:
        return {}
    try:
        found: Any = json.loads(text)
    except ValueError as exc:
        raise _wrong(option, f"is not a JSON object: {exc}") from exc
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise _wrong(option, 'must be a JSON object of names, such as {"name at the server": "name in the mesh"}')
    for name in found.values():
        if not is_model_name(name):
            raise _wrong(option, f"{json.dumps(name)} cannot be the name of a model in the mesh")
    return found


def _number(options: Mapping[str, str], option: str, most: int) -> int:
    """A whole number from 1 to `most`; 0 if the option is not given."""
    text = options.get(option, "")
    if not text:
        return 0
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:10]) <= most or len(text) > 9:
        raise _wrong(option, f"must be a whole number from 1 to {most}, not {json.dumps(text[:40])}")
    return int(text)


def _seconds(options: Mapping[str, str], option: str, default: float, most: float) -> float:
    text = options.get(option, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= most:
        raise _wrong(option, f"must be a number of seconds up to {most:g}, not {json.dumps(text[:40])}")
    return seconds


def _flag(options: Mapping[str, str], option: str) -> bool:
    text = options.get(option, "").lower()
    if text not in (*_TRUE, *_FALSE):
        raise _wrong(option, f"must be true or false, not {json.dumps(text[:40])}")
    return text in _TRUE


def _own_server(options: Mapping[str, str]) -> OwnServer | None:
    """The llama-server to start; None if no binary is given, and then its other options are refused."""
    if not options.get("binary"):
        for option in (
            "backends",
            "context",
            "draft_model",
            "model",
            "models_dir",
            "no_spec",
            "spec_n_max",
            "spec_type",
        ):
            if options.get(option):
                raise _wrong(option, "is for the llama-server that the option binary names, which is missing")
        return None
    given = options.get("model") or options.get("models_dir", "")
    models = tuple(Path(part.strip()).expanduser() for part in given.split(",") if part.strip())
    if not models:
        raise _wrong("binary", "needs model (a GGUF file) or models_dir (directories with GGUF files)")
    binary = Path(shutil.which(options["binary"]) or options["binary"]).expanduser()
    return OwnServer(binary, models, _flags(options))


def _backends(text: str) -> tuple[str, ...]:
    backends = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    for backend in backends:
        if backend not in BACKENDS:
            raise _wrong("backends", f"{json.dumps(backend[:40])} is none of {', '.join(BACKENDS)}")
    return backends


def _flags(options: Mapping[str, str]) -> LlamaServerFlags:
    spec_type = options.get("spec_type", "")
    if spec_type and spec_type not in SPEC_TYPES:
        raise _wrong("spec_type", f"must be one of {', '.join(SPEC_TYPES)}, not {json.dumps(spec_type[:40])}")
    draft = options.get("draft_model", "")
    no_spec = _flag(options, "no_spec")
    if needs_draft(spec_type) and not draft and not no_spec:
        raise _wrong("draft_model", f"is missing: {spec_type} needs a draft model in a GGUF file")
    if (draft or options.get("spec_n_max")) and not spec_type:
        raise _wrong("spec_type", "is missing: draft_model and spec_n_max say how to draft")
    return LlamaServerFlags(
        backends=_backends(options.get("backends", "")),
        context=_number(options, "context", MAX_CONTEXT),
        slots=_number(options, "slots", MAX_SLOTS),
        spec_type=spec_type,
        spec_n_max=_number(options, "spec_n_max", MAX_DRAFT),
        draft_model=Path(draft).expanduser() if draft else None,
        no_spec=no_spec,
    )
