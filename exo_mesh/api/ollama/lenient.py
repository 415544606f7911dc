"""Accepts fields of Ollama's clients at values that change nothing, and refuses them at others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from exo_mesh.api.core.neutral_fields import ANY, NeutralTable, NeutralTables
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
    **dict.fromkeys(("created_at", "id", "model"), ANY),
}
"""The same for messages, in which applications keep their own notes."""

_INSIDE: NeutralTables = {OllamaOptions: IN_OPTIONS, OllamaMessage: IN_MESSAGES}


def decode_ollama_body(body: bytes, kind: type[B]) -> B:
    """Decode the body into a struct, dropping fields without effect. Raises InputError that names the wrong field.

    Ollama reads any Content-Type, and an empty body as {}.
    """
    return decode_body(b"{}" if not body or body.isspace() else body, kind, {kind: IN_BODIES, **_INSIDE})


def shown_options(options: Mapping[str, Any]) -> str:
    """Options as /api/show writes them: one `name value` in a line."""
    return "\n".join(f"{name:<30} {value}" for name, value in options.items() if value is not None)
