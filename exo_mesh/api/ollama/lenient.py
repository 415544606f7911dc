"""Accepts fields of Ollama's clients at values that change nothing, and refuses them at others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from exo_mesh.api.core.neutral_fields import ANY, NeutralTable, drop_fields
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.ollama.schema import OllamaMessage, OllamaNamedBody, OllamaOptions

B = TypeVar("B", bound=OllamaNamedBody)

IN_BODIES: NeutralTable = {
    "context": ([],),
    "height": (0,),
    "images": ([],),
    "steps": (0,),
    "suffix": ("",),
    "system": ("",),  # of /api/show
    "template": ("",),
    "truncate": (False,),  # a prompt that does not fit is refused, never cut
    "shift": (False,),
    "width": (0,),
}
"""Fields of bodies, with the values that have no effect; null never has an effect."""

IN_OPTIONS: NeutralTable = {
    **dict.fromkeys(("f16_kv", "low_vram", "main_gpu", "num_batch", "num_gpu", "num_thread", "numa"), ANY),
    **dict.fromkeys(("use_mlock", "use_mmap"), ANY),  # the engines choose how they compute
    "draft_num_predict": ANY,
    "embedding_only": (False,),
    "logits_all": (False,),
    "mirostat": (0,),
    "mirostat_eta": ANY,
    "mirostat_tau": ANY,
    "num_keep": ANY,  # it says what to keep of a prompt that is cut; none is
    "penalize_newline": (True,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "vocab_only": (False,),
}
"""The same for options."""

IN_MESSAGES: NeutralTable = {
    **dict.fromkeys(("created_at", "id", "model", "name"), ANY),
}
"""The same for messages, in which applications keep their own notes."""


def decode_ollama_body(body: bytes, kind: type[B]) -> B:
    """Decode the body into a struct, dropping fields without effect. Raises InputError that names the wrong field.

    Ollama reads any Content-Type, and an empty body as {}.
    """
    return decode_body(body if body.strip() else b"{}", kind, lambda text: _without_neutral(text, kind))


def _without_neutral(body: bytes, kind: type[OllamaNamedBody]) -> bytes:
    known = kind.__struct_fields__
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    drop_fields(fields, IN_BODIES, known, "")
    if "options" in known and "options" in fields:
        fields["options"] = _cleaned(fields["options"], IN_OPTIONS, OllamaOptions, "options.")
    if "messages" in known and "messages" in fields:
        fields["messages"] = _cleaned_list(fields["messages"])
    return msgspec.json.encode(fields)


def _cleaned(raw: msgspec.Raw, table: NeutralTable, kind: type[msgspec.Struct], where: str) -> msgspec.Raw:
    """The object without neutral fields. Anything but an object stays unchanged, and the struct refuses it."""
    try:
        fields: Any = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return raw
    drop_fields(fields, table, kind.__struct_fields__, where)
    return msgspec.Raw(msgspec.json.encode(fields))


def _cleaned_list(raw: msgspec.Raw) -> msgspec.Raw:
    try:
        turns = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        return raw
    cleaned = [_cleaned(turn, IN_MESSAGES, OllamaMessage, f"messages[{index}].") for index, turn in enumerate(turns)]
    return msgspec.Raw(msgspec.json.encode(cleaned))


def shown_options(options: Mapping[str, Any]) -> str:
    """Options as /api/show writes them: one `name value` in a line."""
    return "\n".join(f"{name:<30} {value}" for name, value in options.items() if value is not None)
