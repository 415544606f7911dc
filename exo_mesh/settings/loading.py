"""Merges flags, variables and config.toml into the settings of a node, and checks them.

Flags > EXO_MESH_* environment > aliases of older programs > config.toml > defaults.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from exo_mesh.base.printable import quoted
from exo_mesh.base.small_files import exists, read_small
from exo_mesh.security.secret import parse_secret, read_secret_file
from exo_mesh.settings.aliases import ALIASES, alias_texts
from exo_mesh.settings.config import (
    SECRET_FILE_NAME,
    SECRET_VARIABLE,
    ConfigError,
    LoadedSettings,
    default_settings,
)
from exo_mesh.settings.foreign import KEYS, foreign_variables
from exo_mesh.settings.foreign import VARIABLES as FOREIGN_VARIABLES
from exo_mesh.settings.setting import PREFIX
from exo_mesh.settings.spelling import did_you_mean
from exo_mesh.settings.store_table import store_keys
from exo_mesh.settings.table import SETTINGS

MAX_FILE_BYTES = 2**20
"""Largest config.toml; the longest allowed values of all settings take a small part of it."""
CLIENT_VARIABLES = frozenset({"EXO_MESH_API_URL", "EXO_MESH_API_KEY", "EXO_MESH_API_CA"})
"""Variables that verbs which call a node read, and that the node itself ignores."""
_OTHER_VARIABLES = CLIENT_VARIABLES | {SECRET_VARIABLE}

RETIRED = {"no_loopback_exemption": "being on this machine gives no rights any more; leave it out"}
"""By retired setting: what to do instead."""

_WHOSE_HOME = "run the command as the user of that node, or give --home a directory of yours"
"""Remedy where the home belongs to another user, as after one `sudo exo-mesh` with the caller's HOME."""

_VARIABLES = frozenset(variable for setting in SETTINGS.values() for variable in setting.variables)
"""The variables of every setting."""
_BY_KEY = {key: name for name, setting in SETTINGS.items() for key in setting.keys}
"""The setting of each key of config.toml."""
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)", re.ASCII)
"""Variables by which Kubernetes and Docker links describe a service."""
_SERVICE_PORT = re.compile(r"(tcp|udp|sctp)://.*", re.DOTALL)
"""What NAME_PORT is where it describes a service."""


def load_settings(flags: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> LoadedSettings:
    """Merges flags, variables, aliases and config.toml. flags: by name of a setting, its texts in order.

    A variable counts as unset if it is empty or describes a service. Raises ConfigError that names the source of the
    first value that cannot be used.
    """
    import platformdirs

    environ = _without_service_links(environ)
    given: dict[str, tuple[Any, str]] = {}
    texts, aliases = _environment(environ), alias_texts(environ)
    for name, setting in SETTINGS.items():
        if name in flags:
            source = setting.flag
            given[name] = _read(f"{source} {flags[name][-1]}", setting.from_texts, flags[name]), f"flag {source}"
        elif name in texts:
            source, text = texts[name]
            given[name] = _read(f"{source}={text}", setting.from_texts, [text]), f"environment {source}"
        elif name in aliases:
            source, text = aliases[name]
            given[name] = _read(f"{source}={environ[source]}", setting.from_texts, [text]), f"environment {source}"
    config_dir = given["home"][0] if "home" in given else platformdirs.user_config_path("exo-mesh", appauthor=False)
    config_file = config_dir / "config.toml"
    for name, raw in _file(config_file).items():
        if name not in given:
            shown = json.dumps(raw, default=str, ensure_ascii=False)
            value = _read(f"{config_file}: {name} = {shown}", SETTINGS[name].from_toml, raw)
            given[name] = value, f"{config_file}:{name}"
    return replace(
        _join(given, environ, config_file),
        warnings=(*_unknown_variables(environ), *foreign_variables(environ, _VARIABLES)),
    )


def _secret(given: Mapping[str, tuple[Any, str]], environ: Mapping[str, str], home: Path) -> tuple[str, Path | None]:
    """(secret in force, its file or None). --secret-file wins over EXO_MESH_SECRET and EXO_MESH_SECRET_FILE; then come
    config.toml and the file that `exo-mesh join` wrote into the home."""
    path, origin = given.get("secret_file", (None, ""))
    text = environ.get(SECRET_VARIABLE)
    if text and origin.startswith("environment"):
        raise ConfigError(f"{SECRET_VARIABLE} and {SETTINGS['secret_file'].variable} are both set: unset one")
    if text and not origin.startswith("flag"):
        return str(_read(SECRET_VARIABLE, parse_secret, text)), path
    if path is None and _is_in_home(home / SECRET_FILE_NAME):
        path, origin = home / SECRET_FILE_NAME, SECRET_FILE_NAME
    return ("" if path is None else str(_read(f"{origin.split()[-1]} {path}", read_secret_file, path))), path


def _is_in_home(secret_file: Path) -> bool:
    """Whether a file of the home exists. Raises ConfigError if this user may not know."""
    try:
        return exists(secret_file)
    except OSError as exc:
        message = f"{secret_file}: cannot be read: {exc.strerror}; {_WHOSE_HOME}"
        raise ConfigError(message, param="home") from exc


def _join(given: Mapping[str, tuple[Any, str]], environ: Mapping[str, str], config_file: Path) -> LoadedSettings:
    fields = {SETTINGS[name].field: value for name, (value, _) in given.items()}
    settings = dataclasses.replace(default_settings(), **fields)
    secret, secret_file = _secret(given, environ, settings.home)
    settings = dataclasses.replace(settings, secret=secret, secret_file=secret_file)
    if settings.ollama_port and settings.ollama_port in (settings.api_port, settings.grpc_port):
        other = "--api-port" if settings.ollama_port == settings.api_port else "--grpc-port"
        message = f"{other} and --ollama-port are both {settings.ollama_port}; every API port serves clients of Ollama"
        raise ConfigError(message, param="ollama_port")
    if settings.api and settings.api_port and settings.api_port == settings.grpc_port:
        raise ConfigError(f"--api-port and --grpc-port are both {settings.api_port}", param="api_port")
    if settings.no_batch and given.get("max_batch_size", (1, ""))[0] != 1:
        raise ConfigError(
            f"--no-batch runs one request at a time, but --max-batch-size is {settings.max_batch_size}: leave one out",
            param="max_batch_size",
        )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        alone, other = ("cert", "key") if settings.tls_key is None else ("key", "cert")
        raise ConfigError(f"--tls-{alone} needs --tls-{other}", param=f"tls_{other}")
    origins = {name: given[name][1] if name in given else "default" for name in SETTINGS}
    return LoadedSettings(settings, origins, config_file)


def _read(source: str, parse: Callable[[Any], Any], raw: Any) -> Any:
    try:
        return parse(raw)
    except ValueError as exc:
        raise ConfigError(f"{source}: {exc}") from exc


def _environment(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """By setting: (EXO_MESH_* variable, its text). The setting's own name wins over its second one."""
    known = [(name, variable) for name, setting in SETTINGS.items() for variable in reversed(setting.variables)]
    return {name: (variable, environ[variable]) for name, variable in known if environ.get(variable)}


def _without_service_links(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that describe a service. One named exo-mesh has EXO_MESH_PORT=tcp://..."""
    return {
        name: text
        for name, text in environ.items()
        if not _SERVICE_LINK.fullmatch(name) and not (name.endswith("_PORT") and _SERVICE_PORT.fullmatch(text))
    }


def _unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A warning for each EXO_MESH_* variable that is not a setting."""
    known = {*_VARIABLES, *_OTHER_VARIABLES, *FOREIGN_VARIABLES, *(alias.variable for alias in ALIASES)}
    ours = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    return tuple(f"{name} is set, but there is no such setting{did_you_mean(name, _VARIABLES)}" for name in ours)


def _file(path: Path) -> dict[str, Any]:
    """Reads the keys of config.toml; empty if there is none. Raises ConfigError."""
    try:
        if not exists(path):
            return {}
        content = read_small(path, MAX_FILE_BYTES)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: has more than {MAX_FILE_BYTES} bytes")
        keys = tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: not valid TOML: {exc}") from exc
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    table = keys.pop("model_store", {})
    try:
        stored = store_keys(table)
    except ValueError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    if twice := sorted(keys.keys() & stored.keys()):
        raise ConfigError(f"{path}: {', '.join(twice)} and the table [model_store] set the same thing: leave one out")
    keys |= stored
    for key in keys:
        if key == "home":
            raise ConfigError(f"{path}: home cannot be set in here; use --home or {PREFIX}HOME")
        if key not in _BY_KEY:
            known = {**KEYS, **RETIRED}
            hint = f": {known[key]}" if key in known else did_you_mean(key, _BY_KEY)
            raise ConfigError(f"{path}: no setting {quoted(key)}{hint}")
        if (name := _BY_KEY[key]) != key and name in keys:
            raise ConfigError(f"{path}: {key} and {name} set the same thing: leave one out")
    return {_BY_KEY[key]: value for key, value in keys.items()}
