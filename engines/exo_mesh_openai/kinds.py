"""The kinds of model servers, and what each understands beyond the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

ContinueWay = Literal["none", "final-message"]
"""none: the server always begins a new answer. final-message: `continue_final_message` with the beginning of the answer
as the last message; the prompt of /v1/completions is taken as it is."""


class ServerKind(msgspec.Struct, frozen=True):
    """What one kind of server understands.

    sampling: by our name of a sampling parameter, the server's name of it; a parameter that is missing here is refused
    unless it is off. off: values of the server's fields that mean "off", where they differ from ours. slots: requests
    at once, if the server does not say. most_stops: stop strings of one request; OpenAI allows 4.
    """

    name: str
    sampling: Mapping[str, str] = msgspec.field(default_factory=dict)
    off: Mapping[str, object] = msgspec.field(default_factory=dict)
    takes_logit_bias: bool = True
    takes_template_kwargs: bool = False
    continues: ContinueWay = "none"
    slots: int = 4
    most_stops: int = 64


LLAMA_SERVER = ServerKind(
    "llama-server",
    sampling={"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty"},
    takes_template_kwargs=True,
    continues="final-message",
)
VLLM = ServerKind(
    "vLLM",
    sampling={"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty"},
    off={"top_k": -1},
    takes_template_kwargs=True,
    continues="final-message",
    slots=64,
)
SGLANG = ServerKind(
    "SGLang",
    sampling={"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty"},
    off={"top_k": -1},
    takes_template_kwargs=True,
    continues="final-message",
    slots=64,
)
EXO_MESH = ServerKind(
    "exo-mesh",
    sampling={"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty"},
    takes_template_kwargs=True,
    continues="final-message",
    slots=32,
)
OLLAMA = ServerKind("Ollama", takes_logit_bias=False)
LM_STUDIO = ServerKind("LM Studio", sampling={"top_k": "top_k", "repetition_penalty": "repeat_penalty"})
OTHER = ServerKind("an OpenAI-style server", most_stops=4)

KINDS = (LLAMA_SERVER, VLLM, SGLANG, EXO_MESH, OLLAMA, LM_STUDIO, OTHER)
