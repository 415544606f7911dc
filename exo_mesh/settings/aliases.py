"""Environment variables of other programs that stand for our settings; EXO_MESH_* variables win over them.

Most are common words that other programs also set, so a value that cannot be meant for us is ignored.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import unquote

import msgspec


class Alias(msgspec.Struct, frozen=True):
    """A variable that stands for a setting. read: converts its text to the setting's; None if it is not meant for
    us."""

    variable: str
    setting: str
    read: Callable[[str], str | None]
    note: str = ""


def _as_is(text: str) -> str | None:
    return text


def _address(text: str) -> str | None:
    """Reads HOST, which shells and compilers use for other things: accepts only an address or localhost."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return "localhost" if text == "localhost" else None
    return text


def _models_dir(text: str) -> str | None:
    """Returns the parent of a model directory; the text itself for another directory."""
    path = Path(text).expanduser()
    return str(path.absolute().parent) if (path / "config.json").is_file() else text


def _model(text: str) -> str | None:
    """Reads MODEL_ID, which other programs use for ids of their own: accepts only the form of our model names."""
    return text if re.fullmatch(r"/.+|[A-Za-z0-9][\w.+\-]*(/[A-Za-z0-9][\w.+\-]*)?([@:][\w.\-]+)*", text) else None


def _count(text: str) -> str | None:
    """Reads MAX_TOKENS, where other programs put words, or 0 for no limit: accepts only whole numbers from 1."""
    return text if re.fullmatch(r"[1-9][0-9]{0,8}", text) else None


def _megabytes(text: str) -> str | None:
    return f"{text}MiB"


def _if_on(text: str) -> str | None:
    """Reads a switch like huggingface-hub: other words mean off, which is our default."""
    return "true" if text.upper() in ("1", "ON", "YES", "TRUE") else None


def _on_or_off(text: str) -> str | None:
    """Reads a switch whose both values mean something; other words are ignored."""
    words = {"1": "on", "true": "on", "yes": "on", "on": "on", "0": "off", "false": "off", "no": "off", "off": "off"}
    return words.get(text.lower())


def _debug_level(text: str) -> str | None:
    """Reads DEBUG, where other programs put names of modules: accepts only a number from 1 to 9."""
    return "debug" if re.fullmatch(r"[1-9]", text) else None


def _collector_off(text: str) -> str | None:
    """Reads OTEL_SDK_DISABLED: only "true" turns the export off, as OpenTelemetry specifies."""
    return "none" if text.strip().lower() == "true" else None


def _not_to_a_collector(text: str) -> str | None:
    """Reads OTEL_TRACES_EXPORTER: turns the export off if otlp is not in the list."""
    return None if "otlp" in [word.strip().lower() for word in text.split(",")] else "none"


def _collector(text: str) -> str | None:
    return text if text.strip().lower().startswith(("http://", "https://")) else None


def _by_http(text: str) -> str | None:
    return text if text.strip().lower() in ("http/json", "http/protobuf") else None


def _decoded_pairs(text: str) -> str | None:
    """Decodes `key=value,key=value`, percent-encoded; ignores items that are not pairs or have a comma in the value."""
    pairs = (pair.partition("=") for pair in text.split(","))
    found = [(key.strip(), unquote(value.strip())) for key, _, value in pairs]
    return ",".join(f"{key}={value}" for key, value in found if key and value and "," not in value) or None


def _service(text: str) -> str | None:
    return text if len(text) <= 64 and text.isprintable() else None


def _sampler(text: str) -> str | None:
    """Reads OTEL_TRACES_SAMPLER: always_on and always_off; other samplers take their share from the argument."""
    word = text.strip().lower().removeprefix("parentbased_")
    return {"always_on": "1", "always_off": "0"}.get(word)


def _share(text: str) -> str | None:
    return text if re.fullmatch(r"0|1|0?\.[0-9]{1,9}|1\.0{1,9}|0\.0?", text.strip()) else None


ALIASES = (
    Alias("CTRL_HOST", "host", _address, "an address or localhost; other values are ignored"),
    Alias("HOST", "host", _address, "an address or localhost; other values are ignored"),
    Alias("PORT", "api_port", _as_is),
    Alias("CTRL_PORT", "grpc_port", _as_is),
    Alias("MODEL_DIR", "models_dir", _models_dir, "the directory of a model stands for its parent"),
    Alias("MODEL_ID", "default_model", _model, "the name or the directory of a model; other values are ignored"),
    Alias("MAX_TOKENS", "max_generate_tokens", _count, "a whole number from 1; other values are ignored"),
    Alias("MAX_QUEUE_DEPTH", "max_queued", _as_is),
    Alias("QUEUE_MAX", "max_queued", _as_is),
    Alias("OVERRIDE_MEMORY_MB", "override_memory", _megabytes, "a number of MiB"),
    Alias("MEMORY_THRESHOLD", "memory_threshold", _as_is),
    Alias("MEMORY_POLL_INTERVAL", "memory_poll_interval", _as_is),
    Alias("REQUEST_TIMEOUT_S", "response_timeout", _as_is),
    Alias("REQ_TIMEOUT", "response_timeout", _as_is),
    Alias("REQUEST_LOG_PATH", "request_log", _as_is),
    Alias("REQUEST_LOG_MAX", "request_log_max", _as_is),
    Alias("RKLLM_SERVER_HOST", "rkllm_server_host", _as_is),
    Alias("RKLLM_SERVER_PORT", "rkllm_server_port", _as_is),
    Alias("EXO_MESH_LLAMA_SERVER_BIN", "llama_server", _as_is),
    Alias("EXO_MESH_SKIP_LLM_WARMUP", "skip_warmup", _if_on, "1, on, yes or true; other values are ignored"),
    Alias("EXO_MESH_MLX_HANG_DEBUG_INTERVAL_SECONDS", "hang_debug", _as_is),
    Alias("PROPORTIONAL_LAYERS", "proportional_layers", _on_or_off, "1 or 0; other values are ignored"),
    Alias("HF_HUB_OFFLINE", "offline", _if_on, "1, on, yes or true; other values are ignored"),
    Alias("TRANSFORMERS_OFFLINE", "offline", _if_on, "1, on, yes or true; other values are ignored"),
    Alias("OTEL_SDK_DISABLED", "otlp_endpoint", _collector_off, "true turns the export off; other values are ignored"),
    Alias(
        "OTEL_TRACES_EXPORTER",
        "otlp_endpoint",
        _not_to_a_collector,
        "none if otlp is not in it; other values are ignored",
    ),
    Alias("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "otlp_endpoint", _collector, "a URL; other values are ignored"),
    Alias("OTEL_EXPORTER_OTLP_ENDPOINT", "otlp_endpoint", _collector, "a URL; other values are ignored"),
    Alias("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "otlp_header", _decoded_pairs, "values are percent-encoded"),
    Alias("OTEL_EXPORTER_OTLP_HEADERS", "otlp_header", _decoded_pairs, "values are percent-encoded"),
    Alias(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        "otlp_protocol",
        _by_http,
        "http/json or http/protobuf; other values are ignored",
    ),
    Alias(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "otlp_protocol", _by_http, "http/json or http/protobuf; other values are ignored"
    ),
    Alias("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "otlp_certificate", _as_is),
    Alias("OTEL_EXPORTER_OTLP_CERTIFICATE", "otlp_certificate", _as_is),
    Alias("OTEL_SERVICE_NAME", "otlp_service", _service, "at most 64 printable characters; other values are ignored"),
    Alias("OTEL_RESOURCE_ATTRIBUTES", "otlp_attribute", _decoded_pairs, "values are percent-encoded"),
    Alias(
        "OTEL_TRACES_SAMPLER",
        "trace_sample",
        _sampler,
        "always_on or always_off, also with parentbased_; other values are ignored",
    ),
    Alias("OTEL_TRACES_SAMPLER_ARG", "trace_sample", _share, "a share from 0 to 1; other values are ignored"),
    Alias("DEBUG", "log_level", _debug_level, "a number from 1 to 9 stands for debug; other values are ignored"),
)
"""Aliases by priority: of two for one setting, the earlier wins."""


def alias_texts(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """By setting: (variable, text of the setting) of the alias that is set. An empty variable counts as unset."""
    found: dict[str, tuple[str, str]] = {}
    for alias in ALIASES:
        text = environ.get(alias.variable, "").strip()
        if text and alias.setting not in found and (value := alias.read(text)) is not None:
            found[alias.setting] = alias.variable, value
    return found


def unused_protocols(environ: Mapping[str, str]) -> list[str]:
    """Warnings for variables that name an OpenTelemetry protocol which is not supported."""
    found = []
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if environ.get(name, "").strip() and _by_http(environ[name]) is None:
            hint = "only HTTP is supported, on port 4318 of most collectors; set it with --otlp-endpoint"
            found.append(f"{name}={environ[name][:32]} is not used: {hint}")
    return found
