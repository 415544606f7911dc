"""Reads a batch of requests, and appends their results, both as JSON lines in OpenAI's batch format."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from exo_mesh.base.printable import quoted
from exo_mesh.errors import InputError, MeshError

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_LINE_BYTES = 16 * 2**20
MAX_REQUESTS = 1_000_000
MAX_SHOWN = 10
"""Wrong lines that an error lists."""


class BatchRequest(msgspec.Struct, frozen=True):
    """One line of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


class BatchFileError(InputError):
    """A file of requests or results cannot be used; the message names the lines."""

    code = "bad_setting"


def check_requests(path: Path) -> set[str]:
    """Checks every line of a batch before anything is sent, and returns the custom ids. Raises BatchFileError that
    lists the first wrong lines."""
    ids: set[str] = set()
    wrong: list[str] = []
    for number, data in _lines(path):
        try:
            request = _request(data)
            if request.custom_id in ids:
                raise ValueError(f"custom_id {quoted(request.custom_id, 64)} is used twice")
            ids.add(request.custom_id)
        except ValueError as exc:
            wrong.append(f"line {number}: {exc}")
        if len(wrong) == MAX_SHOWN or len(ids) > MAX_REQUESTS:
            break
    if len(ids) > MAX_REQUESTS:
        wrong.append(f"it has more than {MAX_REQUESTS} requests: split it")
    if wrong:
        raise BatchFileError(f"{path}: nothing was sent; " + "; ".join(wrong))
    if not ids:
        raise BatchFileError(f"{path} has no requests")
    return ids


def requests_of(path: Path) -> Iterator[BatchRequest]:
    """Yields the requests of a batch that `check_requests` has accepted. Raises BatchFileError if it has changed."""
    for number, data in _lines(path):
        try:
            yield _request(data)
        except ValueError as exc:
            raise BatchFileError(f"{path} has changed: line {number}: {exc}") from exc


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number, line) of every line that is not empty; a longer one than MAX_LINE_BYTES is cut. Raises
    BatchFileError if the file cannot be read."""
    try:
        stream = path.open("rb")
    except OSError as exc:
        raise BatchFileError(f"{path}: cannot be read: {exc.strerror}") from exc
    with stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if line.strip():
                yield number, line
            if len(line) > MAX_LINE_BYTES:
                return  # the caller refuses the line


def _request(data: bytes) -> BatchRequest:
    """Reads a line. Raises ValueError with the reason."""
    if len(data) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {MAX_LINE_BYTES} bytes")
    try:
        line = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ValueError("it is not JSON") from exc
    if not isinstance(line, dict):
        raise ValueError("it is not a JSON object")
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512:
        raise ValueError("custom_id must be a text of 1 to 512 characters")
    if line.get("method") != "POST":
        raise ValueError('method must be "POST"')
    if line.get("url") not in URLS:
        raise ValueError(f"url must be {' or '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    if body.get("stream"):
        raise ValueError("body.stream must be false or left out")
    return BatchRequest(custom_id, line["url"], body)


class ResultFile:
    """The results of a batch. Every line is whole: what an interruption left of a line is cut off."""

    def __init__(self, path: Path, ids: set[str]) -> None:
        """Opens or creates the file, and reads which requests have a result. Raises BatchFileError for a file of
        another batch, or one that another process writes."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise BatchFileError(f"{path}: cannot be written: {exc.strerror}") from exc
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.done, self._size = self._read(ids)
            os.ftruncate(self._fd, self._size)
            os.lseek(self._fd, self._size, os.SEEK_SET)
        except BlockingIOError as exc:
            os.close(self._fd)
            raise BatchFileError(f"{path} is being written by another `exo-mesh batch`") from exc
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def add(self, custom_id: str, status: int, body: Any) -> None:
        """Appends a result. Raises MeshError, with the file as it was before, if the disk is full."""
        answer = {
            "status_code": status,
            "request_id": body.get("id", "") if isinstance(body, dict) else "",
            "body": body,
        }
        line = {"id": f"batch_req_{len(self.done) + 1}", "custom_id": custom_id, "response": answer, "error": None}
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
                os.lseek(self._fd, self._size, os.SEEK_SET)
            raise MeshError(
                f"{self._path}: {exc.strerror}; {len(self.done)} results are in it; "
                "make room and run the same command again"
            ) from exc
        self._size += len(data)
        self.done.add(custom_id)

    def _read(self, ids: set[str]) -> tuple[set[str], int]:
        """The custom ids of the results, and the size of the whole lines."""
        done: set[str] = set()
        size = 0
        with os.fdopen(os.dup(self._fd), "rb") as stream:
            for number, data in enumerate(stream, 1):
                if not data.endswith(b"\n"):
                    break  # the last write was interrupted
                custom_id = _id_of_result(data)
                if custom_id not in ids:
                    raise BatchFileError(
                        f"{self._path}: line {number} is not a result of this batch: name another file with --output"
                    )
                done.add(custom_id)
                size += len(data)
        return done, size


def _id_of_result(data: bytes) -> str:
    try:
        line = json.loads(data)
        return str(line["custom_id"]) if "response" in line else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
