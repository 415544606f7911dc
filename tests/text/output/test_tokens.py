"""An answer that comes token by token is taken apart like its text, also where markers are special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from exo_mesh.domain.request import FinishReason, TokenEvent
from exo_mesh.text.assembler import TextAssembler
from exo_mesh.text.output.events import ReasoningPart, TextPart
from exo_mesh.text.output.formats import HARMONY, OutputFormat
from exo_mesh.text.output.parser import OutputParser
from exo_mesh.text.tokenizer import TextModel
from tests.text.output.family_calls import CALLS, TOOLS
from tests.text.output.outputs import Parsed, joined, parse
from tests.text.text_models import byte_level, write_text_model

HARMONY_CALL = (
    "<|channel|>analysis<|message|>Grüße 🙂?<|end|><|start|>assistant<|channel|>commentary to=functions.ping "
    '<|constrain|>json<|message|>{"a": "日本"}<|call|>'
)


def text_model(directory: Path, markers: frozenset[str]) -> TextModel:
    write_text_model(directory)
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(markers)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return TextModel.open(directory)


def by_tokens(model: TextModel, output: OutputFormat, text: str, *, has_tools: bool) -> tuple[Parsed, OutputParser]:
    """The text as the tokens of the model, one event each. Checks that each token is in at most one part."""
    assembler = TextAssembler(model.detokenizer(output.markers(has_tools=has_tools)))
    parser = OutputParser(output, tools=TOOLS if has_tools else ())
    ids = model.encode_prompt(text)
    events = [parser.push(assembler.push(TokenEvent(index, token_id))) for index, token_id in enumerate(ids)]
    events.append(parser.push(assembler.push(TokenEvent(len(ids), None, finish=FinishReason.STOP))))
    flat = [event for some in events for event in some]
    indexes = [
        span.event.index for event in flat if isinstance(event, TextPart | ReasoningPart) for span in event.tokens
    ]
    assert indexes == sorted(set(indexes))
    return joined(flat), parser


@pytest.mark.parametrize("family", ["hermes", "gemma4", "mistral", "kimi_k2", "deepseek_v3"])
@pytest.mark.parametrize("are_tokens", [True, False])
def test_token_by_token(tmp_path: Path, family: str, are_tokens: bool) -> None:
    output = OutputFormat(family, "<think>", "</think>", family)
    markers = output.markers(has_tools=True) if are_tokens else frozenset()
    text = f"<think>\nGrüße 🙂\n</think>\n\n日本\n{CALLS[family][0]}"
    parsed, parser = by_tokens(text_model(tmp_path, markers), output, text, has_tools=True)
    assert parsed == parse(output, text, tools=TOOLS)
    assert parsed.text == "日本"
    assert parser.num_reasoning_tokens > 5


def test_harmony_token_by_token(tmp_path: Path) -> None:
    model = text_model(tmp_path, HARMONY.markers(has_tools=True))
    parsed, parser = by_tokens(model, HARMONY, HARMONY_CALL, has_tools=True)
    assert parsed == Parsed("", "Grüße 🙂?", [["ping", '{"a": "日本"}']], "tool_calls", "rc")
    assert parser.num_reasoning_tokens > 5


def test_without_tools_special_tokens_of_calls_are_hidden_as_ever(tmp_path: Path) -> None:
    output = OutputFormat("gemma4", "<|channel>", "<channel|>", "gemma4", "thought")
    model = text_model(tmp_path, output.markers(has_tools=True))
    parsed, _ = by_tokens(model, output, "<|channel>thought\nHm.<channel|>Yes.<|tool_call>", has_tools=False)
    assert parsed == Parsed("Yes.", "Hm.", [], "stop", "rt")
