"""Parses the head of a request to the file server. It supports only what exo-mesh's own client sends."""

from __future__ import annotations

import re
from http import HTTPStatus
from urllib.parse import unquote

import msgspec

from exo_mesh.models.file_server.messages import MAX_WAIT_S, WAIT_HEADER

MAX_HEAD_BYTES = 8 * 1024
END_OF_HEAD = b"\r\n\r\n"

_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")
_WAIT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


class RefusedRequestError(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class FileRequest(msgspec.Struct, frozen=True):
    """A parsed request. file: "" for the listing. start, stop: of the range, `stop` None for the rest of the file.
    if_match: the digest that the model must have, "" for any. keeps: the connection stays open."""

    model: str
    file: str
    has_range: bool = False
    start: int = 0
    stop: int | None = None
    if_match: str = ""
    wait_s: float = 0.0
    keeps: bool = True


def parse_head(head: bytes) -> FileRequest:
    """Parses the head. Raises RefusedRequestError unless it is a plain GET of a listing or of one range."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "this is not a request of HTTP/1.1")
    if words[0] != "GET":
        raise RefusedRequestError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is supported")
    headers = _headers(lines)
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "a GET must have no body")
    model, file = _path(words[1])
    has_range, start, stop = _range(headers.get("range"))
    keeps = words[2] == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    if_match = headers.get("if-match", "*")
    return FileRequest(model, file, has_range, start, stop, _digest(if_match), _wait_s(headers), keeps)


def _headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or name.lower() in headers:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "a header is malformed or repeated")
        headers[name.lower()] = value.strip()
    return headers


def _path(target: str) -> tuple[str, str]:
    """Returns (model, file). A name may contain quoted slashes; the file's name is checked later."""
    parts = target.split("/")
    if len(parts) not in (3, 4) or parts[:2] != ["", "models"] or "?" in target or not all(parts[2:]):
        raise RefusedRequestError(HTTPStatus.NOT_FOUND, "nothing is served under this path")
    try:
        model, *files = (unquote(part, errors="strict") for part in parts[2:])
    except UnicodeDecodeError as exc:
        raise RefusedRequestError(HTTPStatus.NOT_FOUND, "nothing is served under this path") from exc
    return model, files[0] if files else ""


def _range(text: str | None) -> tuple[bool, int, int | None]:
    if text is None:
        return False, 0, None
    found = _RANGE.fullmatch(text)
    if not found or (found[2] and int(found[2]) < int(found[1])):
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "only one range `bytes=FIRST-LAST` is supported")
    return True, int(found[1]), int(found[2]) + 1 if found[2] else None


def _digest(if_match: str) -> str:
    return "" if if_match == "*" else if_match.strip('"')


def _wait_s(headers: dict[str, str]) -> float:
    text = headers.get(WAIT_HEADER.lower(), "0")
    if not _WAIT.fullmatch(text):
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, f"{WAIT_HEADER} is not a number of seconds")
    return min(MAX_WAIT_S, float(text))
