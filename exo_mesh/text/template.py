"""Finds the chat template in a model's files. Templates are untrusted code: only `rendering` runs them, in a child."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_mesh.errors import ModelError
from exo_mesh.model_files import as_text, exists, named, read_json_if_there, read_model_file, shown

Message = dict[str, Any]

MAX_SOURCE = 1 << 20
"""Most characters of a template; the longest on the hub have about 30,000."""

MAX_SOURCE_BYTES = 4 * MAX_SOURCE  # a UTF-8 character has at most four bytes

MAX_LENGTH = 4 << 20
"""Most characters of a prompt, and of any value that a template makes."""

RENDER_LIMIT_S = 5.0  # rendering a conversation of 1 MB takes a fraction of this
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "range", "namespace"}
)
"""Names that the node sets for a template; a request may not set them."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The text of one template and where it was found."""

    source: str
    where: str
    digest: str
    """SHA-256 of the text; a renderer process that has compiled the template finds it by this digest."""
    variables: frozenset[str] = frozenset()
    """Names that the template reads from outside, such as `enable_thinking`; empty until a renderer has compiled it."""

    @classmethod
    def found(cls, source: str, where: str) -> ChatTemplate:
        """Make a ChatTemplate of a text found at `where`. Raises ModelError if the text is too long."""
        if len(source) > MAX_SOURCE:
            raise ModelError(
                f"{where}: the chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed"
            )
        return cls(source, where, hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest())


def find_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """Find a model's template in chat_template.jinja, else chat_template.json, else tokenizer_config.json; None if no
    file has one.

    Of several named templates it takes the one called "default". Raises ModelError.
    """
    jinja = directory / "chat_template.jinja"
    if exists(jinja):
        try:
            return ChatTemplate.found(as_text(jinja, read_model_file(jinja, MAX_SOURCE_BYTES)), named(jinja))
        except OSError as exc:
            raise ModelError(f"{named(jinja)}: cannot be read: {exc}") from exc
    where = directory / "chat_template.json"
    found = read_json_if_there(where).get("chat_template")
    if found is None:
        where = directory / "tokenizer_config.json"
        found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        by_name = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        if "default" not in by_name:
            names = shown(sorted(map(str, by_name)))
            raise ModelError(f'{named(where)}: none of the chat templates {names} is called "default"')
        found = by_name["default"]
    if found is None:
        return None
    if not isinstance(found, str):
        raise ModelError(f"{named(where)}: chat_template is {shown(found)}, not a string")
    return ChatTemplate.found(found, named(where))
