"""Writes tokens and their log-probabilities for replies."""

from __future__ import annotations

import math

from exo_mesh.text.tokenizer import TextModel

LEAST_LOGPROB = -9999.0  # OpenAI's value for "very unlikely"; JSON has no -inf


def token_text(text: TextModel, token_id: int | None, logprob: float | None) -> tuple[str, float, list[int]]:
    """(text, log-probability, bytes) of a token. The bytes are the token's own, even if they are only a part of a
    character, so the joined bytes of all tokens are the output's bytes."""
    own = text.token_bytes(token_id) if token_id is not None else b""
    return own.decode("utf-8", "replace"), finite(logprob), list(own)


def token_name(text: TextModel, token_id: int | None) -> str:
    """A token as text; a part of a character is written in OpenAI's form, `bytes:\\xe2\\x82`."""
    own = text.token_bytes(token_id) if token_id is not None else b""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def finite(logprob: float | None) -> float:
    """The log-probability; LEAST_LOGPROB if it is unknown or infinite."""
    return logprob if logprob is not None and math.isfinite(logprob) else LEAST_LOGPROB
