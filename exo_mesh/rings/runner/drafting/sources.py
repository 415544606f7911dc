"""Chooses where the guesses of a request come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from exo_mesh.engine.contract import DraftingEngine, StageEngine
from exo_mesh.rings.runner.drafting.suffix import SuffixDrafter

if TYPE_CHECKING:
    from exo_mesh.domain.request import GenerateRequest
    from exo_mesh.rings.runner.drafting.foresight import DraftSource

MOST_EXPECTED = 4096
"""Tokens of output that an index has room for from the beginning; with more, it is slower."""

SourceMaker = Callable[["GenerateRequest"], "DraftSource"]


class EngineSource:
    """The guesses of the last stage's engine."""

    def __init__(self, engine: DraftingEngine) -> None:
        self._engine = engine

    def draft(self, tokens: Sequence[int], ahead: Sequence[int], most: int) -> tuple[list[int], int]:
        """See DraftSource."""
        return self._engine.draft([*tokens, *ahead], most), 0


def source_maker(wanted: str, engine: StageEngine) -> SourceMaker | None:
    """What makes the drafter of each request. wanted: off, suffix or auto; auto is the engine's own, if it has one.
    None: nothing is drafted."""
    if wanted == "off":
        return None
    if wanted == "auto" and isinstance(engine, DraftingEngine) and engine.drafts:
        return partial(_of_engine, engine)
    return _suffix


def _of_engine(engine: DraftingEngine, _request: GenerateRequest) -> DraftSource:
    return EngineSource(engine)


def _suffix(request: GenerateRequest) -> DraftSource:
    num_expected = len(request.prompt_ids) + min(request.max_tokens, MOST_EXPECTED)
    return SuffixDrafter(num_expected, request.expected_ids)
