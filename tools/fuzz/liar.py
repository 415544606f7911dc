"""A hub and a peer in one that lie: about names, sizes and contents, by redirects, and by answers that are not HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint
from tools.fuzz.mutate import TEXTS, mutated

WEIGHTS = "model.safetensors"
COMMIT = "c" * 40
DIGEST = "d" * 64
TOKEN = "hf_token_of_the_fuzzer"
SIZES = (2**62, 2**63, 2**64, 2**50, 2**31, -1, 0, 3.5, True, "9", None, [1])
ORIGINS = ("..", "../../etc", "/etc", "\0", "x" * 5000, "a/b/c", "\ud800", "-", "\x1b[31m", 7, None)
LIES = {
    "truth": 4, "names": 10, "sizes": 10, "origin": 8, "listing": 12, "content": 16, "redirect": 16, "answer": 12,
    "range": 6, "endless": 3, "bomb": 1, "many": 1, "header": 1,
}  # fmt: skip
"""The lies, and how many of 100 models have each."""

NUM_MANY = 100_000
CLAIMED_HEADER = 90_000_000
_PIECE = bytes(2**16)
_NUMBER = re.compile(r"m(\d{1,9})\b")


def lie_of(seed: int, number: int) -> str:
    """Returns what is wrong with a model, by its number."""
    return random.Random(f"{seed}/{number}").choices(list(LIES), list(LIES.values()))[0]


def true_files(directory: Path) -> dict[str, bytes]:
    """Returns the files of a valid checkpoint."""
    write_checkpoint(directory, TinyModel(layers=2, hidden=64))
    return {file.name: file.read_bytes() for file in directory.iterdir()}


class Liar:
    """Serves models `m<number>` as a hub and as a peer. `elsewhere` is another host to which it redirects."""

    def __init__(self, seed: int, files: Mapping[str, bytes], outside: Path) -> None:
        self._seed = seed
        self._files = files
        self._outside = outside
        self._servers: list[asyncio.Server] = []
        self.num_answers = 0
        self.lies: Counter[str] = Counter()
        self.seen_elsewhere: list[bytes] = []
        """Heads of the requests that reached the other host."""

    async def start(self) -> None:
        self._servers = [
            await asyncio.start_server(handler, "127.0.0.1", 0, backlog=256) for handler in (self._serve, self._listen)
        ]

    async def stop(self) -> None:
        for server in self._servers:
            server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].sockets[0].getsockname()[1]}"

    @property
    def elsewhere(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].sockets[0].getsockname()[1]}"

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The other host: it records requests, and answers nothing useful."""
        with suppress(OSError, EOFError, asyncio.LimitOverrunError):
            self.seen_elsewhere.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            await writer.drain()
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, asyncio.LimitOverrunError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.num_answers += 1
                if not await self._answer(head.decode("latin-1"), writer):
                    break
        writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> bool:
        """Answers a request; returns whether the connection stays open."""
        method, path, _ = head.split(" ", 2)
        found = _NUMBER.search(path)
        number = int(found[1]) if found else 0
        lie, rng = lie_of(self._seed, number), random.Random(f"{self._seed}/{number}/{path}/{self.num_answers}")
        self.lies[lie] += 1
        if lie == "redirect" and rng.random() < 0.5:
            writer.write(_head(302, {"Location": self._target(rng), "Content-Length": "0"}))
            return True
        name = path.rpartition("/")[2].partition("?")[0]
        is_listing = name not in self._files
        body = self._listing(path, number, lie, rng) if is_listing else self._content(name, lie, rng)
        headers = {"ETag": f'"{DIGEST}"', "X-Repo-Commit": COMMIT, "Content-Type": "application/json"}
        asked = re.search(r"(?i)^range: bytes=(\d+)-(\d+)\r?$", head, re.MULTILINE)
        if not is_listing and lie == "header" and name == WEIGHTS:
            return await self._claim(asked, headers, method, writer)
        status, headers, body = _ranged(asked, headers, body, rng, is_lie=lie == "range")
        if lie == "bomb" and is_listing:
            body, headers = _bomb(), {**headers, "Content-Encoding": "gzip"}
        headers["Content-Length"] = str(len(body))
        whole = _head(status, headers) + (b"" if method == "HEAD" else body)
        if lie == "endless" and method == "GET":
            await _without_end(whole.replace(b"Content-Length", b"X-Length"), writer)
            return False
        writer.write(mutated(rng, whole) if lie == "answer" and rng.random() < 0.7 else whole)
        await writer.drain()
        return lie != "answer"

    def _target(self, rng: random.Random) -> str:
        here = self.url.removeprefix("http://")
        return rng.choice(
            ("file:///etc/passwd", f"{self.elsewhere}/x", f"//{self.elsewhere[7:]}/y", "ftp://127.0.0.1/", "",
             "/loop/m1", f"http://{here}@{self.elsewhere[7:]}/z", f"http://{here}\\@{self.elsewhere[7:]}/w",
             "http://[::1", "data:,x", f"https://{here}/", "x" * 70_000)
        )  # fmt: skip

    def _listing(self, path: str, number: int, lie: str, rng: random.Random) -> bytes:
        sizes: dict[str, object] = {name: len(content) for name, content in self._files.items()}
        repo: object = f"org/m{number}"
        revision: object = COMMIT
        if lie == "names":
            evil = (f"{self._outside}/evil.json", "../evil.json", "../../evil.safetensors", "evil\0.json",
                    "x" * 300 + ".json", "exo-mesh.files", "exo-mesh.lock", "config.json.part", "a/../../evil.txt",
                    "evil.json\n", ".evil.json", *TEXTS)  # fmt: skip
            sizes |= {name: rng.choice((5, 100)) for name in evil}
        elif lie == "sizes":
            sizes[rng.choice(list(sizes))] = rng.choice(SIZES)
        elif lie == "many":
            sizes |= {f"f{i}.json": 5 for i in range(NUM_MANY)}
        elif lie == "header":
            sizes[WEIGHTS] = 2**40
        elif lie == "origin":
            repo, revision = rng.choice(((rng.choice(ORIGINS), revision), (repo, rng.choice(ORIGINS))))
        said = _as_hub(repo, revision, sizes) if path.startswith("/api") else _as_peer(repo, revision, sizes)
        text = json.dumps(said).encode()
        return mutated(rng, text) if lie == "listing" else text

    def _content(self, name: str, lie: str, rng: random.Random) -> bytes:
        content = self._files[name]
        return mutated(rng, content) if lie == "content" else content

    async def _claim(
        self, asked: re.Match[str] | None, headers: Mapping[str, str], method: str, writer: asyncio.StreamWriter
    ) -> bool:
        """A header of CLAIMED_HEADER bytes, all of them white space."""
        start, stop = (int(asked[1]), int(asked[2]) + 1) if asked else (0, CLAIMED_HEADER)
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{2**40}", "Content-Length": str(stop - start)}
        writer.write(_head(206, {**headers, **span}))
        while start < stop and method == "GET":
            piece = (struct.pack("<Q", CLAIMED_HEADER)[start:] if start < 8 else b" " * 2**16)[: stop - start]
            writer.write(piece)
            await writer.drain()
            start += len(piece)
        return True


def _as_hub(repo: object, revision: object, sizes: Mapping[str, object]) -> object:
    siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
    return {"id": repo, "modelId": repo, "sha": revision, "private": False, "tags": [], "downloads": 1,
            "siblings": siblings}  # fmt: skip


def _as_peer(repo: object, revision: object, sizes: Mapping[str, object]) -> object:
    files = {name: {"size": size, "sha256": ""} for name, size in sizes.items()}
    return {"repo": repo, "revision": revision, "digest": "", "files": files}


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} x", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace")


def _ranged(
    asked: re.Match[str] | None, headers: dict[str, str], body: bytes, rng: random.Random, *, is_lie: bool
) -> tuple[int, dict[str, str], bytes]:
    if asked is None:
        return 200, headers, body
    start, stop, size = int(asked[1]), min(int(asked[2]) + 1, len(body)), len(body)
    if start >= stop:
        return 416, headers, b""
    said = (
        rng.choice(((0, stop), (start, stop + 9), (2**62, 2**63), (start, start), (-1, 5))) if is_lie else (start, stop)
    )
    return 206, {**headers, "Content-Range": f"bytes {said[0]}-{said[1] - 1}/{size}"}, body[start:stop]


def _bomb() -> bytes:
    """4 GiB of white space, compressed to 4 MB."""
    return gzip.compress(b" " * 2**22, 9) * 1024


async def _without_end(beginning: bytes, writer: asyncio.StreamWriter) -> None:
    """At most 256 MiB, so that a client that never stops is found by its memory before the machine is full."""
    writer.write(beginning)
    for _ in range(2**12):
        writer.write(_PIECE)
        await writer.drain()
