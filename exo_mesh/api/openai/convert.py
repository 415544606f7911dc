"""From a checked body to a request in token ids: which model, which prompt, how many tokens, how they are drawn."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from exo_mesh.api.core.texts import TextModels
from exo_mesh.api.idempotency import Idempotency
from exo_mesh.api.model_names import find_model
from exo_mesh.api.openai.checks import MAX_TOP_LOGPROBS, NO_LIMIT, stop_strings
from exo_mesh.api.openai.messages import template_messages
from exo_mesh.api.openai.schema import ChatBody, CompletionBody, GenerationBody, StreamOptions
from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.errors import ContextLengthError, InputError
from exo_mesh.node.service import MeshService, ModelEntry
from exo_mesh.text.template import RESERVED
from exo_mesh.text.tokenizer import TextModel

DEFAULT_MODEL = "exo-mesh-demo"
COMPLETION_MAX_TOKENS = 16  # what OpenAI documents for /v1/completions


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks: the id of the request, whose share of the ring it takes (an API key's id, or an address), the id of its
    trace if it has one, under what the answer is kept if the client gave an idempotency key, the id of its API key, and
    whether a model that no peer has may be downloaded for it.
    """

    request_id: str
    client: str
    trace_id: str = ""
    idempotency: Idempotency | None = None
    key_id: str = ""
    may_download: bool = False


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Everything known before the first token."""

    model: str
    text: TextModel
    request: GenerateRequest
    stops: tuple[str, ...]
    stream_options: StreamOptions
    names_tier: bool = False
    """The request had a service_tier, so the reply has one."""


async def prepare_chat(body: ChatBody, asker: Asker, service: MeshService, texts: TextModels) -> PreparedRequest:
    """Raises InputError, UnknownModelError, ContextLengthError, or what the service raises."""
    entry, text = await _model(body, asker, service, texts)
    messages = template_messages(body.messages, text.template)
    variables = _template_variables(body, text)
    prompt = await texts.render(
        text,
        messages,
        variables=variables,
        add_generation_prompt=_first(body.add_generation_prompt, not body.continue_final_message),
        continue_final_message=bool(body.continue_final_message),
    )
    limit = await service.context_limit(entry.name)

    def encode() -> list[int]:
        text.check_length(prompt, limit, "messages")
        return text.encode_prompt(prompt)

    prompt_ids = await texts.work(encode)
    wanted = _limit_of(_first(body.max_completion_tokens, body.max_tokens))
    max_tokens = fit_context(entry.name, len(prompt_ids), wanted, limit, "messages")
    num_top = _first(body.top_logprobs, 0) if body.logprobs else None
    prepared = _prepared(body, asker, entry, text, prompt_ids, max_tokens, num_top)
    return replace(prepared, names_tier=body.service_tier is not None)


async def prepare_completion(
    body: CompletionBody, asker: Asker, service: MeshService, texts: TextModels
) -> PreparedRequest:
    """As prepare_chat, of a bare prompt."""
    prompt = single_prompt(body.prompt)
    entry, text = await _model(body, asker, service, texts)
    limit = await service.context_limit(entry.name)

    def encode(prompt_text: str) -> list[int]:
        text.check_length(prompt_text, limit, "prompt")
        return text.encode_text(prompt_text)

    if isinstance(prompt, str):
        prompt_ids = await texts.work(partial(encode, prompt))
    else:
        prompt_ids = prompt
        _check_ids(prompt_ids, text, "prompt")
    if body.max_tokens is None:
        fit_context(entry.name, len(prompt_ids), None, limit, "prompt")
        max_tokens = min(COMPLETION_MAX_TOKENS, limit - len(prompt_ids))
    else:
        max_tokens = fit_context(entry.name, len(prompt_ids), _limit_of(body.max_tokens), limit, "prompt")
    return _prepared(body, asker, entry, text, prompt_ids, max_tokens, body.logprobs)


def single_prompt(prompt: str | list[Any]) -> str | list[int]:
    """The one prompt of the four forms that OpenAI allows: text, ids, or a list of one of these."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InputError(f"prompt has {len(prompt)} prompts; one per request is supported", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in prompt):
        raise InputError("prompt must be text or a list of token ids", param="prompt")
    return prompt


def fit_context(model: str, num_prompt: int, wanted: int | None, limit: int, param: str) -> int:
    """How many tokens may be made. A wish that does not fit is refused with the sum; no wish means all that is left."""
    if num_prompt == 0:
        raise InputError(f"{param}: the prompt has no tokens", param=param)
    left = limit - num_prompt
    if left < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, but {model} can hold {limit} of prompt and output together; "
            f"shorten it by at least {1 - left}",
            param=param,
        )
    if wanted is not None and wanted > left:
        raise ContextLengthError(
            f"{num_prompt} tokens of prompt and {wanted} of output are {num_prompt + wanted}, but {model} can hold "
            f"{limit}; ask for at most {left} tokens of output",
            param="max_tokens",
        )
    return left if wanted is None else wanted


def choose_model(name: str | None, entries: list[ModelEntry]) -> str:
    """The model of a request that names none: the only loaded one, else the only known one, else the demo model.

    A model whose ring is recovering counts as loaded: another one must not answer in its place.
    """
    if name is not None:
        return name
    loaded = [entry.name for entry in entries if entry.instance_ids or entry.is_loading]
    for candidates in (loaded, [entry.name for entry in entries]):
        if len(candidates) == 1:
            return candidates[0]
    if any(entry.name == DEFAULT_MODEL for entry in entries) or not entries:
        return DEFAULT_MODEL
    names = ", ".join(sorted(entry.name for entry in entries)[:10])
    raise InputError(f"model is missing, and there are several to choose from: {names}", param="model")


def sampling_params(
    body: GenerationBody, text: TextModel, num_top: int | None, draw_seed: Callable[[int], int] = secrets.randbits
) -> SamplingParams:
    """The body's wishes, else the model's own defaults, else OpenAI's. Without a seed one is drawn here, once: the
    entry peer keeps it, so that a replay continues the same text."""
    defaults = text.defaults
    seed = draw_seed(63) if body.seed is None else body.seed
    return SamplingParams(
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        top_k=max(0, _first(body.top_k, defaults.top_k, 0)),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(body.repetition_penalty, body.repeat_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=_first(body.presence_penalty, 0.0),
        frequency_penalty=_first(body.frequency_penalty, 0.0),
        logit_bias=tuple(sorted((body.logit_bias or {}).items())),
        seed=seed % 2**64,  # int64 to uint64: two's complement, so different seeds stay different
        logprobs=None if num_top is None else min(num_top, MAX_TOP_LOGPROBS),
    )


def _prepared(
    body: GenerationBody,
    asker: Asker,
    entry: ModelEntry,
    text: TextModel,
    prompt_ids: list[int],
    max_tokens: int,
    num_top: int | None,
) -> PreparedRequest:
    min_tokens = _first(body.min_tokens, 0)
    if min_tokens > max_tokens:
        raise InputError(f"min_tokens is {min_tokens}, but at most {max_tokens} tokens may be made", param="min_tokens")
    _check_ids(list(body.logit_bias or ()), text, "logit_bias")
    key = asker.idempotency
    request = GenerateRequest(
        request_id=asker.request_id,
        prompt_ids=tuple(prompt_ids),
        max_tokens=max_tokens,
        sampling=sampling_params(body, text, num_top, secrets.randbits if key is None else key.draw_seed),
        stop_ids=text.eos_ids | frozenset(entry.eos_ids),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min_tokens,
        client=asker.client,
        trace_id=asker.trace_id,
        priority=_first(body.priority, 0),
        key_hash=b"" if key is None else key.key_hash,
        fingerprint=b"" if key is None else key.fingerprint,
        key_id=asker.key_id,
    )
    return PreparedRequest(entry.name, text, request, stop_strings(body.stop), body.stream_options or StreamOptions())


async def _model(
    body: GenerationBody, asker: Asker, service: MeshService, texts: TextModels
) -> tuple[ModelEntry, TextModel]:
    name = choose_model(body.model, service.models())
    entry = await find_model(service, name, may_download=asker.may_download)
    return entry, await texts.get(await service.text_files(entry.name))


def _template_variables(body: ChatBody, text: TextModel) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    for name in sorted(RESERVED & variables.keys()):
        raise InputError(f"chat_template_kwargs.{name} is not for requests to set", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        knows = text.template is not None and "reasoning_effort" in text.template.variables
        if knows:  # where the model has no effort to choose, no word changes its answer
            variables["reasoning_effort"] = body.reasoning_effort
    return variables


def _check_ids(token_ids: list[int], text: TextModel, param: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < 2**31 or text.tokenizer.id_to_token(token_id) is None:
            shown = token_id if token_id.bit_length() < 64 else "a huge number"
            raise InputError(f"{param} names token {shown}, which this model does not have", param=param)


def _limit_of(wanted: int | None) -> int | None:
    return None if wanted == NO_LIMIT else wanted


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
