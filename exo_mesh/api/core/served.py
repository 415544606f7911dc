"""Translates neutral requests to text for model servers: the messages, tools and form of the answer. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from exo_mesh.api.core.call_arguments import with_results_in_order
from exo_mesh.api.core.conversation import offered_tools
from exo_mesh.api.core.request import Conversation, FieldNames, NeutralRequest, Prompts, Thinking, ToolChoice, Turn
from exo_mesh.base.long_texts import json_parts
from exo_mesh.domain.request import GrammarSpec
from exo_mesh.domain.whole.text_pieces import TextInput, TextPiece
from exo_mesh.errors import InputError


def text_inputs(asked: NeutralRequest) -> list[TextInput]:
    """The request as text, one for each prompt; a conversation is one. Raises InputError, naming the field, for a wish
    that only token ids can express."""
    _refuse_token_wishes(asked)
    subject = asked.subject
    if isinstance(subject, Conversation):
        return [_conversation(subject, asked)]
    found = []
    for prompt in subject.prompts:
        if not isinstance(prompt, str):
            raise _refusal(asked.names.prompt, "token ids as a prompt; send the prompt as text")
        body = {"prompt": prompt, **_form(asked.grammar, asked.names), **_seed(asked)}
        found.append(TextInput(_json(body), asked.stops))
    return found


def _refuse_token_wishes(asked: NeutralRequest) -> None:
    sampling, names = asked.sampling, asked.names
    wishes = {
        "logprobs": sampling.logprobs is not None,
        "logit_bias": bool(sampling.logit_bias),
        names.stop_ids: bool(asked.stop_ids),
        "prompt_logprobs": asked.prompt_logprobs is not None,
        "min_tokens": asked.min_tokens > 0,
        "ignore_eos": asked.ignore_eos,
        "best_of": asked.num_drawn > asked.num_choices,
        "add_special_tokens": isinstance(asked.subject, Prompts) and not asked.subject.adds_special,
        names.max_tokens: asked.max_tokens == 0,
    }
    for name, is_wished in wishes.items():
        if is_wished:
            raise _refusal(name, f"{name} = 0" if name == names.max_tokens else name)


def _refusal(param: str, what: str) -> InputError:
    return InputError(f"this model runs in a model server, which does not support {what}", param=param)


def _conversation(conversation: Conversation, asked: NeutralRequest) -> TextInput:
    begun: tuple[TextPiece, ...] = ()
    turns = conversation.turns
    if conversation.images:
        raise _refusal(conversation.images[0].where, "images through exo-mesh yet; text is supported")
    if conversation.continues_last:
        said = turns[-1].text
        turns, begun = turns[:-1], (TextPiece("text", said),) if said else ()
    body: dict[str, Any] = {"messages": [_message(turn) for turn in with_results_in_order(turns)]}
    if tools := offered_tools(conversation):
        body["tools"] = [tool.as_function() for tool in tools]
        body["parallel_tool_calls"] = conversation.parallel_tool_calls
        body |= _choice(conversation.tool_choice)
    body |= _form(asked.grammar, asked.names)
    body |= _thinking(conversation.thinking, conversation.variables)
    body |= _seed(asked)
    return TextInput(_json(body), asked.stops, begun, conversation.thinking.budget)


def _message(turn: Turn) -> dict[str, Any]:
    made: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.name is not None:
        made["name"] = turn.name
    if turn.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _text(call.arguments)}}
            for call in turn.tool_calls
        ]
    if turn.tool_call_id is not None:
        made["tool_call_id"] = turn.tool_call_id
    if turn.reasoning is not None:
        made["reasoning_content"] = turn.reasoning
    return made


def _choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.mode == "named":
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return {} if choice.mode == "auto" else {"tool_choice": choice.mode}


def _form(grammar: GrammarSpec | None, names: FieldNames) -> dict[str, Any]:
    """The form of the answer. Raises InputError unless it is a JSON schema."""
    if grammar is None:
        return {}
    if grammar.kind != "json_schema":
        raise _refusal(names.grammar, f"a grammar of the kind {grammar.kind}; use a JSON schema")
    schema = {"name": "answer", "schema": json.loads(grammar.text), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _thinking(thinking: Thinking, variables: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    template = dict(variables)
    if thinking.effort is not None:
        made["reasoning_effort"] = thinking.effort
    if thinking.enabled is not None and thinking.is_asked:
        template["enable_thinking"] = thinking.enabled
    if template:
        made["chat_template_kwargs"] = template
    return made


def _seed(asked: NeutralRequest) -> dict[str, Any]:
    """The seed that the client named. Sampling always has one, but only a named one must be honoured or refused."""
    return {} if asked.sampling.seed is None else {"seed": asked.sampling.seed}


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _json(body: Mapping[str, Any]) -> bytes:
    parts = json_parts(body, ensure_ascii=True, separators=(",", ":"))
    return b"".join(part.encode() for part in parts)
