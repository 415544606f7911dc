"""Runs the requests of a node in the fetcher: one thread per request, and a few threads for all chunks together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from exo_mesh.base.printable import printable
from exo_mesh.domain.spans import num_bytes
from exo_mesh.errors import CancelledRequestError, FetchError, MeshError, ModelError
from exo_mesh.models.fetcher.cache_source import CacheFiles
from exo_mesh.models.fetcher.download import MAX_AT_ONCE, Context, Download, UsedSource
from exo_mesh.models.fetcher.duty import DutyCycle
from exo_mesh.models.fetcher.hub_client import use_bounded_client
from exo_mesh.models.fetcher.hub_source import HubFiles, search_hub, use_token
from exo_mesh.models.fetcher.listings import checked
from exo_mesh.models.fetcher.skeleton import SkeletonOrder, fetch_headers, has_header, is_made, make_skeleton
from exo_mesh.models.fetcher.source import ModelFiles, SourceError
from exo_mesh.models.fetcher.verifying import UNKNOWN, FileCheck, HubBudget
from exo_mesh.models.fetcher.wire import (
    FILES_ONLY,
    Answer,
    CancelFetch,
    Fetch,
    Fetched,
    FetchFailed,
    FetchPace,
    FetchProgress,
    Request,
    Resolve,
    Resolved,
    Search,
    SearchResult,
    Setup,
    Source,
    Tls,
    Verified,
    Verify,
    WrongBytes,
)
from exo_mesh.models.fetcher.writing import Writers
from exo_mesh.models.file_server.listing import Listing
from exo_mesh.weights.card import read_card

PeerOpener = Callable[[Source, str, Tls | None], ModelFiles]
"""Opens the model's files at a peer: (source, name of the model, credentials of this node). Raises FetchError."""

_log = logging.getLogger(__name__)


@dataclass
class _Sources:
    """Creates the sources of one request, and closes them. digest: of the card that peers must have; "" for any."""

    open_peer: PeerOpener
    tls: Tls | None
    name: str
    repo: str
    revision: str
    digest: str = ""
    made: dict[Source, UsedSource] = field(default_factory=dict)

    def used(self, source: Source) -> UsedSource:
        if source not in self.made:
            opener = partial(self._peer, source) if source.peer else self._hub
            self.made[source] = UsedSource(source.peer, opener)
        return self.made[source]

    def _peer(self, source: Source) -> ModelFiles:
        files = self.open_peer(source, self.name, self.tls)
        if self.digest and files.listing().digest not in ("", self.digest):
            files.close()
            raise FetchError(f"peer {source.peer} has another version of {self.name}", is_final=True)
        return files

    def _hub(self) -> HubFiles:
        if not self.repo:
            raise FetchError(f"{self.name} is not on the hub: only peers have it", is_final=True)
        return HubFiles(self.repo, self.revision)

    def cache(self, sizes: Mapping[str, int]) -> tuple[UsedSource, ...]:
        """Returns the local Hugging Face cache as a source, if it has any of these files."""
        files = CacheFiles(self.repo, self.revision, sizes) if self.repo else None
        if files is None or not files.listing().files:
            return ()
        return (UsedSource(files.peer, lambda: files, is_local=True),)

    def close(self) -> None:
        for source in self.made.values():
            source.close()


class FetcherService:
    """Runs requests and passes answers to `send`, from any thread. duty: set to busy on a request of the node."""

    def __init__(self, send: Callable[[Answer], None], open_peer: PeerOpener, duty: DutyCycle | None = None) -> None:
        use_bounded_client()
        self._send = send
        self._open_peer = open_peer
        self._tls: Tls | None = None
        self._duty = duty or DutyCycle()
        self._writers = Writers()
        self._executor = ThreadPoolExecutor(MAX_AT_ONCE, "chunk")
        self._running: dict[int, Context] = {}
        self._resolving: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()

    def handle(self, request: Request) -> None:
        """Starts a request, and returns at once."""
        if isinstance(request, Setup):
            self._tls = request.tls
            self._writers.floor_bytes = request.floor_bytes
            use_token(request.hub_token)
        elif isinstance(request, FetchPace):
            self._duty.is_busy = request.is_busy
        elif isinstance(request, CancelFetch):
            with self._lock:
                if (context := self._running.get(request.id)) is not None:
                    context.cancel()
        else:
            context = Context(self._executor, self._duty)
            with self._lock:
                self._running[request.id] = context
            threading.Thread(
                target=self._run, args=(request, context), name=f"request {request.id}", daemon=True
            ).start()

    def _run(self, request: Resolve | Fetch | Verify | Search, context: Context) -> None:
        try:
            answer: Answer = self._answer(request, context)
        except CancelledRequestError as exc:
            answer = FetchFailed(request.id, exc.code, str(exc))
        except FetchError as exc:
            answer = FetchFailed(request.id, exc.code, printable(str(exc)), printable(exc.remedy), exc.is_final)
        except MeshError as exc:
            answer = FetchFailed(request.id, exc.code, printable(str(exc)), is_final=True)
        except Exception as exc:  # noqa: BLE001 - the node must get an answer
            _log.exception("request %d failed", request.id)
            answer = FetchFailed(request.id, FetchError.code, f"internal error of the fetcher ({type(exc).__name__})")
        with self._lock:
            del self._running[request.id]
        self._send(answer)

    def _answer(self, request: Resolve | Fetch | Verify | Search, context: Context) -> Answer:
        if isinstance(request, Search):
            return SearchResult(request.id, search_hub(request.query, request.limit))
        if isinstance(request, Resolve):
            with self._lock:
                turn = self._resolving.setdefault(request.model_dir, threading.Lock())
            with turn:
                self._resolve(request, context)
            return Resolved(request.id, dict(context.received))
        if isinstance(request, Verify):
            return Verified(request.id, self._verify(request, context), dict(context.received))
        self._fetch(request, context)
        return Fetched(request.id, dict(context.received))

    def _resolve(self, request: Resolve, context: Context) -> None:
        target = Path(request.model_dir)
        if is_made(target):
            return
        repo, _, wanted = request.repo.partition(":")
        quantisation, _, mode = wanted.partition(":")
        sources = _Sources(self._open_peer, self._tls, request.name, repo, request.revision)
        problem: MeshError = FetchError(f"no source has {request.name}")
        try:
            for source in request.sources:
                try:
                    listing = _listing(sources.used(source))
                except CancelledRequestError:
                    raise
                except MeshError as exc:
                    problem = exc
                    continue
                sources.repo, sources.revision = listing.repo or repo, listing.revision
                sizes = {name: info.size for name, info in listing.files.items()}
                first = (*sources.cache(sizes), sources.used(source))
                others = tuple(sources.used(other) for other in request.sources if other != source)
                order = SkeletonOrder(
                    request.name, target, listing, (*first, *others), request.trust_remote_code, quantisation,
                    is_files_only=mode == FILES_ONLY,
                )  # fmt: skip
                return make_skeleton(order, self._writers, context)
            raise problem
        finally:
            sources.close()

    def _fetch(self, request: Fetch, context: Context) -> None:
        def tell(done: int, total: int) -> None:
            self._send(FetchProgress(request.id, done, total, dict(context.received)))

        with self._writers.opened(Path(request.model_dir)) as writer:
            manifest = writer.manifest
            digest = _digest(writer.model_dir, manifest.name)
            sources = _Sources(self._open_peer, self._tls, manifest.name, manifest.repo, manifest.revision, digest)
            cache = sources.cache({name: file.size for name, file in manifest.files.items()})
            try:
                wanted = [
                    (share.pieces, (*cache, *(sources.used(source) for source in share.sources)))
                    for share in request.shares
                ]
                every = tuple(dict.fromkeys(source for _, used in wanted for source in used))
                names = dict.fromkeys(name for pieces, _ in wanted for name in pieces)
                headless = [
                    name for name in names if writer.missing(name, ((0, 8),)) and has_header(writer.model_dir, name)
                ]
                if headless:  # a corrupt file was dropped
                    fetch_headers(writer, headless, every, context)
                Download(writer, wanted, context, tell).run()
            finally:
                sources.close()

    def _verify(self, request: Verify, context: Context) -> tuple[str, ...]:
        """Returns the files that could not be checked. Raises FetchError if a file is wrong at all sources."""
        with self._writers.opened(Path(request.model_dir)) as writer:
            manifest = writer.manifest
            digest = _digest(writer.model_dir, manifest.name)
            sources = _Sources(self._open_peer, self._tls, manifest.name, manifest.repo, manifest.revision, digest)
            known = [(name, file) for name, file in manifest.files.items() if name in request.files]
            names = [name for name, file in known if file.is_unverified]
            here_bytes = sum(num_bytes(manifest.files[name].present) for name in names)
            budget = HubBudget(here_bytes if request.uses_hub else 0)
            try:
                used = [sources.used(source) for source in request.sources]
                unknown = []
                for name in names:
                    edges = request.edges.get(name, ())
                    check = FileCheck(writer, name, used, context, budget, word=request.word, edges=edges)
                    if check.run(lambda file: self._send(WrongBytes(request.id, file))) == UNKNOWN:
                        unknown.append(name)
                return tuple(unknown)
            finally:
                sources.close()


def _digest(model_dir: Path, name: str) -> str:
    """Returns the digest of the model's card, "" if no card can be read: for GGUF files, or without a header."""
    try:
        return read_card(model_dir, name).digest
    except ModelError:
        return ""


def _listing(source: UsedSource) -> Listing:
    try:
        return checked(source.files().listing())
    except SourceError as exc:
        raise FetchError(str(exc)) from exc
