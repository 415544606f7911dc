"""Names of environment variables that older programs gave to settings we have; weaker than EXO_MESH_*, see config.

Most are common words that other programs set too, so a value that cannot be meant for us is passed over.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Alias:
    """`read` turns the variable's text into the text of the setting; None if it is not meant for us."""

    variable: str
    setting: str
    read: Callable[[str], str | None]
    note: str = ""


def _as_is(text: str) -> str | None:
    return text


def _address(text: str) -> str | None:
    """Shells and compilers put other things into HOST: only an address, or localhost, is one to listen on."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return "localhost" if text == "localhost" else None
    return text


def _models_dir(text: str) -> str | None:
    """The directory that has the model directory in it; the text itself if it is no model directory."""
    path = Path(text).expanduser()
    return str(path.absolute().parent) if (path / "config.json").is_file() else text


def _model(text: str) -> str | None:
    """Other programs put ids of their own into MODEL_ID: only what names one of our models by its form is one."""
    return text if re.fullmatch(r"/.+|[A-Za-z0-9][\w.+\-]*(/[A-Za-z0-9][\w.+\-]*)?([@:][\w.\-]+)*", text) else None


def _count(text: str) -> str | None:
    """Other programs put words into MAX_TOKENS, or 0 for no limit."""
    return text if re.fullmatch(r"[1-9][0-9]{0,8}", text) else None


def _megabytes(text: str) -> str | None:
    return f"{text}MiB"


def _if_on(text: str) -> str | None:
    """As huggingface-hub reads its switches: anything but these words means off, which is our default."""
    return "true" if text.upper() in ("1", "ON", "YES", "TRUE") else None


def _debug_level(text: str) -> str | None:
    """Other programs put names of their parts into DEBUG: only a number from 1 to 9 asks for all lines."""
    return "debug" if re.fullmatch(r"[1-9]", text) else None


ALIASES = (
    Alias("CTRL_HOST", "host", _address, "an address or localhost; else passed over"),
    Alias("HOST", "host", _address, "an address or localhost; else passed over"),
    Alias("PORT", "api_port", _as_is),
    Alias("CTRL_PORT", "grpc_port", _as_is),
    Alias("MODEL_DIR", "models_dir", _models_dir, "a model's own directory stands for the one it is in"),
    Alias("MODEL_ID", "default_model", _model, "the name or the directory of a model; else passed over"),
    Alias("MAX_TOKENS", "max_generate_tokens", _count, "a whole number from 1; else passed over"),
    Alias("MAX_QUEUE_DEPTH", "max_queued", _as_is),
    Alias("QUEUE_MAX", "max_queued", _as_is),
    Alias("OVERRIDE_MEMORY_MB", "override_memory", _megabytes, "a number of MiB"),
    Alias("MEMORY_THRESHOLD", "memory_threshold", _as_is),
    Alias("MEMORY_POLL_INTERVAL", "memory_poll_interval", _as_is),
    Alias("REQUEST_TIMEOUT_S", "response_timeout", _as_is),
    Alias("REQ_TIMEOUT", "response_timeout", _as_is),
    Alias("REQUEST_LOG_PATH", "request_log", _as_is),
    Alias("REQUEST_LOG_MAX", "request_log_max", _as_is),
    Alias("HF_HUB_OFFLINE", "offline", _if_on, "1, on, yes or true; else passed over"),
    Alias("TRANSFORMERS_OFFLINE", "offline", _if_on, "1, on, yes or true; else passed over"),
    Alias("DEBUG", "log_level", _debug_level, "a number from 1 to 9 stands for debug; else passed over"),
)
"""Where two stand for one setting, the earlier wins."""


def alias_texts(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """(variable, text of the setting) by setting, for the aliases that are set. An empty variable counts as unset."""
    found: dict[str, tuple[str, str]] = {}
    for alias in ALIASES:
        text = environ.get(alias.variable, "").strip()
        if text and alias.setting not in found and (value := alias.read(text)) is not None:
            found[alias.setting] = alias.variable, value
    return found
