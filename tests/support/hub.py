"""A model hub on the loopback, which huggingface_hub talks to through HF_ENDPOINT, and which can misbehave.

`with LoopbackHub() as hub: hub.add("org/name", directory)`; `hub.environment` is what a process needs to use it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

from exo_mesh.models.file_server.listing import git_id_of

LFS_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt")
BLOCK_BYTES = 64 * 2**10


@dataclass
class HubRepo:
    """One model. gated: files only for `tokens`. revisions: names of its only commit. is_xet: the weights lie on Xet:
    the hub names their hash and redirects to a signed address of the bridge, which knows no names of files."""

    directory: Path
    commit: str
    gated: str = ""
    private: bool = False
    tokens: frozenset[str] = frozenset()
    revisions: tuple[str, ...] = ("main",)
    tags: tuple[str, ...] = ("text-generation",)
    is_xet: bool = False

    def files(self) -> list[Path]:
        return sorted(path for path in self.directory.rglob("*") if path.is_file())

    def is_revision(self, name: str) -> bool:
        return name == self.commit or name in self.revisions

    def opens_to(self, token: str) -> bool:
        return not (self.gated or self.private) or token in self.tokens


@dataclass
class Refusal:
    """Answer this `times` times instead of what was asked for, where the path contains `path`."""

    status: int
    times: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    path: str = "/"


@dataclass
class Faults:
    """What the hub does wrong; set while it runs.

    refusals: in order, the first that fits a request is used. has_ranges: False means that it sends whole files.
    cut_bytes: it cuts a connection after so many bytes of a file. corrupt: so many times for a file, by its name, one
    byte in the middle of it is wrong. wrong_at: by a file's name, the position of a byte that is wrong when it is first
    sent. pause_s: before each block of BLOCK_BYTES. hold: while set, no file goes on.
    lists: makes what the API says of a repository out of what is true. has_ends: False means that every answer goes on
    with blanks until the client hangs up. good_for: how many answers a signature of the bridge is good for.
    """

    refusals: list[Refusal] = field(default_factory=list)
    has_ranges: bool = True
    cut_bytes: int = 0
    corrupt: dict[str, int] = field(default_factory=dict)
    wrong_at: dict[str, int] = field(default_factory=dict)
    pause_s: float = 0.0
    hold: threading.Event = field(default_factory=threading.Event)
    lists: Callable[[dict[str, Any]], Any] = lambda info: info
    has_ends: bool = True
    good_for: int = 2**31

    def refusal(self, path: str) -> Refusal | None:
        found = next((one for one in self.refusals if one.times > 0 and one.path in path), None)
        if found is not None:
            found.times -= 1
        return found


class LoopbackHub:
    """sent: bytes of files by `repo/name`, corrupt ones and those of cut connections included. requests: by method and
    kind ("api", "resolve", "blob", "xet-bridge"). seen_tokens: every token that came, also at blob addresses."""

    def __init__(self) -> None:
        self.repos: dict[str, HubRepo] = {}
        self.faults = Faults()
        self.sent: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.seen_tokens: set[str] = set()
        self.blob_tokens: set[str] = set()
        self.bridge_answers = 0
        self.lock = threading.Lock()
        self._digests: dict[tuple[Path, int, int], str] = {}
        self._servers = [_Server(("127.0.0.1", 0), _Handler, self) for _ in ("the hub", "its storage")]
        self._threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in self._servers]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.faults.hold.clear()
        self.faults.pause_s = 0
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def storage_url(self) -> str:
        """Where files of weights are: another origin, which must not see the token."""
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """For the processes that shall use this hub and no other; give them an HF_HOME of their own, too."""
        return {"HF_ENDPOINT": self.url, "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def add(self, repo: str, directory: Path, **settings: Any) -> HubRepo:
        """Serve a directory under an id. settings: fields of HubRepo."""
        commit = hashlib.sha1(f"{repo} {directory}".encode()).hexdigest()
        self.repos[repo] = HubRepo(directory, commit, **settings)
        return self.repos[repo]

    @property
    def sent_bytes(self) -> int:
        with self.lock:
            return sum(self.sent.values())

    def sent_of(self, suffix: str) -> int:
        """Bytes of files whose name ends so."""
        with self.lock:
            return sum(count for name, count in self.sent.items() if name.endswith(suffix))

    def xet_hash(self, file: Path) -> str:
        """The name of a file at the bridge: 64 hex digits that are not its SHA-256."""
        return hashlib.sha256(f"xet {self.sha256(file)}".encode()).hexdigest()

    def sha256(self, file: Path) -> str:
        found = file.stat()
        key = (file, found.st_size, found.st_mtime_ns)
        if key not in self._digests:
            with file.open("rb") as stream:
                self._digests[key] = hashlib.file_digest(stream, "sha256").hexdigest()
        return self._digests[key]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], hub: LoopbackHub) -> None:
        super().__init__(address, handler)
        self.hub = hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def _answer(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        kind = parts[0] if parts[0] in ("api", "blob", "xet-bridge") else "resolve"
        with hub.lock:
            hub.requests[f"{self.command} {kind}"] += 1
            hub.seen_tokens |= {token} - {""}
            hub.blob_tokens |= ({token} if kind in ("blob", "xet-bridge") else set()) - {""}
            refusal = hub.faults.refusal(self.path)
        if refusal is not None:
            self._refuse(refusal.status, "", "refused by the test", refusal.headers)
        elif kind == "api":
            self._api(parts[1:], parse_qs(url.query), parse_qs(body.decode()), token)
        elif kind == "blob":
            self._blob(*parts[1:])
        elif kind == "xet-bridge":
            self._xet_bridge(parts[-1], parse_qs(url.query), has_token=bool(token))
        else:
            self._resolve(parts, token)

    def _api(self, parts: list[str], query: Mapping[str, list[str]], form: Mapping[str, list[str]], token: str) -> None:
        if parts == ["models"]:
            return self._json(self._search(query))
        repo = self._repo(parts[1:])
        if parts[0] != "models" or repo is None or (repo[1].private and token not in repo[1].tokens):
            return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        name, found, rest = repo
        revision = rest[1] if len(rest) > 1 else "main"
        if not found.is_revision(revision):
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if not rest or rest[0] == "revision":
            return self._json(self.server.hub.faults.lists(self._info(name, found, with_blobs="blobs" in query)))
        tree = [self._entry(found, file) for file in found.files()]
        if rest[0] == "tree":
            return self._json(tree)
        if rest[0] == "paths-info":
            return self._json([entry for entry in tree if entry["path"] in form.get("paths", [])])
        return self._refuse(404, "", "no such route")

    def _repo(self, parts: list[str]) -> tuple[str, HubRepo, list[str]] | None:
        """(id, repository, what follows the id in the path)."""
        for length in (2, 1):
            name = "/".join(parts[:length])
            if name in self.server.hub.repos:
                return name, self.server.hub.repos[name], parts[length:]
        return None

    def _search(self, query: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        wanted = query.get("search", [""])[0].lower()
        limit = int(query.get("limit", ["1000"])[0])
        found = [(name, repo) for name, repo in self.server.hub.repos.items() if wanted in name.lower()]
        return [self._info(name, repo, with_blobs=False) for name, repo in found[:limit] if not repo.private]

    def _info(self, name: str, repo: HubRepo, *, with_blobs: bool) -> dict[str, Any]:
        siblings = []
        for file in repo.files():
            sibling: dict[str, Any] = {"rfilename": str(file.relative_to(repo.directory))}
            if with_blobs:
                entry = self._entry(repo, file)
                lfs = entry.get("lfs")
                sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                sibling |= {"lfs": {**lfs, "sha256": lfs["oid"]}} if lfs else {}
            siblings.append(sibling)
        weights = sum(file.stat().st_size for file in repo.files() if file.suffix in LFS_SUFFIXES)
        return {
            "_id": repo.commit[:24], "id": name, "modelId": name, "sha": repo.commit, "private": repo.private,
            "gated": repo.gated or False, "disabled": False, "downloads": 1234, "likes": 5, "tags": list(repo.tags),
            "siblings": siblings, "usedStorage": weights, "lastModified": "2026-01-02T03:04:05.000Z",
        }  # fmt: skip

    def _entry(self, repo: HubRepo, file: Path) -> dict[str, Any]:
        size = file.stat().st_size
        entry: dict[str, Any] = {"type": "file", "path": str(file.relative_to(repo.directory)), "size": size}
        if file.suffix in LFS_SUFFIXES:
            sha256 = self.server.hub.sha256(file)
            entry |= {"oid": sha256[:40], "lfs": {"oid": sha256, "size": size, "pointerSize": 134}}
        else:
            entry["oid"] = git_id_of(file.read_bytes())
        return entry

    def _resolve(self, parts: list[str], token: str) -> None:
        repo = self._repo(parts)
        if repo is None or len(repo[2]) < 3 or repo[2][0] != "resolve":
            return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        name, found, (_, revision, *path) = repo
        if not found.opens_to(token):
            status = 403 if token else 401
            return self._refuse(status, "GatedRepo", f"Access to model {name} is restricted.")
        if not found.is_revision(revision):
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        file = found.directory.joinpath(*path)
        if not file.is_file():
            return self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": found.commit})
        headers = {"X-Repo-Commit": found.commit, "Accept-Ranges": "bytes"}
        if file.suffix not in LFS_SUFFIXES:
            return self._send(name, file, headers | {"ETag": f'"{self.server.hub.sha256(file)[:40]}"'})
        digest, size = self.server.hub.sha256(file), file.stat().st_size
        location = f"{self.server.hub.storage_url}/blob/{quote(name, safe='')}/{quote('/'.join(path), safe='')}"
        if found.is_xet:
            xet_hash = self.server.hub.xet_hash(file)
            location = f"{self.server.hub.storage_url}/xet-bridge/{found.commit[:24]}/{xet_hash}?{self._signature()}"
            token_at = f"{self.server.hub.url}/api/models/{name}/xet-read-token/{found.commit}"
            parts_at = f"{self.server.hub.storage_url}/v1/reconstructions/{xet_hash}"
            link = f'<{token_at}>; rel="xet-auth", <{parts_at}>; rel="xet-reconstruction-info"'
            headers |= {"X-Xet-Hash": xet_hash, "Link": link}
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(size), "Location": location}
        return self._head(HTTPStatus.FOUND, headers | linked | {"Content-Length": "0"})

    def _blob(self, name: str, path: str) -> None:
        """What a signed address of the storage behind a hub answers."""
        file = self.server.hub.repos[name].directory / path
        self._send(name, file, {"ETag": f'"{self.server.hub.sha256(file)[:32]}"'})

    def _signature(self) -> str:
        """The query of an address that the bridge accepts now."""
        hub = self.server.hub
        number = hub.bridge_answers // hub.faults.good_for
        return f"X-Amz-Expires=3600&X-Amz-SignedHeaders=host&X-Amz-Signature=s{number}&x-id=GetObject"

    def _xet_bridge(self, xet_hash: str, query: Mapping[str, list[str]], *, has_token: bool) -> None:
        """What the bridge answers: bytes of a file by its hash, for requests with a valid signature. As the
        signature is for GET, it refuses HEAD; and it refuses a token beside a signature."""
        hub = self.server.hub
        signature = query.get("X-Amz-Signature", [""])[0]
        latest = hub.bridge_answers // hub.faults.good_for
        if self.command != "GET" or has_token:
            return self._refuse(403 if not has_token else 400, "", "only one kind of authorisation is allowed")
        if signature != f"s{latest}":
            return self._refuse(403, "", "Request has expired")
        for name, repo in hub.repos.items():
            for file in repo.files() if repo.is_xet else ():
                if file.suffix in LFS_SUFFIXES and hub.xet_hash(file) == xet_hash:
                    with hub.lock:
                        hub.bridge_answers += 1
                    return self._send(name, file, {"ETag": f'"{xet_hash}"'})
        return self._refuse(404, "", "no such file")

    def _send(self, repo: str, file: Path, headers: Mapping[str, str]) -> None:
        size = file.stat().st_size
        start, stop, status = 0, size, HTTPStatus.OK
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes=") and self.server.hub.faults.has_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(int(last or size) + 1, size), HTTPStatus.PARTIAL_CONTENT
            if start >= size:
                return self._refuse(416, "", "no such range", {"Content-Range": f"bytes */{size}"})
            headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        self._head(status, {**headers, "Content-Length": str(stop - start)})
        if self.command == "HEAD":
            return None
        for block in self._blocks(f"{repo}/{file.name}", file, start, stop):
            self.wfile.write(block)
        return self._go_on_for_ever()

    def _go_on_for_ever(self) -> None:
        while not self.server.hub.faults.has_ends:
            self.wfile.write(b" " * BLOCK_BYTES)

    def _blocks(self, key: str, file: Path, start: int, stop: int) -> Iterator[bytes]:
        hub, faults, sent = self.server.hub, self.server.hub.faults, 0
        middle = file.stat().st_size // 2
        with file.open("rb") as stream:
            stream.seek(start)
            while start < stop:
                if faults.pause_s:
                    threading.Event().wait(faults.pause_s)
                while faults.hold.is_set():
                    threading.Event().wait(0.02)
                most = min(BLOCK_BYTES, stop - start, faults.cut_bytes - sent if faults.cut_bytes else BLOCK_BYTES)
                if most <= 0:
                    self.close_connection = True
                    return
                block = bytearray(stream.read(most))
                if start <= middle < start + len(block) and faults.corrupt.get(file.name, 0) > 0:
                    faults.corrupt[file.name] -= 1
                    block[middle - start] ^= 0xFF
                with hub.lock:
                    hub.sent[key] += len(block)
                    wrong_at = faults.wrong_at.get(file.name, -1)
                    if start <= wrong_at < start + len(block):
                        block[wrong_at - start] ^= 0xFF
                        del faults.wrong_at[file.name]
                yield bytes(block)
                start, sent = start + len(block), sent + len(block)

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self._head(HTTPStatus.OK, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)
            self._go_on_for_ever()

    def _refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps({"error": message}).encode()
        named = {"X-Error-Code": code} if code else {}
        lengths = {"X-Error-Message": message, "Content-Type": "application/json", "Content-Length": str(len(body))}
        self._head(status, named | lengths | dict(headers or {}))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if self.server.hub.faults.has_ends or name != "Content-Length" or self.command == "HEAD":
                self.send_header(name, value)
        self.end_headers()
