"""Turns a neutral request into requests in token ids: chooses the model, prompt, token limit and sampling."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from exo_mesh.api.core.asker import Asker
from exo_mesh.api.core.bridge import AnswerBridge
from exo_mesh.api.core.checks import first_given
from exo_mesh.api.core.conversation import offered_tools, offers_tools
from exo_mesh.api.core.grammar import answer_grammar, forced_tools, may_think, room_for_answer, tool_alone
from exo_mesh.api.core.images import decoded_images
from exo_mesh.api.core.prompts import PromptOptions, continues_reasoning, conversation_prompt
from exo_mesh.api.core.request import Conversation, FieldNames, NeutralRequest, Prompt, Prompts, SamplingWish
from exo_mesh.api.core.served import text_inputs
from exo_mesh.api.core.texts import TextModels
from exo_mesh.api.core.truncating import LEAST_SHARE, prepare_fitting
from exo_mesh.api.model_names import find_model
from exo_mesh.base.clock import monotonic
from exo_mesh.base.printable import counted
from exo_mesh.domain.embedding import GENERATION, why_not
from exo_mesh.domain.images import Picture
from exo_mesh.domain.request import GenerateRequest, GrammarSpec, SamplingParams, ThinkingBudget
from exo_mesh.domain.whole.text_pieces import TextInput
from exo_mesh.errors import ContextLengthError, InputError
from exo_mesh.models.entry import ModelEntry
from exo_mesh.node.service import Services
from exo_mesh.rings.serving.choices import fan_out
from exo_mesh.text.grammars import check_size
from exo_mesh.text.output.formats import PLAIN, OutputFormat, prompt_starts_reasoning
from exo_mesh.text.output.tools import Tool
from exo_mesh.text.tokenizer import TextModel

DEFAULT_MODEL = "exo-mesh-demo"

MARKUP_TOKENS = 24
"""Room for the markers around an answer."""

TAG_TOKENS = 12
"""Room for the tags around one member of an answer."""

ROOM_FACTOR = 4


MAX_EXPECTED = 65_536
"""Most tokens of an expected answer; the rest is not used."""


class PreparedChoice(msgspec.Struct, frozen=True):
    """One answer to generate. prompt: the text of its prompt, if the client wants it in the reply."""

    request: GenerateRequest
    prompt: str = ""


class PreparedRequest(msgspec.Struct, frozen=True):
    """Everything known before the first token. choices: the answers in order, num_drawn for each prompt.

    output: how the model marks reasoning and calls. tools: the tools that the model may call. parallel_calls: whether
    it may make several calls. num_kept: answers of each prompt that the client gets.
    """

    id: str
    model: str
    text: TextModel
    choices: tuple[PreparedChoice, ...]
    stops: tuple[str, ...]
    output: OutputFormat = PLAIN
    tools: tuple[Tool, ...] = ()
    parallel_calls: bool = True
    starts_in_reasoning: bool = False
    num_kept: int = 1
    num_drawn: int = 1
    template_s: float = 0.0
    tokenizer_s: float = 0.0
    """Seconds for the chat template and for the tokens of all prompts."""
    chosen_bound: int | None = None
    """The most tokens of an answer; None if this is the number that the client asked for."""

    @property
    def needs_parser(self) -> bool:
        """Whether an answer can contain anything but text."""
        return bool(self.output.markers(has_tools=bool(self.tools)))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; each prompt counts once, even if it has several answers."""
        return sum(len(choice.request.prompt_ids) for choice in self.choices[:: self.num_drawn])


class _Encoded(msgspec.Struct, frozen=True):
    """A prompt in token ids, and the most tokens that may follow it. as_text: the request for a model server. pictures:
    its images."""

    ids: tuple[int, ...]
    max_tokens: int
    text: str = ""
    as_text: TextInput | None = None
    pictures: tuple[Picture, ...] = ()


async def prepare(
    asked: NeutralRequest,
    asker: Asker,
    services: Services,
    texts: TextModels,
    options: PromptOptions,
) -> PreparedRequest:
    """Prepare a request. Raises InputError, UnknownModelError, ContextLengthError, or an error of the services."""
    name = choose_model(asked.model, services.models.all())
    entry = await find_model(services.models, name, may_download=asker.may_download)
    if unable := why_not(entry.name, entry.tasks, GENERATION):
        raise InputError(unable, param="model")
    text = await texts.of(services.models, entry)
    if entry.served is not None:
        most = await services.instances.context_limit(entry.name)
        return await texts.work(partial(_prepare_served, asked, asker, entry, text, most))
    _check_ids(list(asked.sampling.logit_bias), text, "logit_bias")
    _check_ids(asked.stop_ids, text, asked.names.stop_ids)
    limit = await services.instances.context_limit(entry.name)
    if asked.grammar is not None:
        check_size(asked.grammar, asked.names.grammar)
    if isinstance(asked.subject, Prompts):
        if asked.grammar is not None:
            await texts.check_grammar(asked.grammar, asked.names.grammar)
        began = monotonic()
        encoded = [await _encode_prompt(one, asked, entry, text, limit, texts) for one in asked.subject.prompts]
        tokenizer_s = monotonic() - began
        expected = await _expected_ids(asked, text, texts)
        prepared = _prepared(asked, asker, entry, text, encoded, asked.grammar, expected=expected)
        prepared = await _also_as_text(prepared, asked, entry, AnswerBridge(text, is_bare=True), texts)
        return replace(prepared, tokenizer_s=tokenizer_s)
    if not asked.subject.drops_oldest:
        return await _prepare_conversation(asked, asked.subject, asker, entry, text, limit, texts, options)

    async def prepare_ending(ending: Conversation) -> PreparedRequest:
        prepared = await _prepare_conversation(asked, ending, asker, entry, text, limit, texts, options)
        room = prepared.choices[0].request.max_tokens
        if ending is not asked.subject and room < min(asked.max_tokens or limit, limit // LEAST_SHARE):
            raise ContextLengthError("the conversation leaves too little room", param=asked.names.messages)
        return prepared

    return await prepare_fitting(asked.subject, prepare_ending)


async def _prepare_conversation(
    asked: NeutralRequest,
    conversation: Conversation,
    asker: Asker,
    entry: ModelEntry,
    text: TextModel,
    limit: int,
    texts: TextModels,
    options: PromptOptions,
) -> PreparedRequest:
    names = asked.names
    tools = await texts.work(partial(offered_tools, conversation)) if offers_tools(conversation) else ()
    began = monotonic()
    images = await decoded_images(conversation, entry.name, text, texts)
    if images is not None and asked.prompt_logprobs is not None:
        raise InputError("prompt_logprobs is not supported for prompts with images", param="prompt_logprobs")
    prompt = await conversation_prompt(conversation, text, texts, names, options)
    rendered_at = monotonic()

    def encode() -> tuple[list[int], tuple[Picture, ...]]:
        text.check_length(prompt.text, limit, names.messages)
        if images is None:
            return text.encode_chat(prompt), ()
        return images.place(text.encode_chat(images.spread(prompt)))

    ids, pictures = await texts.work(encode)
    encoded_at = monotonic()
    max_tokens = _room(asked, entry, len(ids), limit, names.messages)
    starts_in_reasoning = continues_reasoning(conversation, text) or prompt_starts_reasoning(text.output, prompt.text)
    known = text.template.variables if text.template else ()
    thinks = may_think(conversation.thinking, conversation.variables, known)
    build = partial(answer_grammar, asked.grammar, conversation, tools, text.output, names, starts_in_reasoning, thinks)
    grammar = await texts.work(build)
    wanted = forced_tools(asked.grammar, conversation, tools)
    if grammar is not None:
        await _check_grammar(grammar, wanted, text, names, texts)
    most = conversation.thinking.budget
    if grammar is not None and thinks:
        most = await texts.work(partial(_before_answer, most, max_tokens, asked.grammar, wanted, text))
    budget = None
    if most is not None:
        budget = await texts.work(partial(_thinking_budget, most, text, starts_in_reasoning))
    expected = await _expected_ids(asked, text, texts)
    prepared = _prepared(
        asked, asker, entry, text, [_Encoded(tuple(ids), max_tokens, pictures=pictures)], grammar, budget, expected
    )
    bridge = AnswerBridge(text, tools, starts_in_reasoning=starts_in_reasoning)
    return replace(
        await _also_as_text(prepared, asked, entry, bridge, texts),
        output=text.output,
        tools=tools,
        parallel_calls=conversation.parallel_tool_calls,
        starts_in_reasoning=starts_in_reasoning,
        template_s=rendered_at - began,
        tokenizer_s=encoded_at - rendered_at,
    )


async def _expected_ids(asked: NeutralRequest, text: TextModel, texts: TextModels) -> tuple[int, ...]:
    """The tokens of the answer that the client expects."""
    if not asked.expected or not asked.drafts:
        return ()
    ids = await texts.work(partial(text.encode_prompt, asked.expected))
    return tuple(ids[:MAX_EXPECTED])


def _prepare_served(
    asked: NeutralRequest, asker: Asker, entry: ModelEntry, text: TextModel, limit: int
) -> PreparedRequest:
    """Prepare a request for a model that only a model server has: its template and tokenizer are there."""
    if isinstance(asked.subject, Conversation) and asked.subject.drops_oldest:
        message = "this model runs in a model server, where turns cannot be dropped: its tokenizer is there"
        raise InputError(message, param="truncation")
    most = min(limit, asked.max_tokens or asked.default_tokens or limit)
    encoded = [_Encoded((), most, as_text=one) for one in text_inputs(asked)]
    if isinstance(asked.subject, Prompts) and asked.subject.echo:
        pairs = zip(encoded, asked.subject.prompts, strict=True)
        encoded = [replace(one, text=str(prompt)) for one, prompt in pairs]
    prepared = _prepared(asked, asker, entry, text, encoded, None)
    if isinstance(asked.subject, Conversation):
        prepared = replace(prepared, parallel_calls=asked.subject.parallel_tool_calls)
    return prepared


async def _also_as_text(
    prepared: PreparedRequest, asked: NeutralRequest, entry: ModelEntry, bridge: AnswerBridge, texts: TextModels
) -> PreparedRequest:
    """The request with its text, if a model server can answer for the model and the text says all that was asked."""
    if not entry.stand_ins:
        return prepared
    try:
        inputs = await texts.work(partial(text_inputs, asked))
    except InputError:
        return prepared
    choices = tuple(
        replace(
            choice,
            request=dataclasses.replace(choice.request, text=inputs[index // prepared.num_drawn], bridge=bridge),
        )
        for index, choice in enumerate(prepared.choices)
    )
    return replace(prepared, choices=choices)


async def _encode_prompt(
    prompt: Prompt, asked: NeutralRequest, entry: ModelEntry, text: TextModel, limit: int, texts: TextModels
) -> _Encoded:
    names = asked.names
    assert isinstance(asked.subject, Prompts)
    adds_special = asked.subject.adds_special
    shown = ""
    if isinstance(prompt, str):

        def encode(prompt_text: str) -> list[int]:
            text.check_length(prompt_text, limit, names.prompt)
            return text.encode_text(prompt_text) if adds_special else text.encode_prompt(prompt_text)

        ids = await texts.work(partial(encode, prompt))
        shown = prompt
    else:
        ids = list(prompt)
        _check_ids(ids, text, names.prompt)
        if asked.subject.echo:
            shown = await texts.work(partial(text.decode, ids))
    max_tokens = _room(asked, entry, len(ids), limit, names.prompt)
    return _Encoded(tuple(ids), max_tokens, shown if asked.subject.echo else "")


def _room(asked: NeutralRequest, entry: ModelEntry, num_prompt: int, limit: int, param: str) -> int:
    """The most tokens that may be generated for a prompt. Raises ContextLengthError."""
    room = fit_context(entry.name, num_prompt, asked.max_tokens, limit, param)
    return room if asked.max_tokens is not None else min(asked.default_tokens or room, room)


def fit_context(model: str, num_prompt: int, wanted: int | None, limit: int, param: str) -> int:
    """The most tokens that may be generated: the wanted number, but no more than fit; if wanted is None, all that fit.

    Raises ContextLengthError if the prompt leaves no room.
    """
    if num_prompt == 0:
        raise InputError(f"{param}: the prompt has no tokens", param=param)
    left = limit - num_prompt
    least = 0 if wanted == 0 else 1
    if left < least:
        raise ContextLengthError(
            f"the prompt has {counted(num_prompt, 'token')}, but {model} holds at most {limit} tokens of prompt and "
            f"output together; shorten the prompt by at least {counted(least - left, 'token')}",
            param=param,
        )
    return max(0, left if wanted is None else min(wanted, left))


def choose_model(name: str | None, entries: list[ModelEntry]) -> str:
    """The model of a request. A request without a name gets the only loaded model, else the only known one, else the
    demo model.

    A model whose ring is recovering counts as loaded, because no other model may answer in its place. Raises InputError
    if there are several models to choose from.
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
    raise InputError(f"model is required, because there are several models: {names}", param="model")


def sampling_params(
    wish: SamplingWish, text: TextModel, draw_seed: Callable[[int], int] = secrets.randbits
) -> SamplingParams:
    """The sampling parameters: the client's values, else the model's defaults, else the usual ones. Without a seed, one
    is drawn here once; the entry peer keeps it, so that a replay continues the same text."""
    defaults = text.defaults
    seed = draw_seed(63) if wish.seed is None else wish.seed
    repetition = first_given(wish.repetition_penalty, defaults.repetition_penalty, 1.0)
    return SamplingParams(
        temperature=first_given(wish.temperature, defaults.temperature, 1.0),
        top_k=max(0, first_given(wish.top_k, defaults.top_k, 0)),
        top_p=first_given(wish.top_p, defaults.top_p, 1.0),
        min_p=first_given(wish.min_p, defaults.min_p, 0.0),
        repetition_penalty=repetition,
        repetition_window=(wish.repetition_window or 0) if repetition != 1.0 else 0,
        presence_penalty=first_given(wish.presence_penalty, 0.0),
        frequency_penalty=first_given(wish.frequency_penalty, 0.0),
        logit_bias=tuple(sorted(wish.logit_bias.items())),
        seed=seed % 2**64,  # int64 to uint64 in two's complement, so different seeds stay different
        logprobs=wish.logprobs,
    )


def _check_min_tokens(min_tokens: int, bound: int) -> None:
    """Raises InputError if the shortest answer wanted is longer than the longest one allowed."""
    if min_tokens > bound:
        most = counted(bound, "token")
        raise InputError(f"min_tokens is {min_tokens}, but the answer may have at most {most}", param="min_tokens")


def _prepared(
    asked: NeutralRequest,
    asker: Asker,
    entry: ModelEntry,
    text: TextModel,
    encoded: Sequence[_Encoded],
    grammar: GrammarSpec | None,
    thinking: ThinkingBudget | None = None,
    expected: tuple[int, ...] = (),
) -> PreparedRequest:
    key = asker.idempotency
    sampling = sampling_params(asked.sampling, text, secrets.randbits if key is None else key.draw_seed)
    if asked.num_drawn > asked.num_choices and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)  # log-probabilities decide which answers are kept
    bound = min(prompt.max_tokens for prompt in encoded)
    _check_min_tokens(asked.min_tokens, bound)
    first = GenerateRequest(
        request_id=asker.request_id,
        prompt_ids=encoded[0].ids,
        pictures=encoded[0].pictures,
        text=encoded[0].as_text,
        max_tokens=encoded[0].max_tokens,
        sampling=sampling,
        stop_ids=text.eos_ids | frozenset(entry.eos_ids) | frozenset(asked.stop_ids),
        ignore_eos=asked.ignore_eos,
        min_tokens=asked.min_tokens,
        client=asker.client,
        trace_id=asker.trace.trace_id,
        span_id=asker.trace.span_id,
        parent_span_id=asker.trace.parent_span_id,
        trace_state=asker.trace.state,
        priority=asked.priority,
        key_hash=b"" if key is None else key.key_hash,
        fingerprint=b"" if key is None else key.fingerprint,
        key_id=asker.key_id,
        names=(asker.request_id, asker.header_id) if asker.header_id else (asker.request_id,),
        prompt_logprobs=asked.prompt_logprobs,
        grammar=grammar,
        thinking=thinking,
        keep_alive_s=asked.keep_alive_s,
        is_kept=asked.cache.is_kept,
        cache_scope=asked.cache.scope_for(asker.key_id),
        drafts=asked.drafts,
        expected_ids=expected,
    )
    choices = [
        PreparedChoice(request, prompt.text)
        for index, prompt in enumerate(encoded)
        for request in fan_out(_of_prompt(first, index, prompt, asker), asked.num_drawn)
    ]
    return PreparedRequest(
        asker.request_id,
        entry.name,
        text,
        tuple(choices),
        asked.stops,
        num_kept=asked.num_choices,
        num_drawn=asked.num_drawn,
        chosen_bound=None if bound == asked.max_tokens else bound,
    )


def _of_prompt(first: GenerateRequest, index: int, prompt: _Encoded, asker: Asker) -> GenerateRequest:
    """The request for the prompt with this index; first: the request for prompt 0."""
    if index == 0:
        return first
    key = asker.idempotency
    return dataclasses.replace(
        first,
        request_id=f"{first.request_id}.{index}",
        span_id="",
        prompt_ids=prompt.ids,
        text=prompt.as_text,
        max_tokens=prompt.max_tokens,
        key_hash=b"" if key is None else key.of_prompt(index).key_hash,
    )


async def _check_grammar(
    grammar: GrammarSpec, wanted: Sequence[Tool], text: TextModel, names: FieldNames, texts: TextModels
) -> None:
    """Check that a grammar can be enforced. Raises InputError that names the tool at fault, if it is a tool."""
    try:
        await texts.check_grammar(grammar, names.grammar)
    except InputError:
        for tool in wanted:
            if (alone := await texts.work(partial(tool_alone, text.output, tool))) is not None:
                await texts.check_grammar(alone, tool.where)
        raise


def _before_answer(
    budget: int | None, max_tokens: int, asked: GrammarSpec | None, wanted: Sequence[Tool], text: TextModel
) -> int:
    """The most tokens of a thought before an answer under a grammar. The rest is room for the shortest answer, or for
    four times as much where that is at most a quarter of all tokens."""
    answers = room_for_answer(asked, wanted)
    needed = max(len(text.encode_prompt(answer)) + MARKUP_TOKENS + TAG_TOKENS * tags for answer, tags in answers)
    room = max(needed, min(ROOM_FACTOR * needed, max_tokens // ROOM_FACTOR))
    most = max(0, max_tokens - room)
    return most if budget is None else min(budget, most)


def _thinking_budget(tokens: int, text: TextModel, starts_in_reasoning: bool) -> ThinkingBudget | None:
    """The thinking budget; None if the model does not mark its reasoning."""
    output = text.output
    if not output.reasoning_start or not output.reasoning_end:
        return None
    start_ids = () if starts_in_reasoning else tuple(text.encode_prompt(output.reasoning_start))
    return ThinkingBudget(tuple(text.encode_prompt(output.reasoning_end)), tokens, start_ids)


def _check_ids(token_ids: Sequence[int], text: TextModel, param: str) -> None:
    for token_id in token_ids:
        if not text.has_id(token_id):
            # Python cannot convert a very long integer to text
            shown = token_id if token_id.bit_length() < 64 else "a huge number"
            raise InputError(f"{param} contains {shown}, which is not a token id of this model", param=param)
