"""A thought of a whole-model engine ends at the client's budget, and the answer follows."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from exo_mesh.domain.request import FinishReason, SamplingParams
from exo_mesh.domain.whole.text_pieces import TextPiece, TextUsage, text_of
from exo_mesh.domain.whole.text_request import TextEnd, TextEvent, TextRequest
from exo_mesh.errors import InputError
from exo_mesh.rings.runner.whole.thought_limit import thought_tokens, within_budget

BODY = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "high"}


class Server:
    """Thinks `thoughts` pieces of 4 bytes unless thinking is turned off, and then answers. has_switch: whether it can
    turn thinking off. is_deaf: it thinks in any case."""

    def __init__(self, thoughts: int, *, has_switch: bool = True, is_deaf: bool = False) -> None:
        self.thoughts, self.has_switch, self.is_deaf = thoughts, has_switch, is_deaf
        self.asked: list[TextRequest] = []

    async def ask(self, request: TextRequest) -> AsyncGenerator[TextEvent | None, None]:
        self.asked.append(request)
        variables = request.body.get("chat_template_kwargs", {})
        if variables and not self.has_switch:
            raise InputError("this server has no chat_template_kwargs")
        begun = text_of(request.begun)
        num_left = request.max_tokens - len(request.begun)
        if not begun and (self.is_deaf or variables.get("enable_thinking") is not False):
            for _ in range(len(text_of(request.begun, "reasoning")) // 4, self.thoughts):
                if num_left < 1:
                    yield TextEnd(FinishReason.LENGTH, TextUsage(3, request.max_tokens))
                    return
                num_left -= 1
                yield TextPiece("reasoning", "hmm ")
        yield None
        for piece in ("It ", "is ", "blue."):
            if piece not in begun:
                if num_left < 1:
                    yield TextEnd(FinishReason.LENGTH, TextUsage(3, request.max_tokens))
                    return
                num_left -= 1
                yield TextPiece("text", piece)
        yield TextEnd(FinishReason.STOP, TextUsage(3, 3))


async def answer(
    server: Server, budget: int | None, begun: tuple[TextPiece, ...] = (), max_tokens: int = 100
) -> tuple[list[TextPiece], TextEnd]:
    asked = TextRequest("r", BODY, max_tokens, SamplingParams(), begun=begun, thinking_budget=budget)
    events = [event async for event in within_budget(asked, server.ask) if event is not None]
    *pieces, end = events
    assert isinstance(end, TextEnd)
    return [piece for piece in pieces if isinstance(piece, TextPiece)], end


@pytest.mark.parametrize("budget", [0, 1, 4, 5])
@pytest.mark.parametrize("kind", ["switch", "no switch", "deaf"])
async def test_the_client_gets_at_most_the_budget_of_thought_and_the_whole_answer(budget: int, kind: str) -> None:
    server = Server(9, has_switch=kind != "no switch", is_deaf=kind == "deaf")
    pieces, end = await answer(server, budget)
    assert thought_tokens(pieces) == budget and text_of(pieces) == "It is blue."
    assert end.usage == TextUsage(3, 3 + budget)
    assert server.asked[-1].max_tokens == 100
    if kind == "switch":
        assert server.asked[-1].body["chat_template_kwargs"] == {"enable_thinking": False}
        assert "reasoning_effort" not in server.asked[-1].body


@pytest.mark.parametrize("kind", ["no switch", "deaf"])
async def test_a_thought_that_nobody_sees_takes_no_room_from_the_answer(kind: str) -> None:
    server = Server(9, has_switch=kind != "no switch", is_deaf=kind == "deaf")
    pieces, end = await answer(server, 5, max_tokens=12)
    assert text_of(pieces) == "It is blue." and end.reason is FinishReason.STOP


@pytest.mark.parametrize("known", [0, 5, 6])
async def test_the_thought_and_the_answer_together_keep_the_limit_of_tokens(known: int) -> None:
    whole, _ = await answer(Server(9), 5)
    pieces, end = await answer(Server(9), 5, tuple(whole[:known]), max_tokens=7)
    assert [*whole[:known], *pieces] == whole[:7]
    assert (end.reason, end.usage.output_tokens) == (FinishReason.LENGTH, 7)


@pytest.mark.parametrize("budget", [None, 9, 1024])
async def test_a_thought_within_the_budget_is_left_alone(budget: int | None) -> None:
    server = Server(9)
    pieces, end = await answer(server, budget)
    assert thought_tokens(pieces) == 9 and text_of(pieces) == "It is blue." and end.usage == TextUsage(3, 3)
    assert len(server.asked) == 1 and server.asked[0].body == BODY


@pytest.mark.parametrize("known", range(8))
async def test_an_answer_that_goes_on_elsewhere_keeps_the_same_budget(known: int) -> None:
    whole, _ = await answer(Server(9), 5)
    rest, _ = await answer(Server(9), 5, tuple(whole[:known]))
    assert [*whole[:known], *rest] == whole


async def test_a_long_piece_counts_for_its_bytes() -> None:
    assert thought_tokens([TextPiece("reasoning", "a" * 40), TextPiece("reasoning", "b"), TextPiece("text", "c")]) == 11
