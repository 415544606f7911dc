"""Rewords what a node says of a placement for a command line: names of peers for their ids, flags for fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.tables import peer_names
from exo_mesh.errors import InputError, MeshError, PlacementError

_FLAGS = {
    "min_peers": "--peers",
    "exclude_peers": "--exclude",
    "context_limit": "--context-limit",
    "mixed_rings": "--mixed-rings",
    "tensor_group": "--tensor-group",
    "group_backend": "--group-backend",
}
"""By field of `POST /instance`, if it is no English word: the flag of `load` and `preview`."""

_ID = re.compile(r'(?<!" \()\b[0-9a-f]{8}\b')
"""Not one that stands in brackets behind the name of its peer."""
_FIELD = re.compile(rf"\b({'|'.join(_FLAGS)})\b(: (?=\d))?")


def reworded(text: str, names: Mapping[str, str]) -> str:
    """The text with names of peers in place of the first digits of their ids, and flags in place of fields. names: by
    peer id."""
    by_digits = {peer_id[:8]: name for peer_id, name in names.items()}
    text = _ID.sub(lambda found: by_digits.get(found[0], found[0]), text)
    text = _FIELD.sub(lambda found: _FLAGS[found[1]] + (" " if found[2] else ""), text)
    return text.replace("GET /instance/previews", "exo-mesh preview")


def names_for(client: ApiClient, *texts: str) -> Mapping[str, str]:
    """The names of the mesh's peers by their ids, if one of the texts may hold an id; else none, without a call."""
    if any(map(_ID.search, texts)):
        with suppress(MeshError):
            return peer_names(client.get("/state"))
    return {}


@contextmanager
def in_words_of_flags(client: ApiClient) -> Iterator[None]:
    """Rewords an error of a placement that the node answers with inside."""
    try:
        yield
    except (PlacementError, InputError) as exc:
        text = str(exc)
        exc.args = (reworded(text, names_for(client, text)),)
        raise
