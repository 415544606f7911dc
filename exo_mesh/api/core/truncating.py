"""Drops the oldest turns of a conversation that is too long, for clients that ask for that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from exo_mesh.api.core.request import Conversation, Turn
from exo_mesh.errors import ContextLengthError

T = TypeVar("T")

LEAST_SHARE = 4
"""After turns were dropped, this part of the context is free for the answer, or as much as the client asks for."""


async def prepare_fitting(conversation: Conversation, prepare: Callable[[Conversation], Awaitable[T]]) -> T:
    """Prepare the conversation, or the longest ending of it that fits, with its first instructions.

    prepare: raises ContextLengthError if the conversation is too long; it is called about log2(turns) times. Raises
    that error if even the last turn of the user is too long.
    """
    try:
        return await prepare(conversation)
    except ContextLengthError:
        endings = _endings(conversation.turns)
        if not endings:
            raise
    found = await prepare(replace(conversation, turns=endings[-1]))
    too_long, fits = -1, len(endings) - 1
    while fits - too_long > 1:
        middle = (too_long + fits) // 2
        try:
            found = await prepare(replace(conversation, turns=endings[middle]))
            fits = middle
        except ContextLengthError:
            too_long = middle
    return found


def _endings(turns: Sequence[Turn]) -> list[tuple[Turn, ...]]:
    """The turns without their oldest exchanges, the longest first. An exchange begins with a turn of the user, so that
    no result loses its call."""
    first = next((place for place, turn in enumerate(turns) if turn.role not in ("system", "developer")), len(turns))
    begins = [place for place, turn in enumerate(turns) if turn.role == "user" and place > first]
    return [(*turns[:first], *turns[begin:]) for begin in begins]
