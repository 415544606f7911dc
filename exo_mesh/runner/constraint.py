"""Limits the output of one request by a grammar, a thinking budget, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from exo_mesh.domain.request import GenerateRequest
from exo_mesh.errors import EngineError, InputError, MeshError
from exo_mesh.model_files import one_line
from exo_mesh.runner.grammars import Grammars
from exo_mesh.runner.thoughts import ThoughtLimit

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
        self._eos: frozenset[int] = frozenset()
        self._allowed: Allowed | None = None
        self._making: Future[None] | None = None
        self.is_complete = False
        """True when nothing can follow the output: the request ends."""
        if request.grammar is not None:
            self._making = grammars.compile(request.grammar, self._begin)

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
        if self._one_by_one and self._thought is not None and (ids := self._possible(self._thought)):
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

    def follow(self, room: int) -> list[int]:
        """The tokens that must come next, at most `room`; they count as output from now on. Then starts to compute what
        may come after them. With log-probabilities the list is empty, because each token needs its own row. Raises a
        MeshError."""
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
            self._making = self._grammars.submit(partial(self._make_mask, self._matcher))
        return forced

    def _must_come(self) -> Sequence[int]:
        if self._thought is not None and (ids := self._possible(self._thought)):
            return ids
        return () if self._matcher is None else self._matcher.compute_ff_tokens()

    def _possible(self, thought: ThoughtLimit) -> tuple[int, ...]:
        """The tokens that must come to end a thought; none if the grammar does not allow them."""
        ids = thought.forced()
        if ids and self._matcher is not None and self._matcher.validate_tokens(list(ids)) < len(ids):
            thought.give_up()
            return ()
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

    def _begin(self, matcher: LLMatcher, eos_ids: frozenset[int]) -> None:
        resume_ids = list(self._request.resume_ids)
        if resume_ids and not matcher.consume_tokens(resume_ids):
            raise InputError(f"the grammar does not accept the output so far: {one_line(matcher.get_error())}")
        self._matcher, self._eos = matcher, eos_ids

    def _make_mask(self, matcher: LLMatcher) -> None:
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
        self._allowed = allowed

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise self._broken(matcher)
        if matcher.is_stopped():
            self.is_complete = True

    def _broken(self, matcher: LLMatcher) -> MeshError:
        why = matcher.get_error().partition("\n")[0]
        return InputError(f"the grammar cannot continue after the output so far: {one_line(why)}")
