"""JSON that other peers send is counted before it is decoded, as the bodies of clients are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from exo_mesh.api.anthropic.threads import HeldTurn
from exo_mesh.api.core.recipes import read_recipe
from exo_mesh.api.responses.context import gather_items
from exo_mesh.api.responses.stored import read_stored
from exo_mesh.domain.bounded_json import MAX_KEPT_VALUES, MAX_VALUES, decode_bounded
from exo_mesh.domain.request import GenerateRequest
from exo_mesh.domain.whole.text_pieces import TextInput
from exo_mesh.errors import InputError, MeshError
from exo_mesh.models.card_json import card_from_json, survey_from_json
from exo_mesh.node.inspection import calls
from exo_mesh.node.inspection.trace_formats import trace_from_json
from exo_mesh.rings.runner.whole.driver import text_request
from exo_mesh.rings.serving.kept_answers import KeptAnswer


def bomb(num_values: int, name: str = "x") -> bytes:
    return b'{"%s":[' % name.encode() + b"[]," * num_values + b"[]]}"


def as_text(body: bytes) -> Any:
    return text_request(GenerateRequest("r", (0,), 1, text=TextInput(body)))


def as_survey(body: bytes) -> Any:
    return survey_from_json(body, 1)


def as_diagnostics(body: bytes) -> Any:
    return calls._decoded(body, 1 << 30, "diagnostics", "a")


READERS: list[tuple[Callable[[bytes], Any], str]] = [
    (card_from_json, "layers"),
    (as_survey, "layers"),
    (as_diagnostics, "node_id"),
    (trace_from_json, "legs"),
    (read_recipe, "tools"),
    (read_stored, "input"),
    (as_text, "messages"),
]


@pytest.mark.parametrize(("read", "name"), READERS, ids=[name for _, name in READERS])
def test_a_text_of_too_many_values_from_a_peer_is_an_error_and_no_memory(
    read: Callable[[bytes], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    real = msgspec.json.decode

    def decode(text: bytes, **options: Any) -> Any:
        decoded.append(len(text))
        return real(text, **options)

    monkeypatch.setattr(msgspec.json, "decode", decode)
    with pytest.raises(MeshError):
        read(bomb(MAX_KEPT_VALUES, name))
    assert not decoded


def test_as_many_values_as_a_client_may_send_are_decoded() -> None:
    assert len(decode_bounded(bomb(MAX_VALUES // 2 - 10))["x"]) == MAX_VALUES // 2 - 9
    with pytest.raises(msgspec.DecodeError, match="200000 values"):
        decode_bounded(bomb(MAX_VALUES))
    assert decode_bounded(b'{"messages":[],"reply":[]}', HeldTurn).reply == []


class Chain:
    """Keeps one conversation."""

    def __init__(self, answers: Sequence[KeptAnswer]) -> None:
        self.answers = answers

    async def chain(self, key_id: str | None, answer_id: str) -> Sequence[KeptAnswer]:
        return self.answers


async def test_the_answers_of_a_conversation_are_counted_together() -> None:
    data = b'{"input":[' + b"0," * (MAX_VALUES - 10) + b'0],"response":{"output":[]},"sizes":[]}'
    kept: Any = Chain([KeptAnswer(f"resp_{number}", "", "", data) for number in range(6)])
    with pytest.raises(InputError, match="more than 1000000 values") as caught:
        await gather_items(kept, None, [], "resp_5")
    assert caught.value.param == "previous_response_id"
