"""Calls of tools in a conversation: reads their arguments, and finds the calls that results answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.api.bodies.values import ValueBudget
from exo_mesh.api.core.request import ToolCall, Turn

INVALID = "invalid_arguments"
"""The name under which templates and clients get the arguments of a call that are not a JSON object."""


MAX_OPEN_CALLS = 256
"""A result without an id is looked for among this many last calls without a result."""


def object_of(arguments: Any, budget: ValueBudget | None = None, where: str = "") -> dict[str, Any]:
    """The arguments as an object. With a budget of the request, raises InputError if its arguments have too many values
    together; else it never fails.

    A model's call may be malformed, or cut by the token limit. Clients send it back with every later request, and the
    conversation must continue. So invalid arguments are shown to the model under the name INVALID.
    """
    decoded = arguments
    if isinstance(arguments, str):
        if budget is not None:
            budget.take(arguments, where)
        try:
            decoded = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return {INVALID: arguments}
    if decoded is None:
        return {}
    return decoded if isinstance(decoded, dict) else {INVALID: arguments}


def with_calls_named(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """The turns with an id for each call, and the id and name of the call for each result, because templates need them.

    Calls without an id are numbered. A result without an id belongs to the first open call of its tool, or to the first
    open call; its own name is kept.
    """
    made: list[Turn] = []
    open_calls: list[ToolCall] = []
    names: dict[str, str] = {}
    num_calls = 0
    for turn in turns:
        calls = [
            call if call.id else replace(call, id=numbered_id(num_calls + place))
            for place, call in enumerate(turn.tool_calls)
        ]
        num_calls += len(calls)
        names.update((call.id, call.name) for call in calls)
        if turn.role == "tool":
            answered = _answered(turn, open_calls)
            if answered is not None:
                open_calls.remove(answered)
                turn = replace(turn, tool_call_id=turn.tool_call_id or answered.id)
            if not turn.name and turn.tool_call_id:
                turn = replace(turn, name=names.get(turn.tool_call_id))
        open_calls = [*open_calls, *calls][-MAX_OPEN_CALLS:] if calls else open_calls
        made.append(replace(turn, tool_calls=tuple(calls)) if calls else turn)
    return tuple(made)


def with_results_in_order(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with the results of a turn's calls in the order of the calls.

    Clients that run calls at once send the results as they come. Many templates show no ids, so the order is all that
    tells a model which result belongs to which call. Results that answer other calls keep all of them where they are.
    """
    made: list[Turn] = []
    places: dict[str | None, int] = {}
    for is_result, group in groupby(turns, lambda turn: turn.role == "tool"):
        found = list(group)
        if is_result and all(turn.tool_call_id in places for turn in found):
            found.sort(key=lambda turn: places[turn.tool_call_id])
        calls = found[-1].tool_calls
        places = {call.id: place for place, call in enumerate(calls)}
        if len(places) < len(calls):
            places = {}  # an id that several calls have says nothing
        made += found
    return made


def numbered_id(index: int) -> str:
    """The id of a call: nine letters and digits, the only form that Mistral's templates accept."""
    return f"call{index:05d}"


def _answered(turn: Turn, open_calls: Sequence[ToolCall]) -> ToolCall | None:
    """The open call whose result a message has; None if there is none."""
    for call in open_calls:
        if turn.tool_call_id and call.id != turn.tool_call_id:
            continue
        if turn.tool_call_id or turn.name in (None, "", call.name):
            return call
    return None
