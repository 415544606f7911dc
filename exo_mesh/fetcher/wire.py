"""What a node and its fetcher say to each other: one JSON object per line, requests in, answers out.

A request has an id that its answers repeat; several are under way at once. The last answer to a request is Resolved,
Fetched, SearchResult or FetchFailed.
"""

from __future__ import annotations

import msgspec

from exo_mesh.domain.spans import Span

MAX_LINE_BYTES = 32 * 2**20


class Tls(msgspec.Struct, frozen=True):
    """Credentials of this node in its mesh, as PEM text."""

    authority: str
    certificate: str
    private_key: str


class Source(msgspec.Struct, frozen=True):
    """Where bytes may come from. peer: id of the peer, "" for the hub. urls: of its file server, the best way first.

    is_arriving: the peer itself fetches what is asked for, and sends it as it comes.
    """

    peer: str = ""
    urls: tuple[str, ...] = ()
    is_arriving: bool = False


class Share(msgspec.Struct, frozen=True):
    """Bytes of some files, and the sources to try in this order. pieces: by file name."""

    pieces: dict[str, tuple[Span, ...]]
    sources: tuple[Source, ...]


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Sent first, and again when the credentials are renewed. floor_bytes: what is to be left free on the disk.
    hub_token: for the hub, if the environment has none; "" for none."""

    tls: Tls | None
    floor_bytes: int
    hub_token: str = ""


class Resolve(msgspec.Struct, frozen=True, tag="resolve"):
    """Make `model_dir`, with config, tokenizer, headers and manifest of a model, from the first source that has it.

    name: of the model as peers know it. repo, revision: hub id, and branch, tag or commit; `id:Q4_K_M` for the GGUF
    files of one quantisation, of which no card can be read.
    """

    id: int
    name: str
    repo: str
    revision: str
    model_dir: str
    sources: tuple[Source, ...]
    trust_remote_code: bool = False


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Bring these bytes into a directory that Resolve has made. Bytes that are there already are not fetched again."""

    id: int
    model_dir: str
    shares: tuple[Share, ...]


class Search(msgspec.Struct, frozen=True, tag="search"):
    id: int
    query: str
    limit: int


class CancelFetch(msgspec.Struct, frozen=True, tag="cancel"):
    """End a request; what was fetched is kept. Its last answer is FetchFailed with code "cancelled"."""

    id: int


class FetchPace(msgspec.Struct, frozen=True, tag="pace"):
    """is_busy: streams run on this machine, so fetching is to take at most a quarter of the time."""

    is_busy: bool


Request = Setup | Resolve | Fetch | Search | CancelFetch | FetchPace


class Resolved(msgspec.Struct, frozen=True, tag="resolved"):
    """The directory is there. num_bytes: read from each source, by peer id, "" for the hub."""

    id: int
    num_bytes: dict[str, int] = {}


class FetchProgress(msgspec.Struct, frozen=True, tag="progress"):
    """At most twice a second. done: of `total` bytes that the request asked for, those that were there included.

    num_bytes: received from each source so far, by peer id, "" for the hub.
    """

    id: int
    done: int
    total: int
    num_bytes: dict[str, int]


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    id: int
    num_bytes: dict[str, int] = {}


class HubModel(msgspec.Struct, frozen=True):
    """A model that a search has found. num_bytes: of its weights, 0 if the hub does not say."""

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
    """code: of the MeshError that the node raises. remedy: what a person can do, "" if nothing is known.

    is_final: trying again will not help until somebody has done that.
    """

    id: int
    code: str
    message: str
    remedy: str = ""
    is_final: bool = False


Answer = Resolved | FetchProgress | Fetched | SearchResult | FetchFailed
