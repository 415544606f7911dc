"""The files of a model as a source lists them: the hub, a cache on this machine, or the file server of a peer."""

from __future__ import annotations

import msgspec


class FileInfo(msgspec.Struct, frozen=True):
    """A file as it is in full, whatever of it is there. sha256: "" if the source does not say; hubs say it of weights.

    Which bytes a machine has of a file is another question: see weights.fetched.FetchedFile.
    """

    size: int
    sha256: str = ""


class Listing(msgspec.Struct, frozen=True):
    """The files of a model at one source, by name. File servers send it as JSON.

    repo, revision: where the model is from, a hub id and a commit; "" for a model that is only in the mesh. digest: of
    the model's card, "" if the source does not know it. made: files that this or another peer has made and that are at
    no hub, see exo_mesh/weights/fetched.py.
    """

    repo: str
    revision: str
    files: dict[str, FileInfo]
    digest: str = ""
    made: tuple[str, ...] = ()
