"""Turns the token events of one output into text: detokenizes, cuts at a stop string, maps each token to its text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from exo_mesh.domain.request import FinishReason, TokenEvent
from exo_mesh.domain.whole.text_pieces import Respelling
from exo_mesh.text.detokenizer import Detokenizer
from exo_mesh.text.stop import StopStrings


class TokenSpan(msgspec.Struct, frozen=True):
    """A token and its text's range [start, stop) in the output, in characters; empty if it ends inside a character."""

    event: TokenEvent
    start: int
    stop: int


class Piece(msgspec.Struct, frozen=True):
    """Text that may be sent, and the tokens whose text is complete with it. finish is set on the last piece only.

    stop_string: the stop string that ended the output; "" if none did.
    """

    text: str
    tokens: tuple[TokenSpan, ...] = ()
    finish: FinishReason | None = None
    stop_string: str = ""


class TextAssembler:
    """Turns the events of one request into pieces.

    A token is released once all of its text is released. A token with any text of a stop string is never shown.
    min_tokens: stop strings are looked for only in the text of later tokens, as vLLM does.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._spans: deque[TokenSpan] = deque()
        self._num_decoded = 0
        self._num_released = 0
        self._known = ""
        self.num_tokens = 0
        """Output tokens so far, including the tokens of a stop string."""

    def push(self, event: TokenEvent) -> Piece:
        """Take one event and return the text that may now be sent. After a piece with `finish` the output is complete:
        push nothing more, even if the engine adds tokens."""
        decoded = ""
        if event.token_id is not None:
            self.num_tokens += 1
            decoded = self._unknown(self._detokenizer.push(event.token_id))
            start, self._num_decoded = self._num_decoded, self._num_decoded + len(decoded)
            self._spans.append(TokenSpan(event, start, self._num_decoded))
        text = self._before_stop(decoded)
        if event.finish is not None and not self._stops.stopped:
            tail = self._unknown(self._detokenizer.flush())
            self._num_decoded += len(tail)
            text += self._before_stop(tail)
            if not self._stops.stopped:
                text += self._stops.flush()
        finish = FinishReason.STOP if self._stops.stopped else event.finish
        self._num_released += len(text)
        released = self._release(everything=finish is not None and not self._stops.stopped)
        return Piece(text, released, finish, self._stops.matched)

    def push_text(self, text: str, finish: FinishReason | None = None) -> Piece:
        """Take text that an engine gave without token ids. Text of tokens that is held back comes first."""
        tail = self._detokenizer.flush()
        self._num_decoded += len(tail)
        given = self._stops.push(tail + text)
        if finish is not None and not self._stops.stopped:
            given += self._stops.flush()
        ends = FinishReason.STOP if self._stops.stopped else finish
        self._num_released += len(given)
        released = self._release(everything=ends is not None and not self._stops.stopped)
        return Piece(given, released, ends, self._stops.matched)

    def respell(self, respelling: Respelling) -> None:
        """Continue after text that came without tokens: the first tokens spell the end of that text again."""
        self._detokenizer.continue_after(respelling.ids)
        self._known = respelling.known
        self.num_tokens = len(respelling.ids)

    def _before_stop(self, decoded: str) -> str:
        """The text that may be sent after one token more."""
        return decoded if self.num_tokens <= self._min_tokens else self._stops.push(decoded)

    def _unknown(self, decoded: str) -> str:
        """The part of a text that was not there before `respell`."""
        if not self._known or not decoded:
            return decoded
        if self._known[0] == " " != decoded[0]:  # some decoders drop a space at the beginning
            self._known = self._known[1:]
        size = min(len(self._known), len(decoded))
        self._known = self._known[size:]
        return decoded[size:]

    def _release(self, *, everything: bool) -> tuple[TokenSpan, ...]:
        """Remove and return the tokens whose text has been sent. A token that ends inside a character waits until that
        character is complete. everything: return all tokens that wait."""
        released: list[TokenSpan] = []
        while self._spans:
            span = self._spans[0]
            if not everything and (span.start >= self._num_released or span.stop > self._num_released):
                break
            released.append(self._spans.popleft())
        return tuple(released)
