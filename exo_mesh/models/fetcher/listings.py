"""Checks a hub's or a peer's file list before it is used, because either may lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from exo_mesh.errors import FetchError
from exo_mesh.models.file_server.listing import FileInfo, Listing
from exo_mesh.weights.model_files import shown

MAX_FILES = 100_000
"""Most files of a repository. The largest have some thousands; a listing of this length takes about 50 MB."""

MAX_FILE_BYTES = 2**50
"""Largest file: a PiB, more than any file system of one machine takes, and sums of such sizes do not overflow."""

_PART = r"[\w\-][\w.\-]*"
_PLACE = r"[\w\-][\w.\-+ ()]*"
_NAME = re.compile(rf"{_PLACE}(?:/{_PLACE})*")
_MAX_NAME = 500
_REPO = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
_REVISION = re.compile(r"[\w][\w.\-/]{0,199}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_ID = re.compile(r"[0-9a-f]{40}")


def checked(listing: Listing) -> Listing:
    """Returns the listing without files whose names no checkpoint has. Raises FetchError if it is impossible."""
    if not _is_origin(listing.repo, listing.revision):
        raise FetchError("the source gave an invalid repository or commit", is_final=True)
    if len(listing.files) > MAX_FILES:
        raise FetchError(f"the source lists {len(listing.files)} files; the limit is {MAX_FILES}", is_final=True)
    files = {name: _checked_file(name, info) for name, info in listing.files.items() if _is_name(name)}
    made = tuple(dict.fromkeys(name for name in listing.made if name in files))
    return Listing(listing.repo, listing.revision, files, listing.digest, made)


def is_repository(name: Any) -> bool:
    """Checks whether a name has the form of a repository id."""
    return isinstance(name, str) and len(name) <= 200 and _REPO.fullmatch(name) is not None


def whole_number(value: Any, most: int = 2**63 - 1) -> int:
    """Returns a count from another program; 0 if it is not a whole number in range."""
    return value if isinstance(value, int) and 0 <= value <= most else 0


def field_of(value: Any, name: str) -> Any:
    """Returns a field of an object or of a mapping, None if it has none."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _is_origin(repo: Any, revision: Any) -> bool:
    if repo == "" and revision == "":
        return True
    is_revision = isinstance(revision, str) and _REVISION.fullmatch(revision) is not None and ".." not in revision
    return is_repository(repo) and is_revision


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= _MAX_NAME and _NAME.fullmatch(name) is not None


def _checked_file(name: str, info: FileInfo) -> FileInfo:
    if not isinstance(info.size, int) or not 0 <= info.size <= MAX_FILE_BYTES:
        raise FetchError(f"the source gave {name} an impossible size: {shown(info.size)}", is_final=True)
    sha256 = info.sha256 if _SHA256.fullmatch(str(info.sha256)) else ""
    return FileInfo(info.size, sha256, info.git_id if _GIT_ID.fullmatch(str(info.git_id)) else "")
