"""The entry peer's memory of a request: gapless, bounded, and enough to go on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from exo_mesh.domain.request import (
    FinishReason,
    GenerateRequest,
    PromptLogprob,
    PromptLogprobs,
    SamplingParams,
    TokenEvent,
)
from exo_mesh.domain.whole.text_pieces import Respelling, TextInput, TextPiece, TextUsage, text_of
from exo_mesh.errors import EngineError, InputError, OverloadError, TransportError
from exo_mesh.rings.serving.choices import fan_out
from exo_mesh.rings.serving.journal import MAX_SHOWN, Journal


def request(request_id: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id, (1, 2, 3), 10, SamplingParams(seed=42))


def test_a_resumption_goes_on_after_what_was_emitted_with_the_same_seed() -> None:
    entry = Journal().open(request(), "m", 0.0)
    for index, token in enumerate((7, 8)):
        assert entry.accept(TokenEvent(index, token))
    assert entry.resumption(as_text=False).resume_ids == (7, 8)
    assert entry.resumption(as_text=False).sampling.seed == 42
    assert entry.resumption(as_text=False).prompt_ids == (1, 2, 3)


def test_repeats_are_dropped_and_gaps_are_an_error() -> None:
    entry = Journal().open(request(), "m", 0.0)
    assert entry.accept(TokenEvent(0, 7))
    assert not entry.accept(TokenEvent(0, 7))
    with pytest.raises(TransportError, match="from token 1 to token 3"):
        entry.accept(TokenEvent(3, 9))


def test_an_end_without_a_token_is_accepted_once_the_rest_is_there() -> None:
    entry = Journal().open(request(), "m", 0.0)
    assert entry.accept(TokenEvent(0, None, finish=FinishReason.STOP))
    assert entry.emitted == []


def test_what_waits_on_an_instance_is_without_a_token_and_not_elsewhere() -> None:
    journal = Journal()
    first, second, elsewhere, placing = (journal.open(request(name), "m", 0.0) for name in "abcd")
    first.instance_id = second.instance_id = "m-1"
    elsewhere.instance_id, placing.instance_id = "m-2", ""
    assert journal.waiting_on("m-1") == [first, second]
    first.last_token_at = 1.0
    assert journal.waiting_on("m-1") == [second]


def test_an_id_is_live_once_and_room_is_bounded() -> None:
    journal = Journal(max_live=2)
    journal.open(request("a"), "m", 0.0)
    with pytest.raises(InputError, match="a is running already"):
        journal.open(request("a"), "m", 0.0)
    journal.open(request("b"), "m", 0.0)
    with pytest.raises(OverloadError, match=r"^2 live requests on this peer, .* another peer, or retry later$"):
        journal.open(request("c"), "m", 0.0)


def test_every_live_request_is_counted_by_its_state_also_beyond_those_shown() -> None:
    journal = Journal()
    for number in range(MAX_SHOWN + 3):
        journal.open(request(str(number)), "m", 0.0)
    assert sum(journal.states().values()) == MAX_SHOWN + 3 and len(journal.describe_live()) == MAX_SHOWN


def test_a_closed_request_is_history() -> None:
    journal = Journal()
    entry = journal.open(request("r"), "m", 0.0)
    entry.accept(TokenEvent(0, 7))
    entry.ttft_s = 0.5
    journal.close(entry, "stop", 2.0)
    (outcome,) = journal.history.recent(10)
    assert (len(journal), outcome.request_id, outcome.output_tokens, outcome.duration_s) == (0, "r", 1, 2.0)


async def test_a_cancel_ends_what_a_request_waits_for() -> None:
    journal = Journal()
    entry = journal.open(request(), "m", 0.0)
    work = entry.wait.work = asyncio.get_running_loop().create_future()
    assert journal.cancel("r") and work.cancelled() and entry.cancelled


@pytest.mark.parametrize("key_id", ["", "0a1b2c3d"])
def test_a_request_of_another_api_key_is_one_that_nobody_knows(key_id: str) -> None:
    journal = Journal()
    entry = journal.open(GenerateRequest("r", (1,), 9, key_id=key_id), "m", 0.0)
    assert not journal.cancel("r", "ffffffff") and not entry.cancelled
    assert journal.cancel("r", key_id) and entry.cancelled
    journal.close(entry, "cancelled", 1.0)
    assert [one.request_id for one in journal.history.recent(9, key_id)] == ["r"]
    assert not journal.history.recent(9, "ffffffff")
    assert not journal.cancel("unknown")


def scores(first: int, stop: int) -> PromptLogprobs:
    return PromptLogprobs(tuple(PromptLogprob(index, -0.1 * index) for index in range(first, stop)))


def test_what_was_told_of_a_prompt_is_not_told_again_after_a_resumption() -> None:
    entry = Journal().open(GenerateRequest("r", tuple(range(9)), 0, prompt_logprobs=2), "m", 0.0)
    assert entry.accept_prompt(scores(1, 4)) == scores(1, 4)
    assert entry.resumption(as_text=False).prompt_logprobs == 2, "some are missing: the next driver tells all of them"
    assert entry.accept_prompt(scores(1, 3)) is None
    assert entry.accept_prompt(scores(2, 6)) == scores(4, 6)
    with pytest.raises(TransportError, match="from prompt token 5 to 7"):
        entry.accept_prompt(scores(7, 9))
    assert entry.accept_prompt(scores(6, 9)) == scores(6, 9)
    assert entry.resumption(as_text=False).prompt_logprobs is None, "none are missing"


def test_an_answer_under_a_key_is_told_again_with_its_prompt() -> None:
    journal = Journal()
    keyed = GenerateRequest("r", (1, 2, 3), 0, key_hash=b"k" * 32, fingerprint=b"f" * 32, prompt_logprobs=0)
    end = TokenEvent(0, None, finish=FinishReason.LENGTH)
    first = journal.open(keyed, "m", 0.0)
    assert first.replay() == []
    first.accept_prompt(scores(1, 3))
    assert first.accept(end)
    journal.close(first, "length", 1.0)
    assert journal.open(keyed, "m", 2.0).replay() == [scores(1, 3), end]


def test_what_lacks_a_part_of_its_prompt_is_computed_again() -> None:
    """As after a ring that ended between the two."""
    journal = Journal()
    keyed = GenerateRequest("r", (1, 2, 3), 4, key_hash=b"k" * 32, fingerprint=b"f" * 32, prompt_logprobs=0)
    first = journal.open(keyed, "m", 0.0)
    first.accept_prompt(scores(1, 2))
    journal.close(first, "stage_lost", 1.0)
    second = journal.open(keyed, "m", 2.0)
    assert second.replay() == [scores(1, 2)]
    assert second.resumption(as_text=False).prompt_logprobs == 0
    assert second.accept_prompt(scores(1, 3)) == scores(2, 3)


def test_a_cancel_of_a_request_ends_all_its_choices() -> None:
    journal = Journal()
    choices = [journal.open(one, "m", 0.0) for one in fan_out(request("r"), 3)]
    other = journal.open(request("x"), "m", 0.0)
    assert journal.cancel("r-1")
    assert [entry.cancelled for entry in choices] == [False, True, False], "one of them has an id of its own"
    assert journal.cancel("r")
    assert all(entry.cancelled for entry in choices)
    assert not other.cancelled
    assert not journal.cancel("nobody")


class Bridge:
    """One id for each character."""

    def respelling(self, pieces: Sequence[TextPiece]) -> Respelling:
        return Respelling(tuple(ord(character) for character in text_of(pieces)))

    def pieces_of(self, token_ids: Sequence[int]) -> tuple[TextPiece, ...]:
        return (TextPiece("text", "".join(map(chr, token_ids))),)


def of_both_kinds() -> GenerateRequest:
    return replace(request(), text=TextInput(b"{}"), bridge=Bridge())


def test_an_answer_of_a_model_server_continues_on_a_ring_as_token_ids() -> None:
    entry = Journal().open(of_both_kinds(), "m", 0.0)
    entry.resumption(as_text=True)
    for index, word in enumerate(("ab", "cde")):
        assert entry.accept(TokenEvent(index, None, piece=TextPiece("text", word)))
    onwards = entry.resumption(as_text=False)
    assert onwards.resume_ids == tuple(map(ord, "abcde")) and onwards.text is None
    assert [event.respelling for event in entry.take_respelling()] == [Respelling(onwards.resume_ids)]
    assert not entry.accept(TokenEvent(4, ord("e"))), "the client has it"
    assert entry.accept(TokenEvent(5, ord("f"))) and entry.num_output_tokens == 6
    with pytest.raises(TransportError, match="skipped"):
        entry.accept(TokenEvent(7, ord("h")))


class TakingBack(Bridge):
    """The last two characters are spelled again."""

    def respelling(self, pieces: Sequence[TextPiece]) -> Respelling:
        text = text_of(pieces)
        return Respelling(tuple(map(ord, text[:-2])), text[-2:], text[-2:])


def test_the_last_tokens_of_a_text_are_spelled_again_until_a_ring_has_done_so() -> None:
    entry = Journal().open(replace(of_both_kinds(), bridge=TakingBack()), "m", 0.0)
    entry.resumption(as_text=True)
    assert entry.accept(TokenEvent(0, None, piece=TextPiece("text", "abcd")))
    for _ in range(2):  # the first ring is lost before it has spelled both characters
        onwards = entry.resumption(as_text=False)
        assert (onwards.resume_ids, onwards.begins_with) == ((97, 98), "cd")
        (event,) = entry.take_respelling()
        assert event.respelling == Respelling((97, 98), "cd", "cd") and not entry.take_respelling()
        assert entry.accept(TokenEvent(2, ord("c")))
    assert entry.accept(TokenEvent(3, ord("d"))) and entry.accept(TokenEvent(4, ord("e")))
    third = entry.resumption(as_text=False)
    assert (third.resume_ids, third.begins_with) == (tuple(map(ord, "abcde")), "")
    assert not entry.take_respelling()
    as_text = entry.resumption(as_text=True)
    assert as_text.text is not None and text_of(as_text.text.begun) == "abcde"
    assert entry.accept(TokenEvent(len(as_text.text.begun), None, piece=TextPiece("text", "fg")))
    fourth = entry.resumption(as_text=False)
    assert (fourth.resume_ids, fourth.begins_with) == (tuple(map(ord, "abcde")), "fg")


def test_an_answer_of_a_ring_continues_on_a_model_server_as_text() -> None:
    entry = Journal().open(of_both_kinds(), "m", 0.0)
    entry.resumption(as_text=False)
    for index, character in enumerate("abc"):
        assert entry.accept(TokenEvent(index, ord(character)))
    onwards = entry.resumption(as_text=True)
    assert onwards.text is not None and onwards.text.begun == (TextPiece("text", "abc"),)
    assert (onwards.prompt_ids, onwards.resume_ids) == ((), ())
    assert entry.accept(TokenEvent(1, None, piece=TextPiece("text", "de")))
    back = entry.resumption(as_text=False)
    assert back.resume_ids == tuple(map(ord, "abcde"))


def test_without_a_tokenizer_an_answer_stays_with_its_kind_of_engine() -> None:
    entry = Journal().open(replace(of_both_kinds(), bridge=None), "m", 0.0)
    entry.resumption(as_text=True)
    entry.accept(TokenEvent(0, None, piece=TextPiece("text", "ab")))
    with pytest.raises(EngineError, match="no tokenizer"):
        entry.resumption(as_text=False)


def test_the_counts_of_an_engine_win_over_the_number_of_pieces() -> None:
    entry = Journal().open(of_both_kinds(), "m", 0.0)
    entry.resumption(as_text=True)
    entry.accept(TokenEvent(0, None, piece=TextPiece("text", "two tokens")))
    assert (entry.num_prompt_tokens, entry.num_output_tokens) == (3, 1)
    entry.accept(TokenEvent(1, None, finish=FinishReason.STOP, usage=TextUsage(9, 2)))
    assert (entry.num_prompt_tokens, entry.num_output_tokens) == (9, 2)


def test_a_beginning_that_the_client_sent_is_part_of_what_an_engine_continues() -> None:
    asked = replace(request(), text=TextInput(b"{}", begun=(TextPiece("text", "Once"),)))
    entry = Journal().open(asked, "m", 0.0)
    entry.resumption(as_text=True)
    assert entry.accept(TokenEvent(1, None, piece=TextPiece("text", " upon")))
    onwards = entry.resumption(as_text=True)
    assert onwards.text is not None and text_of(onwards.text.begun) == "Once upon"
