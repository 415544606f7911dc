"""File servers with real sockets, and plain clients of them."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import http.client
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exo_mesh.domain.spans import Span, merged
from exo_mesh.models.fetcher.wire import Source, Tls
from exo_mesh.models.file_server.messages import path_of
from exo_mesh.models.file_server.server import FileServer
from exo_mesh.security.certificates import issue
from exo_mesh.security.credentials import Credentials, CredentialSource
from exo_mesh.weights.fetched import FetchedFile, Manifest, part_of, write_manifest

NAME = "org/tiny"
DIGEST = "d" * 64
WEIGHTS = "model.safetensors"
DEADLINE_S = 10.0


def credentials_of(secret: str, name: str = "peer") -> Credentials:
    return issue(secret, name, ["127.0.0.1"], datetime.datetime.now(datetime.UTC))


def tls_of(own: Credentials) -> Tls:
    """The same credentials as a fetcher gets them."""
    return Tls(own.authority.decode(), own.certificate.decode(), own.private_key.decode())


@dataclass
class Served:
    """A server of one model in `model_dir`, and the bytes of its weights file."""

    server: FileServer
    port: int
    model_dir: Path
    content: bytes
    is_closed_mesh: bool = False
    dirs: dict[str, tuple[Path, str]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"{'https' if self.is_closed_mesh else 'http'}://127.0.0.1:{self.port}"

    def source(self, *, peer: str = "p1", is_arriving: bool = False) -> Source:
        return Source(peer, (self.url,), is_arriving)

    def get(
        self, path: str, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """(status, headers, body), over a connection of its own."""
        connection: http.client.HTTPConnection
        if tls:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=DEADLINE_S, context=tls)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.headers, response.read()  # type: ignore[return-value]

    def range(self, start: int, stop: int, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        """As `get`, of bytes of the weights."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.get(path_of(NAME, WEIGHTS), {"Range": f"bytes={start}-{stop - 1}", **named})


@contextlib.contextmanager
def serving(
    model_dir: Path, credentials: CredentialSource | None = None, *, num_bytes: int = 100_000, **bounds: Any
) -> Iterator[Served]:
    """Serve a model of noise. bounds: of FileServer."""
    content = random.Random(1).randbytes(num_bytes)
    if not model_dir.exists():
        model_dir.mkdir(parents=True)
        (model_dir / WEIGHTS).write_bytes(content)
        (model_dir / "config.json").write_text("{}")
        (model_dir / "model.safetensors.index.json").write_text("{}")
    dirs = {NAME: (model_dir, DIGEST)}
    server = FileServer(dirs.get, credentials, **bounds)
    port = server.start("127.0.0.1", 0)
    try:
        yield Served(server, port, model_dir, content, credentials is not None, dirs)
    finally:
        server.stop()


class Arriving:
    """A model directory into which the bytes of the weights come bit by bit."""

    def __init__(self, model_dir: Path, content: bytes) -> None:
        self._dir = model_dir
        self._content = content
        self._file = FetchedFile(len(content), hashlib.sha256(content).hexdigest())
        model_dir.mkdir(parents=True)
        (model_dir / "config.json").write_text("{}")
        with part_of(model_dir, WEIGHTS).open("wb") as stream:
            stream.truncate(len(content))
        self._write()

    def bring(self, *spans: Span) -> None:
        """These bytes are there from now on; with all of them the file gets its own name."""
        with part_of(self._dir, WEIGHTS).open("r+b") as stream:
            for start, stop in spans:
                stream.seek(start)
                stream.write(self._content[start:stop])
        self._file.present = list(merged([*self._file.present, *spans]))
        if self._file.is_whole:
            part_of(self._dir, WEIGHTS).rename(self._dir / WEIGHTS)
        self._write()

    def _write(self) -> None:
        write_manifest(self._dir, Manifest(NAME, "org/tiny", "r" * 40, {WEIGHTS: self._file}))


def wait_until(condition: Callable[[], object]) -> None:
    """For threads; the test fails if it never holds."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.005)
