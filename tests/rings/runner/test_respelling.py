"""An answer that came as text continues on a ring as if its model had written all of it, wherever the text was cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from exo_mesh.api.core.answer import ChoiceReader
from exo_mesh.api.core.bridge import AnswerBridge
from exo_mesh.api.core.preparing import PreparedChoice, PreparedRequest
from exo_mesh.domain.request import GenerateRequest, GrammarSpec, SamplingParams, TokenEvent
from exo_mesh.domain.whole.text_pieces import TextInput, TextPiece, text_of
from exo_mesh.rings.runner.grammars import Grammars
from exo_mesh.rings.serving.journal import Journal, JournalEntry
from exo_mesh.text.output.events import OutputEvent, ReasoningPart, TextPart
from exo_mesh.text.tokenizer import TextModel
from exo_mesh.wire.driver_codec import event_from_proto
from tests.support.held import MODEL_DIR, WOKEN, HeldRing, NoiseEngine
from tests.text.text_models import byte_fallback, byte_level

PROMPT = (1, 2, 3)
TEXT = 'Once, a "red" world! 17, 18, 191, 1919\n\n\n  do;  lower world, grüße €uro 日本語 🙂🙂, x'

Model = tuple[TextModel, Grammars]


def saved(make: Callable[[], Tokenizer] | None, directory: Path) -> Model:
    if make is None:
        directory = MODEL_DIR
    else:
        make().save(str(directory / "tokenizer.json"))
    return TextModel.open(directory), Grammars(directory, WOKEN.put)


@pytest.fixture(params=[None, byte_level, byte_fallback], ids=["demo", "byte_level", "byte_fallback"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return saved(request.param, tmp_path)


@pytest.fixture
def demo(tmp_path: Path) -> Model:
    return saved(None, tmp_path)


class Writer(NoiseEngine):
    """A model that writes these tokens after the prompt, and noise after any others."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__()
        self.token_ids = list(token_ids)

    def logits(self, held: Sequence[int]) -> np.ndarray:
        drawn = super().logits(held)
        output = list(held[len(PROMPT) :])
        if output == self.token_ids[: len(output)] and len(output) < len(self.token_ids):
            drawn[self.token_ids[len(output)]] += 100
        return drawn


class Client:
    """One answer on its way to a client: first as pieces of a model server, then as tokens of rings."""

    def __init__(self, model: Model, token_ids: Sequence[int], stop_id: int, **fields: object) -> None:
        self.text, self.grammars = model
        self.token_ids = token_ids
        greedy = SamplingParams(temperature=0)
        asked = GenerateRequest("r", PROMPT, len(token_ids), greedy, frozenset({stop_id}), text=TextInput(b"{}"))
        asked = replace(asked, bridge=AnswerBridge(self.text), **fields)  # type: ignore[arg-type]
        self.entry: JournalEntry = Journal().open(asked, "m", 0.0)
        prepared = PreparedRequest("r", "m", self.text, (PreparedChoice(asked),), (), self.text.output)
        self.reader = ChoiceReader(prepared)
        self.events: list[OutputEvent] = []

    def serve(self, *pieces: TextPiece) -> None:
        """A model server gives these pieces, and dies."""
        begun = self.entry.resumption(as_text=True).text
        assert begun is not None
        for index, piece in enumerate(pieces, len(begun.begun)):
            self._take([TokenEvent(index, None, piece=piece)])

    def ring(self, max_tokens: int = 10**6) -> None:
        """A ring continues the answer to its end, or dies after so many tokens."""
        request = self.entry.resumption(as_text=False)
        ring = HeldRing(engine=Writer(self.token_ids), grammars=self.grammars)
        events = [event_from_proto(event) for event in ring.ask(request).events]
        self._take(events[:max_tokens])

    def _take(self, events: Sequence[TokenEvent]) -> None:
        for event in [*self.entry.take_respelling(), *(one for one in events if self.entry.accept(one))]:
            if not self.reader.finished:
                self.events += self.reader.push(event)

    def written(self, kind: type[TextPart | ReasoningPart] = TextPart) -> str:
        return "".join(event.text for event in self.events if isinstance(event, kind))


def tokens_of(model: Model, text: str) -> tuple[list[int], int]:
    """The tokens with which a model writes a text, and the one with which it ends."""
    ids = model[0].encode_prompt(text)
    stop_id = next(iter(model[0].hidden_ids))
    return [*ids, stop_id], stop_id


def cuts(text: str) -> Iterator[int]:
    return iter(range(1, len(text) + 1))


def test_every_cut_of_a_text_continues_as_the_server_would_have(model: Model) -> None:
    ids, stop_id = tokens_of(model, TEXT)
    for cut in cuts(TEXT):
        client = Client(model, ids, stop_id)
        client.serve(TextPiece("text", TEXT[: cut // 2]), TextPiece("text", TEXT[cut // 2 : cut]))
        client.ring()
        assert client.written() == TEXT, (cut, TEXT[:cut])
        assert client.reader.finished and client.reader.num_tokens == len(ids) - 1 == client.entry.num_output_tokens


def test_a_ring_that_is_lost_while_it_spells_known_text_changes_nothing(demo: Model) -> None:
    ids, stop_id = tokens_of(demo, TEXT)
    for cut in (1, 8, 22, len(TEXT) - 4):
        for first in (1, 3, 9):
            client = Client(demo, ids, stop_id)
            client.serve(TextPiece("text", TEXT[:cut]))
            client.ring(first)
            client.ring(first)
            client.ring()
            assert client.written() == TEXT, (cut, first)


def test_a_server_continues_what_a_ring_wrote_after_another_server(demo: Model) -> None:
    ids, stop_id = tokens_of(demo, TEXT)
    for first, second in ((5, 30), (19, 20), (40, len(TEXT))):
        client = Client(demo, ids, stop_id)
        client.serve(TextPiece("text", TEXT[:first]))
        client.ring(9)
        begun = client.entry.resumption(as_text=True).text
        assert begun is not None
        text = text_of(begun.begun)
        assert TEXT.startswith(text)
        client.serve(TextPiece("text", TEXT[len(text) : max(second, len(text) + 1)]))
        client.ring()
        assert client.written() == TEXT


def test_every_cut_of_a_thought_and_its_answer_continues(demo: Model) -> None:
    thought, answer = "Count, then say 17, 18.", "It is 19, 191, 1919."
    ids, stop_id = tokens_of(demo, f"<think>\n{thought}\n</think>\n\n{answer}")
    for cut in cuts(thought + answer):
        client = Client(demo, ids, stop_id)
        pieces = [TextPiece("reasoning", thought[:cut]), TextPiece("text", answer[: max(0, cut - len(thought))])]
        client.serve(*(piece for piece in pieces if piece.text))
        client.ring()
        assert (client.written(ReasoningPart).rstrip(), client.written()) == (thought, answer), cut


def test_text_that_is_spelled_again_keeps_to_the_grammar_of_the_request(demo: Model) -> None:
    text = "19, 191, 1919"
    ids, stop_id = tokens_of(demo, text)
    for cut in cuts(text[:-1]):
        client = Client(demo, [*ids[:-1], 5], stop_id, grammar=GrammarSpec("regex", "[0-9]+(, [0-9]+){2}"))
        client.serve(TextPiece("text", text[:cut]))
        client.ring()
        assert client.written().startswith(text)
        assert set(client.written()) <= set("0123456789, ")
