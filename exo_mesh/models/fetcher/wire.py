"""The messages between a node and its fetcher: one JSON object per line, requests in, answers out.

A request has an id that its answers repeat; several requests run at once. The last answer to a request is Resolved,
Fetched, Verified, SearchResult or FetchFailed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from exo_mesh.domain.spans import Span

MAX_LINE_BYTES = 32 * 2**20

FILES_ONLY = "files"
"""End of a Resolve's repo for the files of a GGUF model that cannot be run: `id:Q4_K_M:files`."""


NO_EDGES: Mapping[str, tuple[int, ...]] = MappingProxyType({})

Word = Literal["", "first", "only"]


class Tls(msgspec.Struct, frozen=True):
    """Credentials of this node in its mesh, as PEM text."""

    authority: str
    certificate: str
    private_key: str


class Source(msgspec.Struct, frozen=True):
    """A source of bytes. peer: id of the peer, "" for the hub. urls: of its file server, the best path first.

    is_arriving: the peer is fetching these bytes itself, and passes them on as they arrive.
    """

    peer: str = ""
    urls: tuple[str, ...] = ()
    is_arriving: bool = False


class Share(msgspec.Struct, frozen=True):
    """Bytes of some files, and the sources to try in this order. pieces: by file name."""

    pieces: dict[str, tuple[Span, ...]]
    sources: tuple[Source, ...]


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Sent first, and again when the credentials are renewed. floor_bytes: to leave free on the disk. hub_token: for
    the hub, if the environment has none; "" for none."""

    tls: Tls | None
    floor_bytes: int
    hub_token: str = ""


class Resolve(msgspec.Struct, frozen=True, tag="resolve"):
    """Asks to create `model_dir` with config, tokenizer, headers and manifest of a model, from the first source with
    it.

    name: of the model as peers know it. repo, revision: hub id, and branch, tag or commit; `id:Q4_K_M` for the GGUF
    files of one quantisation, `id:Q4_K_M:files` if they need not make a model that can be run.
    """

    id: int
    name: str
    repo: str
    revision: str
    model_dir: str
    sources: tuple[Source, ...]
    trust_remote_code: bool = False


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Asks to fetch these bytes into a directory that Resolve has created. Present bytes are not fetched again."""

    id: int
    model_dir: str
    shares: tuple[Share, ...]


class Verify(msgspec.Struct, frozen=True, tag="verify"):
    """Asks to compare the files that are here only in part with the digests of the whole files, with the help of these
    sources. Wrong bytes are replaced if a source has the right ones, else dropped. uses_hub: bytes that no peer has may
    be read from the hub only to check, at most as many as are here; else a hub among the sources is only for the
    comparison after a wrong digest. word: whether the digests of pieces that peers have found are used; "only": without
    them, a file stays unknown. edges: where pieces of a file begin for peers."""

    id: int
    model_dir: str
    files: tuple[str, ...]
    sources: tuple[Source, ...]
    uses_hub: bool
    word: Word = ""
    edges: dict[str, tuple[int, ...]] = {}


class Search(msgspec.Struct, frozen=True, tag="search"):
    id: int
    query: str
    limit: int


class CancelFetch(msgspec.Struct, frozen=True, tag="cancel"):
    """Ends a request; fetched bytes are kept. Its last answer is FetchFailed with code "cancelled"."""

    id: int


class FetchPace(msgspec.Struct, frozen=True, tag="pace"):
    """is_busy: streams run on this machine, so fetching must use at most a quarter of the time."""

    is_busy: bool


Request = Setup | Resolve | Fetch | Verify | Search | CancelFetch | FetchPace


class Resolved(msgspec.Struct, frozen=True, tag="resolved"):
    """The directory exists. num_bytes: read from each source, by peer id, "" for the hub."""

    id: int
    num_bytes: dict[str, int] = {}


class FetchProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Sent at most twice a second. done: of `total` requested bytes, with the bytes that were present before.

    num_bytes: received from each source so far, by peer id, "" for the hub.
    """

    id: int
    done: int
    total: int
    num_bytes: dict[str, int]


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    id: int
    num_bytes: dict[str, int] = {}


class WrongBytes(msgspec.Struct, frozen=True, tag="wrong"):
    """Wrong bytes of this file are here; sent before they are replaced."""

    id: int
    file: str


class Verified(msgspec.Struct, frozen=True, tag="verified"):
    """The files were checked. unknown: files that could not be checked, because no source has the rest of them.
    num_bytes: as in Fetched."""

    id: int
    unknown: tuple[str, ...] = ()
    num_bytes: dict[str, int] = {}


class HubModel(msgspec.Struct, frozen=True):
    """A model in a search result. num_bytes: of its weights, 0 if the hub does not say."""

    id: str
    downloads: int = 0
    likes: int = 0
    num_bytes: int = 0
    is_gated: bool = False
    tags: tuple[str, ...] = ()


class SearchResult(msgspec.Struct, frozen=True, tag="search_result"):
    id: int
    models: tuple[HubModel, ...]


class FetchFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The error of a request. code: of the MeshError that the node raises. remedy: what a person can do, "" if unknown.

    is_final: a retry does not help before somebody has done that.
    """

    id: int
    code: str
    message: str
    remedy: str = ""
    is_final: bool = False


Answer = Resolved | FetchProgress | Fetched | WrongBytes | Verified | SearchResult | FetchFailed
