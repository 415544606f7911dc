"""Reads models from a hub. huggingface_hub handles names, addresses, tokens, proxies and errors; bytes come by range.

Environment: HF_ENDPOINT, HF_TOKEN, HF_HOME and the others that huggingface_hub documents. The token is sent to the
hub's own address only, and is in no message.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants, get_session, get_token, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from exo_mesh.base.printable import printable, quoted
from exo_mesh.errors import FetchError, MeshError, UnknownModelError
from exo_mesh.models.fetcher.hub_client import FILE
from exo_mesh.models.fetcher.listings import field_of, is_repository, whole_number
from exo_mesh.models.fetcher.source import NoRangesError, Sink, SourceError
from exo_mesh.models.fetcher.wire import HubModel
from exo_mesh.models.file_server.listing import FileInfo, Listing
from exo_mesh.weights.safetensors import DTYPE_BITS

ASK_TRIES = 4
ASK_LIMIT_S = 10.0
"""Time limit of one attempt; a hub that accepts the connection and does not answer is asked only once."""

FIRST_PAUSE_S = 0.5
MAX_PATIENCE_S = 60.0
"""How long a request to the hub's API waits if the hub says Retry-After."""

MAX_TAGS, MAX_TAG = 100, 100
"""Most tags of a model in a search result, and most characters of a tag."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_SEARCHED = ["downloads", "likes", "gated", "tags", "safetensors", "gguf", "usedStorage"]
_T = TypeVar("_T")


class HubFiles:
    """One revision of a repository. After `listing`, the revision is a commit."""

    peer = ""

    def __init__(self, repo: str, revision: str) -> None:
        self.repo = repo
        self.revision = revision
        self._locations: dict[str, str] = {}
        self._asking: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._has_ranges = True
        self._reading: set[socket.socket] = set()
        self._is_closed = False
        self._folders: dict[str, str] | None = None  # the folders of GGUF files, by base name

    def listing(self) -> Listing:
        """Lists the files, with retries while the hub is busy. Raises UnknownModelError and FetchError."""
        info = ask(lambda: HfApi().model_info(self.repo, revision=self.revision, files_metadata=True,
                                              timeout=ASK_LIMIT_S), self.repo, self.revision)  # fmt: skip
        self.revision = info.sha or self.revision
        files = {
            str(sibling.rfilename): FileInfo(sibling.size or 0, *_digests(sibling)) for sibling in info.siblings or []
        }
        with self._lock:
            self._folders = {path.rpartition("/")[2]: path for path in files if path.endswith(".gguf")}
        return Listing(self.repo, self.revision, files)

    def read(self, file: str, start: int, stop: int, sink: Sink) -> None:
        headers = {"Accept-Encoding": "identity"}
        if self._has_ranges:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        location = self._location(file)
        if _is_hub(location):
            headers = build_hf_headers(headers=headers)
        limits = httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        try:
            with (
                get_session().stream(
                    "GET", location, headers=headers, timeout=limits, extensions={FILE: True}
                ) as response,
                self._cut_at_close(response),
            ):
                skip = self._checked(response, file, start)
                _pass_on(response, skip, stop - start, sink)
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OfflineModeIsEnabled, RuntimeError) as exc:
            raise translated(exc, self.repo, self.revision) from exc

    def close(self) -> None:
        """Ends the running reads. Idle connections stay open: they belong to the process."""
        with self._lock:
            self._is_closed = True
            for one in self._reading:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(one, socket.SHUT_RDWR)  # of a TLS socket too: its reader still has its state

    @contextlib.contextmanager
    def _cut_at_close(self, response: httpx2.Response) -> Iterator[None]:
        """While it runs, `close` ends the connection of a response."""
        stream = response.extensions.get("network_stream")
        one = stream.get_extra_info("socket") if stream is not None and response.http_version != "HTTP/2" else None
        with self._lock:
            if self._is_closed:
                raise SourceError("the download has ended")
            if one is not None:
                self._reading.add(one)
        try:
            yield
        finally:
            with self._lock:
                self._reading.discard(one)

    def _location(self, file: str) -> str:
        """Returns the address of a file's bytes; asked once, because a hub counts requests."""
        with self._lock:
            asking = self._asking.setdefault(file, threading.Lock())
        with asking:
            return self._locations.get(file) or self._ask_for_location(file)

    def _ask_for_location(self, file: str) -> str:
        if file.endswith(".gguf") and self._folders is None:
            self.listing()
        path = (self._folders or {}).get(file, file)
        url = hf_hub_url(self.repo, path, revision=self.revision)
        try:
            location = HfApi().get_hf_file_metadata(url=url, timeout=constants.HF_HUB_ETAG_TIMEOUT).location
        except (httpx2.HTTPError, httpx2.InvalidURL, RuntimeError, ValueError, OSError) as exc:
            raise translated(exc, self.repo, self.revision) from exc
        self._locations[file] = location
        return location

    def _checked(self, response: httpx2.Response, file: str, start: int) -> int:
        """Checks an answer and returns how many of its bytes come before the requested ones."""
        if response.status_code >= 400:
            response.read()
            if response.status_code in (401, 403, 404, 410) and not _is_hub(str(response.url)):
                self._locations.pop(file, None)
                raise SourceError(f"the hub's storage address of {file} has expired", retry_after_s=0)
            hf_raise_for_status(response)
        if response.status_code == 206:
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != start:
                raise SourceError(f"the hub sent other bytes of {file} than requested")
            return 0
        if response.status_code != 200:
            raise SourceError(f"the hub answered {response.status_code} for {file}")
        if start and self._has_ranges:
            self._has_ranges = False
            raise NoRangesError(f"the hub sends {file} only as a whole")
        return start


def _digests(sibling: RepoSibling) -> tuple[str, str]:
    """Returns (sha256, id in git). Of a large file, git has only a pointer, whose id says nothing of the content."""
    if sibling.lfs is not None:
        return str(field_of(sibling.lfs, "sha256") or ""), ""
    return "", str(sibling.blob_id or "")


def _pass_on(response: httpx2.Response, skip: int, count: int, sink: Sink) -> None:
    for piece in response.iter_raw():
        view = memoryview(piece)[skip : skip + count]
        skip = max(0, skip - len(piece))
        count -= len(view)
        if view:
            sink(view)
        elif not count:
            raise SourceError("the hub sent more bytes than requested")
        if not count and response.status_code != 206:
            return  # a 206 answer is read to its end, which is near, so that its connection can be reused
    if count:
        raise SourceError(f"the hub's connection ended {count} bytes too early")


def search_hub(query: str, limit: int) -> tuple[HubModel, ...]:
    """Returns models whose names match a query, the most downloaded first. Raises FetchError."""
    wanted = {"search": query, "limit": limit, "sort": "downloads", "expand": _SEARCHED}
    found = ask(lambda: _listed(wanted)[:limit], query, "")
    return tuple(
        HubModel(
            info.id,
            whole_number(info.downloads),
            whole_number(info.likes),
            whole_number(_weight_bytes(info)),
            bool(info.gated),
            tuple(printable(str(tag), MAX_TAG) for tag in (info.tags or ())[:MAX_TAGS]),
        )
        for info in found
        if is_repository(info.id)
    )


def _listed(params: Mapping[str, Any]) -> list[ModelInfo]:
    """Reads the hub's list of models with one request, where HfApi would retry for more than a minute."""
    url = f"{constants.ENDPOINT}/api/models"
    answer = get_session().get(url, params=params, headers=build_hf_headers(), timeout=ASK_LIMIT_S)
    hf_raise_for_status(answer)
    return [ModelInfo(**one) for one in answer.json()]  # type: ignore[no-untyped-call]


def _weight_bytes(info: ModelInfo) -> int:
    parameters = info.safetensors.parameters if info.safetensors is not None else None
    if parameters and all(dtype in DTYPE_BITS for dtype in parameters):
        return sum(whole_number(count) * DTYPE_BITS[dtype] // 8 for dtype, count in parameters.items())
    return info.used_storage or 0


def ask(question: Callable[[], _T], repo: str, revision: str) -> _T:
    """Asks the hub's API, with retries while the hub is busy. Raises UnknownModelError and FetchError."""
    for attempt in range(1, ASK_TRIES + 1):
        try:
            return question()
        except (httpx2.HTTPError, httpx2.InvalidURL, RuntimeError, ValueError, KeyError, TypeError, OSError) as exc:
            problem = translated(exc, repo, revision)
            if not isinstance(problem, SourceError):
                raise problem from exc
            pause_s = FIRST_PAUSE_S * 2 ** (attempt - 1) if problem.retry_after_s is None else problem.retry_after_s
            if attempt == ASK_TRIES or pause_s > MAX_PATIENCE_S or isinstance(exc, httpx2.TimeoutException):
                raise FetchError(str(problem), remedy=_reach()) from exc
            time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def translated(exc: Exception, repo: str, revision: str) -> MeshError | SourceError:
    """Translates an exception of huggingface_hub: into SourceError if a retry may help."""
    if isinstance(exc, MeshError | SourceError):
        return exc
    if isinstance(exc, GatedRepoError):
        return _gated(repo)
    if isinstance(exc, RevisionNotFoundError):
        return UnknownModelError(f"{repo} has no revision {quoted(revision)} at {_host()}", param="model")
    if isinstance(exc, RepositoryNotFoundError | HFValidationError):
        secret = "" if get_token() else "; if it is private, set HF_TOKEN in the environment of this node"
        return UnknownModelError(f"there is no model {quoted(repo)} at {_host()}{secret}", param="model")
    if isinstance(exc, EntryNotFoundError | DisabledRepoError):
        what = "has disabled" if isinstance(exc, DisabledRepoError) else "lacks a file of"
        return FetchError(f"{_host()} {what} {repo}", is_final=True)
    if isinstance(exc, OfflineModeIsEnabled):
        return FetchError(
            f"{repo} cannot be fetched from the hub in offline mode",
            remedy="unset HF_HUB_OFFLINE, and start the node without --offline",
            is_final=True,
        )
    if isinstance(exc, HfHubHTTPError):
        return _refused(exc, repo)
    if isinstance(exc, httpx2.InvalidURL | httpx2.UnsupportedProtocol | httpx2.TooManyRedirects):
        problem = f"HF_ENDPOINT {quoted(constants.ENDPOINT)} is not the address of a hub"
        return FetchError(problem, remedy=_reach(), is_final=True)
    if isinstance(exc, httpx2.HTTPError | httpx2.StreamError | OSError | RuntimeError):
        return SourceError(f"{_host()} cannot be reached, or ended the connection ({type(exc).__name__})")
    return FetchError(f"{_host()} gave an answer that is not a hub's ({type(exc).__name__})", remedy=_reach())


def _refused(exc: HfHubHTTPError, repo: str) -> MeshError | SourceError:
    """Translates a status that has no exception of its own."""
    status, headers = exc.response.status_code, exc.response.headers
    if status == 429:
        return SourceError(f"{_host()} limits the rate of requests (429)", retry_after_s=_retry_after_s(headers))
    if status >= 500 or status == 408:
        return SourceError(f"{_host()} answered {status}", retry_after_s=_retry_after_s(headers))
    if status == 401 and get_token():
        return FetchError(
            f"{_host()} refused {_token_place()}",
            remedy=f"make a new token at {constants.ENDPOINT}/settings/tokens and set it instead, or remove the token",
            is_final=True,
        )
    return FetchError(f"{_host()} refused {repo} ({status})", is_final=True)


def _retry_after_s(headers: Any) -> float | None:
    """Reads the wait from Retry-After in seconds, or from the `t` of a RateLimit header whose `r` (remaining) is 0."""
    text = headers.get("Retry-After", "")
    if text.isdigit():
        return float(text)
    found = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("RateLimit", ""))
    return float(found[1]) if found else None


def _gated(repo: str) -> FetchError:
    page = f"{constants.ENDPOINT}/{repo}"
    if get_token():
        return FetchError(
            f"{repo} is gated, and {_token_place()} gives no access to it",
            remedy=f"accept the terms at {page} with the account of that token; a fine-grained token also needs the "
            "permission to read gated repositories",
            is_final=True,
        )
    return FetchError(
        f"{repo} is gated: its files need the token of an account that accepted its terms; this node has none",
        remedy=f"accept the terms at {page}, make a token with read access at {constants.ENDPOINT}/settings/tokens, "
        "then set HF_TOKEN to it in the environment of this node, save it in Settings on the page of this node, or run "
        "`hf auth login` on this machine",
        is_final=True,
    )


class _NodeToken:
    """The token that an admin gave to the node, while it is in the environment of this process."""

    text = ""


def use_token(text: str) -> None:
    """Sends this token to the hub from now on, unless the process was started with a token in its environment."""
    if text == _NodeToken.text or (not _NodeToken.text and os.environ.get("HF_TOKEN")):
        return
    _NodeToken.text = text
    if text:
        os.environ["HF_TOKEN"] = text
    else:
        del os.environ["HF_TOKEN"]


def _token_place() -> str:
    if _NodeToken.text:
        return "the token that was given to this node (hf_token)"
    in_environment = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    return "the token in HF_TOKEN" if in_environment else "the token that `hf auth login` has stored"


def _host() -> str:
    return urlsplit(constants.ENDPOINT).netloc or constants.ENDPOINT


def _reach() -> str:
    return f"check that this machine can reach {constants.ENDPOINT} (see HF_ENDPOINT and HTTPS_PROXY)"


def _is_hub(url: str) -> bool:
    """Whether an address is the hub's own. Only the hub may see the token, not the storage that it redirects to."""
    parts, hub = urlsplit(url), urlsplit(constants.ENDPOINT)
    return (parts.scheme, parts.netloc) == (hub.scheme, hub.netloc)
