"""Limits the output of one request: by a grammar, a thinking budget, or a text that it must begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from exo_mesh.domain.request import GenerateRequest
from exo_mesh.errors import EngineError, InputError, MeshError
from exo_mesh.rings.runner.grammars import Grammars
from exo_mesh.rings.runner.thoughts import ThoughtLimit
from exo_mesh.text.spelling import Spelling
from exo_mesh.weights.model_files import one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

Allowed = npt.NDArray[np.bool_]


class Constraint:
    """Says which tokens may come next and which must, as a function of the request and its output alone.

    Another thread makes the masks, from the moment when a token is known until its row comes round. Methods that read
    or move the matcher are called only after that. All methods are for the event loop.
    """

    def __init__(self, request: GenerateRequest, grammars: Grammars) -> None:
        self._request = request
        self._grammars = grammars
        self._ends = frozenset() if request.ignore_eos else request.stop_ids
        self._one_by_one = request.sampling.logprobs is not None
        self._thought: ThoughtLimit | None = None
        if request.thinking is not None:
            self._thought = ThoughtLimit(request.thinking, request.resume_ids)
        self._matcher: LLMatcher | None = None
        self._beginning: Spelling | None = None
        """Set until the output has spelled the text that it must begin with."""
        self._eos: frozenset[int] = frozenset()
        self._allowed: Allowed | None = None
        self._making: Future[None] | None = None
        self.foreseen: list[int] = []
        """Guesses of the next tokens that the grammar allows: what may come after each of them is known once `is_ready`
        is true."""
        self._later: list[Allowed] = []
        """What may come after each of these."""
        self._is_untried = not request.resume_ids
        self.is_complete = False
        """True when nothing can follow the output: the request ends."""
        if request.grammar is not None or request.begins_with:
            self._making = grammars.begin(self._begin)

    @property
    def limits_drafts(self) -> bool:
        """Whether only the guesses in `foreseen` may be sent."""
        return self._request.grammar is not None or bool(self._request.begins_with)

    @property
    def is_ready(self) -> bool:
        """Whether the tokens that may come next are known."""
        return self._making is None or self._making.done()

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call `callback` once on the event loop, as soon as `is_ready` is true."""
        assert self._making is not None, "it is not ready"
        self._making.add_done_callback(lambda _: self._grammars.wake(callback))

    def allowed(self) -> Allowed | None:
        """The tokens that may come next, as a mask by id; ids beyond its end are not allowed. None: any token may come.
        Raises the MeshError that ends the request."""
        self._settle()
        if self._one_by_one and (ids := self._end_of_thought()):
            only = np.zeros(ids[0] + 1, np.bool_)
            only[ids[0]] = True
            return only
        return self._allowed

    def accept(self, token_id: int) -> None:
        """Record a token that was drawn and is output. Raises a MeshError."""
        self._settle()
        if self._thought is not None:
            self._thought.add(token_id)
        if self._matcher is not None and not self._matcher.consume_token(token_id):
            raise self._broken(self._matcher)
        self._allowed = None
        if self._later and self.foreseen[0] == token_id:
            del self.foreseen[0]
            self._allowed = self._later.pop(0)
        else:
            self.foreseen, self._later = [], []
        if self._beginning is not None:
            self._beginning.accept(token_id)
            if self._beginning.is_done:
                self._beginning = None

    def follow(self, room: int) -> list[int]:
        """The tokens that must come next, at most `room`; they count as output from now on. `prepare` must follow. With
        log-probabilities the list is empty, because each token needs its own row. Raises a MeshError."""
        self._settle()
        forced: list[int] = []
        while not self.is_complete and (ids := self._must_come()):
            if ids[0] in self._ends or ids[0] in self._eos:
                self.is_complete = True
            elif self._one_by_one or len(forced) == room:
                break
            else:
                self.accept(ids[0])
                forced.append(ids[0])
        if self._matcher is not None and not self.is_complete:
            self._check(self._matcher)
        return forced

    def prepare(self, guesses: Sequence[int] = ()) -> None:
        """Start to compute what may come next, and after each of these guesses as far as the grammar allows them,
        unless that is known."""
        if self.is_complete or self._making is not None or self._allowed is not None:
            return
        if self._matcher is None and self._beginning is None:
            return
        if self._matcher is not None and self._beginning is None and guesses:
            known = list(takewhile(self._grammars.num_ids.__gt__, guesses))
            self.foreseen = known[: self._matcher.validate_tokens(known)] if known else []
        self._making = self._grammars.submit(self._make_masks)

    def _must_come(self) -> Sequence[int]:
        if ids := self._end_of_thought():
            return ids
        return () if self._matcher is None or self._beginning is not None else self._matcher.compute_ff_tokens()

    def _end_of_thought(self) -> tuple[int, ...]:
        """The tokens that must come to end a thought; none where the grammar does not allow them."""
        if self._thought is None or self._beginning is not None:
            return ()
        ids = self._thought.forced()
        if ids and self._matcher is not None and self._matcher.validate_tokens(list(ids)) < len(ids):
            return ()  # a character may be unfinished: the end comes after the next token
        return ids

    def _settle(self) -> None:
        """Raise the error of the other thread, if it had one."""
        if self._making is not None:
            making, self._making = self._making, None
            error = making.exception()
            if isinstance(error, MeshError):
                raise error
            if error is not None:
                raise EngineError(f"the grammar failed: {one_line(str(error))}") from error

    # the methods below run in other threads

    def _begin(self) -> None:
        if self._request.begins_with:
            self._beginning = Spelling(self._grammars.token_bytes(), self._request.begins_with)
        if self._request.grammar is None:
            return
        matcher, eos_ids = self._grammars.matcher(self._request.grammar)
        resume_ids = list(self._request.resume_ids)
        if resume_ids and not matcher.consume_tokens(resume_ids):
            raise InputError(f"the grammar does not accept the output so far: {one_line(matcher.get_error())}")
        self._matcher, self._eos = matcher, eos_ids

    def _make_masks(self) -> None:
        self._make_mask()
        if self._matcher is None or not self.foreseen:
            return
        consumed = 0
        for token_id in [] if self.is_complete else self.foreseen:
            if not self._matcher.consume_token(token_id):
                break
            consumed += 1
            if self._matcher.is_error() or self._matcher.is_stopped() or self._matcher.is_accepting():
                break  # the output may end there: that is looked at when it has come so far
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little").view(np.bool_)
            if self._matcher.is_error() or not allowed.any():
                break
            self._later.append(allowed)
        if consumed and not self._matcher.rollback(consumed):
            raise EngineError("the grammar cannot go back to where it was before the guesses")
        del self.foreseen[len(self._later) :]

    def _make_mask(self) -> None:
        allowed = None if self._matcher is None else self._first_or_later(self._matcher)
        if self._beginning is not None:
            spelling = self._beginning.allowed()
            spelling[[token_id for token_id in self._ends if token_id < spelling.size]] = False
            if allowed is not None:
                size = min(allowed.size, spelling.size)  # one of them ends at a multiple of 32
                spelling = allowed[:size] & spelling[:size]
            allowed = spelling
            if not allowed.any():
                raise InputError("no allowed token continues the required beginning of the output")
        self._allowed = allowed

    def _first_or_later(self, matcher: LLMatcher) -> Allowed:
        """The mask of the grammar. If the first one fails, so does every request with this grammar."""
        is_first, self._is_untried = self._is_untried, False
        try:
            return self._of_grammar(matcher)
        except InputError as exc:
            if is_first and self._request.grammar is not None:
                self._grammars.note_failure(self._request.grammar, exc)
            raise

    def _of_grammar(self, matcher: LLMatcher) -> Allowed:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        self._check(matcher)
        allowed = np.unpackbits(bits, bitorder="little").view(np.bool_)
        if matcher.is_accepting():
            allowed[[token_id for token_id in self._eos if token_id < allowed.size]] = False
            if not allowed.any():
                self.is_complete = True
            allowed[[token_id for token_id in self._ends if token_id < allowed.size]] = True
        elif not allowed.any():
            raise InputError("the grammar allows no token of this model to come next")
        return allowed

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise self._broken(matcher)
        if matcher.is_stopped():
            self.is_complete = True

    def _broken(self, matcher: LLMatcher) -> MeshError:
        why = matcher.get_error().partition("\n")[0]
        return InputError(f"the grammar cannot continue after the output so far: {one_line(why)}")
