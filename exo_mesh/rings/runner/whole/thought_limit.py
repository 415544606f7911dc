"""Cuts the thought of a whole-model engine at the client's budget: the engine is then asked for the answer alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from msgspec.structs import replace

from exo_mesh.domain.request import FinishReason
from exo_mesh.domain.whole.text_pieces import TextPiece, TextUsage
from exo_mesh.domain.whole.text_request import TextEnd, TextEvent, TextRequest
from exo_mesh.errors import InputError

BYTES_PER_TOKEN = 4
"""Of thoughts in English. Servers send a piece for each token or for several, and count only at the end; so a piece
counts as one token, or as many as its bytes make if that is more."""

Events = AsyncGenerator[TextEvent | None, None]


def thought_tokens(pieces: Iterable[TextPiece]) -> int:
    """The tokens of the reasoning among these pieces, as the budget counts them."""
    thoughts = [piece.text for piece in pieces if piece.kind == "reasoning"]
    return sum(max(1, len(text.encode()) // BYTES_PER_TOKEN) for text in thoughts)


async def within_budget(asked: TextRequest, ask: Callable[[TextRequest], Events]) -> Events:
    """The events of an answer whose reasoning keeps the budget of the request. ask: asks the engine; see
    WholeDriver._events."""
    budget = asked.thinking_budget
    if budget is None:
        async with aclosing(ask(asked)) as events:
            async for event in events:
                yield event
        return
    begun, num_thought = list(asked.begun), thought_tokens(asked.begun)
    if budget:
        async with aclosing(ask(asked)) as events:
            async for event in events:
                if isinstance(event, TextPiece):
                    cost = thought_tokens([event])
                    if cost and num_thought + cost > budget:
                        break
                    num_thought += cost
                    begun.append(event)
                yield event
                if isinstance(event, TextEnd):
                    return
    said = tuple(piece for piece in begun if piece.kind != "reasoning")
    num_left = max(1, asked.max_tokens - num_thought) - len(said)
    # the limit stays whole, because a server that thinks once more spends it on that thought, too
    async with aclosing(_answer_alone(replace(asked, begun=said), ask)) as events:
        async for event in events:
            if isinstance(event, TextPiece):
                if num_left < 1:
                    yield TextEnd(FinishReason.LENGTH, TextUsage(output_tokens=asked.max_tokens))
                    return
                num_left -= 1
            counted = event.usage.output_tokens if isinstance(event, TextEnd) else None
            if isinstance(event, TextEnd) and counted is not None:
                event = replace(event, usage=replace(event.usage, output_tokens=counted + num_thought))
            yield event


async def _answer_alone(asked: TextRequest, ask: Callable[[TextRequest], Events]) -> Events:
    """The answer without a thought. A server that cannot turn thinking off thinks once more, unseen."""
    variables = {**(asked.body.get("chat_template_kwargs") or {}), "enable_thinking": False}
    off = {name: value for name, value in asked.body.items() if name != "reasoning_effort"}
    for request in (replace(asked, body={**off, "chat_template_kwargs": variables}), asked):
        try:
            async with aclosing(ask(request)) as events:
                async for event in events:
                    yield None if isinstance(event, TextPiece) and event.kind == "reasoning" else event
        except InputError:
            if request is asked:
                raise
        else:
            return
