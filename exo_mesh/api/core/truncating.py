"""Drops the oldest turns of a conversation that is too long, for clients that ask for that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

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
        endings = _Endings(conversation.turns)
        if not endings.begins:
            raise
    fits = len(endings.begins) - 1
    found = await prepare(replace(conversation, turns=endings.ending(fits)))
    too_long = -1
    while fits - too_long > 1:
        middle = (too_long + fits) // 2
        try:
            found = await prepare(replace(conversation, turns=endings.ending(middle)))
            fits = middle
        except ContextLengthError:
            too_long = middle
    return found


class _Endings:
    """The turns without their oldest exchanges, the longest first. An exchange begins with a turn of the user, so that
    no result loses its call. Each is made when it is asked for: all of a long conversation would take gigabytes."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        not_system = (place for place, turn in enumerate(turns) if turn.role not in ("system", "developer"))
        self._first = next(not_system, len(turns))
        self.begins = [place for place, turn in enumerate(turns) if turn.role == "user" and place > self._first]

    def ending(self, index: int) -> tuple[Turn, ...]:
        return (*self._turns[: self._first], *self._turns[self.begins[index] :])
