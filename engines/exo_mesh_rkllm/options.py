"""The settings of this engine: where its server is, and what its models are called in the mesh."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.errors import InputError
from exo_mesh.weights.names import is_model_name

DEFAULT_HOST, DEFAULT_PORT = "localhost", 8080
HOST_VARIABLE, PORT_VARIABLE = "RKLLM_SERVER_HOST", "RKLLM_SERVER_PORT"
"""Environment variables that replace the two defaults."""

MOST_MODELS = 256
"""Most models of one server, and most names in an option."""

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.\-_]{0,251}[A-Za-z0-9])?")


class RkllmOptions(msgspec.Struct, frozen=True):
    """The parsed options.

    host, port: where RKLLAMA listens. models_dir: its directory of models, if that is on this machine. names: the name
    in the mesh of a model, by the server's name. stands_for: the model of the mesh that a model is equal to, by its
    name in the mesh or at the server, or by its HUGGINGFACE_PATH. first_token_s, answer_s: longest waits for the first
    token and for a whole answer.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    models_dir: Path = Path("~/RKLLAMA/models")
    names: Mapping[str, str] = msgspec.field(default_factory=dict)
    stands_for: Mapping[str, str] = msgspec.field(default_factory=dict)
    first_token_s: float = 60.0
    answer_s: float = 300.0

    @property
    def server(self) -> str:
        """The address of the server, "host:port"."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_options(options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> RkllmOptions:
    """Parse the engine options; the environment has the defaults of host and port. Raises InputError that names the
    option."""
    for name in options:
        if name not in _PARSERS:
            raise InputError(
                f"the rkllm engine has no option {json.dumps(name)}; it has {', '.join(_PARSERS)}", param=name
            )
    named = {name: environ[variable] for name, variable in _VARIABLES.items() if environ.get(variable)}
    return RkllmOptions(**{name: _PARSERS[name](name, value) for name, value in {**named, **options}.items()})


def names_a_server(options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an option or a variable says where the server is."""
    return any(name in options or environ.get(variable) for name, variable in _VARIABLES.items())


_VARIABLES = {"host": HOST_VARIABLE, "port": PORT_VARIABLE}


def _host(option: str, value: str) -> str:
    text = value.strip().removeprefix("[").removesuffix("]")
    if _HOST_NAME.fullmatch(text) is None:
        try:
            ipaddress.ip_address(text)
        except ValueError as exc:
            raise InputError(f"{option}={value} is not a host name or an address", param=option) from exc
    return text


def _port(option: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and 1 <= int(value[:6]) <= 65535):
        raise InputError(f"{option}={value} is not a port, 1 to 65535", param=option)
    return int(value)


def _directory(option: str, value: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise InputError(f"{option}={value} is not an absolute path", param=option)
    return path


def _seconds(option: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise InputError(f"{option}={value} is not a number of seconds between 0 and 86400", param=option)
    return seconds


def _model_names(option: str, value: str) -> dict[str, str]:
    try:
        names = json.loads(value)
    except ValueError as exc:
        raise InputError(f"{option} is not JSON: {exc}", param=option) from exc
    if not isinstance(names, dict) or len(names) > MOST_MODELS:
        raise InputError(f"{option} must be a JSON object with at most {MOST_MODELS} names", param=option)
    for name in names.values():
        if not isinstance(name, str) or not is_model_name(name):
            raise InputError(f"{option}: {json.dumps(name)} is not the name of a model", param=option)
    return names


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "host": _host,
    "port": _port,
    "models_dir": _directory,
    "names": _model_names,
    "stands_for": _model_names,
    "first_token_s": _seconds,
    "answer_s": _seconds,
}
