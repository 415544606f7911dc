"""Decodes JSON bodies into the structs that check them, with errors that name the wrong field."""

from __future__ import annotations

import ast
import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from exo_mesh.api.core.neutral_fields import NeutralTables, members_of, show_json, without_neutral
from exo_mesh.base.long_texts import LONG, decode_long, first_wrong_byte, long_strings
from exo_mesh.errors import InputError
from exo_mesh.settings.spelling import did_you_mean

T = TypeVar("T")

_NO_TABLES: NeutralTables = {}
_AT = " - at "

MAX_MESSAGE, MAX_PLACE = 200, 1000
"""Most characters that are kept of what msgspec says about a value, and of its place."""

NEAR_BYTES = 32
"""An escape that msgspec refuses is at most so far before the place that it names."""

_BYTE = re.compile(r"\(byte (\d+)\)")

_UNKNOWN = "Object contains unknown field"


_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|u([dD][89a-fA-F]\w\w)|.)", re.DOTALL)
"""An escape in JSON. Group 1: a surrogate that is not part of a pair."""


def decode_body(body: bytes, kind: type[T], tables: NeutralTables = _NO_TABLES) -> T:
    """Decode the body into a struct. Fields that change nothing are left out by the rule of without_neutral, and so is
    a byte-order mark, which editors and shells of Windows put before a file.

    Raises InputError that names the wrong field.
    """
    if body.startswith(BOM_UTF8):
        body = body[len(BOM_UTF8) :]
    try:
        return _decoded(body, kind, tables)
    except msgspec.ValidationError as exc:
        raise _field_error(str(exc), kind) from exc
    except RecursionError as exc:
        raise InputError("the request body is nested too deeply") from exc
    except msgspec.DecodeError as exc:
        raise InputError(f"the request body is not {_why_undecoded(body, str(exc))}") from exc


def convert_part(value: object, kind: type[T], where: str) -> T:
    """Convert a part of a decoded body into a struct. where: its place in the body. Raises InputError that names the
    wrong field."""
    try:
        return _converted(value, kind, where, _NO_TABLES)
    except msgspec.ValidationError as exc:
        error = _field_error(str(exc), kind)
        param = ".".join(name for name in (where, error.param) if name)
        text = str(error) if error.param else str(error).removeprefix("the request body: ")
        raise InputError(f"{where}.{text}" if error.param else f"{where}: {text}", param=param) from exc


def _decoded(body: bytes, kind: type[T], tables: NeutralTables) -> T:
    if len(body) >= LONG and (strings := list(long_strings(body))):
        return _converted(decode_long(body, strings), kind, "", tables)
    with suppress(msgspec.ValidationError):
        return msgspec.json.decode(body, type=kind)
    # most bodies decode as they are, so the body is parsed again only if it does not; the error, which holds the wrong
    # value, is gone by now
    cleaned = msgspec.json.encode(without_neutral(msgspec.json.decode(body), kind, tables))
    return msgspec.json.decode(cleaned, type=kind)


def _converted(value: object, kind: type[T], where: str, tables: NeutralTables) -> T:
    with suppress(msgspec.ValidationError):
        return msgspec.convert(value, kind, str_keys=True)
    return msgspec.convert(without_neutral(value, kind, tables, where), kind, str_keys=True)


def _why_undecoded(body: bytes, message: str) -> str:
    if "UTF-8" in message:
        return f"UTF-8 (byte {first_wrong_byte(body)})"
    if not body or body.isspace():
        return "valid JSON: it is empty"
    return f"valid JSON: {_lone_surrogate(body, message) or message}"


def _lone_surrogate(body: bytes, message: str) -> str | None:
    """What to say about the first escape of half a character; None if there is none. Of a long body, which may have
    millions of escapes, only those before the place that msgspec names are looked at."""
    first = 0
    if len(body) >= LONG:
        place = _BYTE.search(message)
        if place is not None and "surrogate" not in message:
            return None
        first = (len(body) if place is None else int(place[1])) - NEAR_BYTES  # at the end, it is called a cut
    for escape in _ESCAPE.finditer(body, first):
        if escape[1]:
            shown = f"\\u{escape[1].decode()}"
            return f"{shown} (byte {escape.start()}) is half of a surrogate pair; send both halves of the character"
    return None


def _parts_of(message: str) -> tuple[str, str]:
    """(problem, place) of a message of msgspec. A long value in it is shortened: msgspec quotes all of it."""
    at = message.rfind(_AT, max(0, len(message) - MAX_PLACE))
    end = len(message) if at < 0 else at
    text = message[:end] if end <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…{message[end - 1]}"
    return text, "" if at < 0 else message[at + len(_AT) :]


def _choices_at(kind: Any, place: Sequence[str]) -> list[str]:
    """The words that a body of this type may have at a place. place: names of fields, and "[…]" for items."""
    found: list[str] = []
    for one in members_of(kind):
        if not place:
            found += get_args(one) if get_origin(one) is Literal else ()
        elif isinstance(one, type) and issubclass(one, msgspec.Struct):
            config = one.__struct_config__
            found += [str(config.tag)] if [config.tag_field] == list(place) else []
            for field in msgspec.structs.fields(one):
                if field.encode_name == place[0]:
                    found += _choices_at(field.type, place[1:])
        elif place[0].startswith("[") and (inner := get_args(one)):
            found += _choices_at(inner[1] if get_origin(one) is dict else inner[0], place[1:])
    return found


def _shown_word(quoted: str) -> str:
    """A word that msgspec quotes as Python does, in JSON."""
    try:
        return show_json(ast.literal_eval(quoted))
    except (SyntaxError, ValueError):  # it was shortened inside an escape
        return show_json(quoted[1:-1])


def _field_error(message: str, kind: type) -> InputError:
    """Translate a message of msgspec, such as: Expected `float`, got `str` - at `$.temperature`; or: Object contains
    unknown field `foo` - at …"""
    text, place = _parts_of(message)
    path = re.search(r"`\$\.?([^`]*)`", place)
    param = path.group(1) if path else ""
    if unknown := re.fullmatch(rf"{_UNKNOWN} `(.*)`", text, re.DOTALL):
        near = "" if param else did_you_mean(unknown.group(1), [field.name for field in msgspec.structs.fields(kind)])
        param = f"{param}.{unknown.group(1)}" if param else unknown.group(1)
        return InputError(f"{param}: exo-mesh does not support this field{near}", param=param)
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return InputError(f"{param}: this field is required", param=param)
    if wrong := re.fullmatch(r"Invalid (?:enum )?value (['\"].*['\"])", text, re.DOTALL):
        choices = _choices_at(kind, re.findall(r"\[[^]]*\]|[^.[]+", param))
        allowed = " or ".join(show_json(word) for word in choices)
        return InputError(f"{param} is {_shown_word(wrong.group(1))}; it must be {allowed}", param=param)
    return InputError(f"{param or 'the request body'}: {text[:1].lower()}{text[1:]}", param=param or None)
