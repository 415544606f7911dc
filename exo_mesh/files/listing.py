"""The listing of a model's files at a source: the hub, a cache on this machine, or the file server of a peer."""

from __future__ import annotations

import msgspec


class FileInfo(msgspec.Struct, frozen=True):
    """A complete file, even if the source has only a part of it. sha256: "" if unknown; hubs know it for weights.

    For the bytes of a file that a machine has, see weights.fetched.FetchedFile.
    """

    size: int
    sha256: str = ""


class Listing(msgspec.Struct, frozen=True):
    """The files of a model at one source, by name. File servers send it as JSON.

    repo, revision: the origin of the model, a hub id and a commit; "" for a model that only the mesh has. digest: of
    the model's card, "" if the source does not know it. made: files that a peer has made and that no hub has, see
    exo_mesh/weights/fetched.py.
    """

    repo: str
    revision: str
    files: dict[str, FileInfo]
    digest: str = ""
    made: tuple[str, ...] = ()
