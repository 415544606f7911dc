"""The log-probabilities of tokens in the form of OpenAI's replies."""

from __future__ import annotations

from collections.abc import Iterable

from exo_mesh.api.core.token_texts import token_text
from exo_mesh.api.openai.objects import ChatTokenLogprob, TopLogprob
from exo_mesh.text.assembler import TokenSpan
from exo_mesh.text.tokenizer import TextModel


def token_logprobs(text: TextModel, tokens: Iterable[TokenSpan]) -> list[ChatTokenLogprob]:
    """The log-probability of each token, with its alternatives."""
    return [
        ChatTokenLogprob(
            *token_text(text, token.event.token_id, token.event.logprob),
            [TopLogprob(*token_text(text, top.token_id, top.logprob)) for top in token.event.top],
        )
        for token in tokens
    ]
