"""Finds the chat templates in a model's files. Templates are untrusted code: only `rendering` runs them, in a child."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.errors import ModelError
from exo_mesh.weights.model_files import (
    TOOL_USE_FILE,
    as_text,
    exists,
    named,
    place_of,
    read_json_if_there,
    read_model_file,
    shown,
)

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


REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Fields of an assistant's message in which templates look for its reasoning; gpt-oss for `thinking`."""

TOOL_USE = "tool_use"
"""The name of the template for conversations with tools, if a model has one of its own for them."""


class TemplateTraits(msgspec.Struct, frozen=True):
    """What a template did with small conversations that it was tried with (see probes). The default values, as if it
    did everything, hold for a template that could not be tried.

    shows_late_system: also a message of the system after the first turn, and the first one with it.
    takes_several_systems: it shows two of them at the start. knows_developer: it treats the role developer in another
    way than a role that it cannot know. judges: it shows messages of the roles query and document. part_roles: roles
    whose content it reads only as a list of parts. takes_image_parts: it writes something for a part that is an image.
    needs_tools: it refuses all without a list of tools, which may be empty. tools_need_system: it shows tools only if
    there is a system message. calls_stand_alone: it shows calls only in messages whose content is null.
    hides_text_of_calls: it shows the text of a message with calls only if that text is in a message of its own.
    takes_several_calls: it shows two calls in one message. takes_text_arguments: it wants the arguments of a call as
    JSON text. takes_any_ids: it takes ids of calls that do not have nine letters and digits. written: what it wrote, to
    find the control tokens in it.
    """

    shows_system: bool = True
    shows_late_system: bool = True
    takes_several_systems: bool = True
    knows_developer: bool = False
    judges: bool = True
    part_roles: frozenset[str] = frozenset()
    takes_image_parts: bool = False
    needs_tools: bool = False
    shows_tools: bool = True
    tools_need_system: bool = False
    shows_calls: bool = True
    shows_results: bool = True
    calls_stand_alone: bool = False
    hides_text_of_calls: bool = False
    takes_several_calls: bool = True
    takes_text_arguments: bool = False
    takes_any_ids: bool = True
    reasoning_key: str = REASONING_KEYS[0]
    written: str = ""


class ChatTemplate(msgspec.Struct, frozen=True):
    """The text of one template and where it was found."""

    source: str
    where: str
    digest: str
    """SHA-256 of the text; a renderer process that has compiled the template finds it by this digest."""
    variables: frozenset[str] = frozenset()
    """Names that the template reads from outside, such as `enable_thinking`; empty until a renderer has compiled it."""
    traits: TemplateTraits = TemplateTraits()
    """The template's abilities; the default until a renderer has tried it."""
    is_tried: bool = False
    """Whether a renderer has found the traits; a later attempt may succeed where one failed."""
    tool_use: ChatTemplate | None = None
    """The template to use instead for conversations with tools; None if it is this one."""

    @property
    def sources(self) -> str:
        """The text of this template and of the tool template."""
        return self.source if self.tool_use is None else f"{self.source}\n{self.tool_use.source}"

    @property
    def written(self) -> str:
        """The texts that this template and the tool template wrote when they were tried."""
        return self.traits.written if self.tool_use is None else self.traits.written + self.tool_use.traits.written

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

    Of several named templates it takes the one called "default", and "tool_use" for conversations with tools, as
    transformers does. Files in additional_chat_templates are named templates, too. Raises ModelError.
    """
    named_templates = _named_templates(directory, tokenizer_config)
    default = named_templates.get("default")
    if default is None:
        if not named_templates:
            return None
        where = next(iter(named_templates.values())).where
        names = shown(sorted(named_templates))
        raise ModelError(f'{where}: none of the chat templates {names} is called "default"')
    return replace(default, tool_use=named_templates.get(TOOL_USE))


def _named_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """All templates of a model that have a name; a single one is called "default"."""
    additional = _read_jinja(place_of(directory, TOOL_USE_FILE))
    found = {} if additional is None else {TOOL_USE: additional}
    if (template := _read_jinja(directory / "chat_template.jinja")) is not None:
        return {**found, "default": template}
    where = directory / "chat_template.json"
    value = read_json_if_there(where).get("chat_template")
    if value is None:
        where = directory / "tokenizer_config.json"
        value = tokenizer_config.get("chat_template")
    by_name = {"default": value}
    if isinstance(value, list):
        by_name = {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
    for name, source in by_name.items():
        if source is None:
            continue
        if not isinstance(source, str):
            raise ModelError(f"{named(where)}: chat_template is {shown(source)}, not a string")
        found.setdefault(name, ChatTemplate.found(source, named(where)))
    return found


def _read_jinja(path: Path) -> ChatTemplate | None:
    """The template in a file; None if there is no such file. Raises ModelError."""
    if not exists(path):
        return None
    try:
        return ChatTemplate.found(as_text(path, read_model_file(path, MAX_SOURCE_BYTES)), named(path))
    except OSError as exc:
        raise ModelError(f"{named(path)}: cannot be read: {exc.strerror}") from exc
