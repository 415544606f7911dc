"""The bodies that OpenAI's clients expect back, for chat and for plain completions, whole and in chunks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from exo_mesh import __version__
from exo_mesh.api.core.running import Run
from exo_mesh.text.assembler import Piece, TokenSpan
from exo_mesh.text.tokenizer import TextModel

FINGERPRINT = f"exo-mesh-{__version__}"
LEAST_LOGPROB = -9999.0  # what OpenAI writes for "very unlikely"; JSON has no -inf


class Reply(ABC):
    """Builds the reply to one request. Subclasses say what a choice looks like."""

    object_name: str
    chunk_name: str

    def __init__(self, run: Run, created: int) -> None:
        self._run = run
        self._text = run.prepared.text
        self._created = created
        self._options = run.prepared.stream_options

    @abstractmethod
    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        """The choice of a whole reply."""

    @abstractmethod
    def deltas(self, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        """The choices of the chunks that a piece becomes."""

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """The reply of a request that does not stream."""
        return {**self._head(self.object_name), "choices": [self.choice(pieces)], "usage": self._usage()}

    def chunks(self, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        """What a stream says of one piece; the last piece ends with the usage, if that was asked for."""
        made: list[dict[str, Any]] = []
        for choice in self.deltas(piece, first=first):
            chunk = {**self._head(self.chunk_name), "choices": [choice]}
            if self._options.continuous_usage_stats:
                chunk["usage"] = self._usage()
            elif self._options.include_usage:
                chunk["usage"] = None
            made.append(chunk)
        if piece.finish and self._options.include_usage:
            made.append({**self._head(self.chunk_name), "choices": [], "usage": self._usage()})
        return made

    def _head(self, object_name: str) -> dict[str, Any]:
        tier = {"service_tier": "default"} if self._run.prepared.names_tier else {}
        return {
            "id": self._run.prepared.request.request_id,
            "object": object_name,
            "created": self._created,
            "model": self._run.prepared.model,
            "system_fingerprint": FINGERPRINT,
            **tier,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt = len(self._run.prepared.request.prompt_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._run.num_tokens,
            "total_tokens": num_prompt + self._run.num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


class ChatReply(Reply):
    """`chat.completion` and `chat.completion.chunk`."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        tokens = [token for piece in pieces for token in piece.tokens]
        return {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": pieces[-1].finish,
        }

    def deltas(self, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        if first:
            made.append(self._delta({"role": "assistant", "content": "", "refusal": None}))
        logprobs = self._logprobs(list(piece.tokens)) if piece.tokens else None
        if piece.text or logprobs:
            made.append(self._delta({"content": piece.text}, logprobs))
        if piece.finish:
            made.append({**self._delta({}), "finish_reason": piece.finish})
        return made

    def _delta(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, tokens: list[TokenSpan]) -> dict[str, Any] | None:
        if self._run.prepared.request.sampling.logprobs is None:
            return None
        content = [
            {
                **_token(self._text, token.event.token_id, token.event.logprob),
                "top_logprobs": [_token(self._text, top.token_id, top.logprob) for top in token.event.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionReply(Reply):
    """`text_completion`; the chunks of its streams bear the same name."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        tokens = [token for piece in pieces for token in piece.tokens]
        return self._choice("".join(piece.text for piece in pieces), tokens, pieces[-1].finish)

    def deltas(self, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        made = [self._choice(piece.text, list(piece.tokens), None)] if piece.text or piece.tokens else []
        return [*made, self._choice("", [], piece.finish)] if piece.finish else made

    def _choice(self, text: str, tokens: list[TokenSpan], finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def _logprobs(self, tokens: list[TokenSpan]) -> dict[str, Any] | None:
        if self._run.prepared.request.sampling.logprobs is None:
            return None
        return {
            "tokens": [_name(self._text, token.event.token_id) for token in tokens],
            "token_logprobs": [_finite(token.event.logprob) for token in tokens],
            "top_logprobs": [
                {_name(self._text, top.token_id): _finite(top.logprob) for top in token.event.top} for token in tokens
            ],
            "text_offset": [token.start for token in tokens],
        }


def _token(text: TextModel, token_id: int | None, logprob: float | None) -> dict[str, Any]:
    """The token's own bytes, also where it is but a part of a character: joined, they are the output's bytes."""
    own = text.token_bytes(token_id) if token_id is not None else b""
    return {"token": own.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(own)}


def _name(text: TextModel, token_id: int | None) -> str:
    """A token as text; part of a character is written as OpenAI does: `bytes:\\xe2\\x82`."""
    own = text.token_bytes(token_id) if token_id is not None else b""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else LEAST_LOGPROB
