"""The listing of a model's files at a source: the hub, a cache on this machine, or the file server of a peer."""

from __future__ import annotations

import hashlib

import msgspec

from exo_mesh.domain.spans import Digests


class FileInfo(msgspec.Struct, frozen=True):
    """A complete file, even if the source has only a part of it. sha256: "" if unknown; hubs know it for weights.

    git_id: the id of the content in the hub's git repository, "" if unknown; hubs know it for small files, which they
    keep in git itself. pieces: digests of all pieces of the file, if a peer has read it and its digest was right; for
    files of which peers have parts. For the bytes of a file that a machine has, see weights.fetched.FetchedFile.
    """

    size: int
    sha256: str = ""
    git_id: str = ""
    pieces: Digests = ()

    def has_content(self, content: bytes) -> bool:
        """Whether this is the content of the file, as far as a digest is known."""
        if self.sha256 and hashlib.sha256(content).hexdigest() != self.sha256:
            return False
        return not self.git_id or git_id_of(content) == self.git_id


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


def git_id_of(content: bytes) -> str:
    """The id that git gives to a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
