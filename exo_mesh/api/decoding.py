"""Decodes JSON bodies into the structs that check them, with errors that name the wrong field."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec

from exo_mesh.errors import InputError
from exo_mesh.settings.spelling import did_you_mean

T = TypeVar("T")

_UNKNOWN = "Object contains unknown field"


def decode_body(body: bytes, kind: type[T], without: Callable[[bytes], bytes] | None = None) -> T:
    """Decode the body into a struct. Raises InputError that names the wrong field.

    without: removes the unknown fields that a caller may send. It is called only if there is an unknown field, because
    it parses the body again.
    """
    try:
        return _decoded(body, kind, without)
    except msgspec.ValidationError as exc:
        raise _field_error(str(exc), kind) from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"the request body is not UTF-8 (byte {exc.start})") from exc
    except RecursionError as exc:
        raise InputError("the request body is nested too deeply") from exc
    except msgspec.DecodeError as exc:
        raise InputError(f"the request body is not valid JSON: {exc}") from exc


def convert_part(value: object, kind: type[T], where: str) -> T:
    """Convert a part of a decoded body into a struct. where: its place in the body. Raises InputError that names the
    wrong field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        error = _field_error(str(exc), kind)
        param = ".".join(name for name in (where, error.param) if name)
        text = str(error) if error.param else str(error).removeprefix("the request body: ")
        raise InputError(f"{where}.{text}" if error.param else f"{where}: {text}", param=param) from exc


def _decoded(body: bytes, kind: type[T], without: Callable[[bytes], bytes] | None) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        if without is None or _UNKNOWN not in str(exc):
            raise
        return msgspec.json.decode(without(body), type=kind)


def _field_error(message: str, kind: type) -> InputError:
    """Translate a message of msgspec, such as: Expected `float`, got `str` - at `$.temperature`; or: Object contains
    unknown field `foo` - at …"""
    text, _, place = message.partition(" - at ")
    path = re.search(r"`\$\.?([^`]*)`", place)
    param = path.group(1) if path else ""
    if unknown := re.fullmatch(rf"{_UNKNOWN} `(.*)`", text, re.DOTALL):
        near = "" if param else did_you_mean(unknown.group(1), [field.name for field in msgspec.structs.fields(kind)])
        param = f"{param}.{unknown.group(1)}" if param else unknown.group(1)
        return InputError(f"{param}: exo-mesh does not support this field{near}", param=param)
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return InputError(f"{param}: this field is required", param=param)
    return InputError(f"{param or 'the request body'}: {text[:1].lower()}{text[1:]}", param=param or None)
