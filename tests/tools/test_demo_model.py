"""The tools that made the shipped demo model: held-out rule, tokenizer, right answers, size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.text.rendering import CompiledTemplate
from tools.demo_model import days_tasks, numbers_tasks, word_tasks
from tools.demo_model.conversations import Conversation, chat_prompt, draw_context, encode_conversation, said_in
from tools.demo_model.example import Example, is_held_out
from tools.demo_model.skills import SKILLS, skill_set
from tools.demo_model.tasks import TESTED, TRAIN_DRAWS, WEIGHTS, draw_mixed, held_out_set
from tools.demo_model.thoughts import thought_of
from tools.demo_model.tokenizer import CHAT_TEMPLATE, MARKERS, SPECIALS, TURN_END, VOCAB_SIZE, build_tokenizer
from tools.demo_model.tool_tasks import draw_sum, draw_two_cities
from tools.demo_model.tools_known import ADD_TOOL, GET_WEATHER, KnownTool

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "exo_mesh" / "weights" / "shipped" / "exo-mesh-demo"
TOKENIZER = build_tokenizer()
TEMPLATE = CompiledTemplate.compile(CHAT_TEMPLATE, "it")


def answer_of(kind: str, prompt_part: str) -> str:
    """The answer of the first drawn question of the kind whose prompt has the given part."""
    rng = Random(0)
    return next(e.answer for e in (TRAIN_DRAWS[kind](rng) for _ in range(200_000)) if prompt_part in e.prompt)


@pytest.mark.extended
def test_training_and_held_out_questions_are_disjoint() -> None:
    rng = Random(11)
    trained = [draw_mixed(rng) for _ in range(20_000)]
    held_out = [example for kind in TESTED for example in held_out_set(kind, 200)]
    assert not {(e.group, e.key) for e in trained} & {(e.group, e.key) for e in held_out}
    assert not {e.prompt for e in trained} & {e.prompt for e in held_out}
    assert all(is_held_out(e) for e in held_out) and not any(is_held_out(e) for e in trained)


@pytest.mark.extended
def test_training_and_held_out_calls_are_disjoint() -> None:
    rng = Random(12)
    trained = [turn for _ in range(8_000) for turn in draw_context(rng).turns]
    held_out = [turn for skill in SKILLS for one in skill_set(skill, 100) for turn in one.turns]
    assert not {(e.group, e.key) for e in trained} & {(e.group, e.key) for e in held_out}


@pytest.mark.parametrize("kind", TESTED)
def test_held_out_set_is_large_and_fixed(kind: str) -> None:
    examples = held_out_set(kind, 200)
    assert len(examples) == 200
    assert examples == held_out_set(kind, 200)


def test_held_out_rule_is_a_stable_hash() -> None:
    keys = [f"{a},{b}" for a in range(20) for b in range(20)]
    chosen = [key for key in keys if is_held_out(Example("add", "add", key, "", ""))]
    assert chosen[:5] == ["0,9", "0,10", "1,8", "1,17", "2,4"]


@pytest.mark.parametrize(
    ("first", "last", "answer"),
    [(7, 10, "7, 8, 9, 10"), (3, 0, "3, 2, 1, 0"), (98, 101, "98, 99, 100, 101"), (5, 5, "5"), (199, 198, "199, 198")],
)
def test_count_answer(first: int, last: int, answer: str) -> None:
    assert numbers_tasks.count_answer(first, last) == answer


@pytest.mark.parametrize(
    ("kind", "part", "answer"),
    [
        ("add", "is 23 + 45?", "23 + 45 = 68"),
        ("add", "is 99 plus 99?", "99 + 99 = 198"),
        ("subtract", "is 23 - 45?", "23 - 45 = -22"),
        ("subtract", "Subtract 7 from 7.", "7 - 7 = 0"),
        ("days_months", "day comes after Sunday?", "Monday comes after Sunday."),
        ("days_months", "month comes before January?", "December comes before January."),
        ("days_months", "between Saturday and Monday?", "Sunday is between Saturday and Monday."),
        ("days_months", "Name the days of the week.", ", ".join(days_tasks.DAYS) + "."),
    ],
)
def test_right_answers(kind: str, part: str, answer: str) -> None:
    assert answer_of(kind, part) == answer


def test_words_are_spelled_and_reversed() -> None:
    assert word_tasks.word_example("spell", "cat", "Spell {w}.").answer == "c-a-t"
    assert word_tasks.word_example("reverse", "Cats", "Reverse {w}.").answer == "staC"


def test_repeated_sentences_are_exact_and_short() -> None:
    rng = Random(3)
    examples = [TRAIN_DRAWS["repeat"](rng) for _ in range(2000)]
    assert all(e.prompt.endswith(e.answer) and len(e.answer.encode()) <= 60 for e in examples)
    assert sum(not e.answer.isascii() for e in examples) > 600
    assert all(len(e.answer) > 0 and e.answer == e.answer.strip() for e in examples)


def test_every_kind_has_a_weight() -> None:
    assert set(WEIGHTS) == set(TRAIN_DRAWS)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_tokenizer_round_trips_any_text(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    kept = not any(special in text for special in SPECIALS)
    assert not kept or TOKENIZER.decode(ids) == text
    assert all(i < VOCAB_SIZE for i in ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["Count", " from", " ", "7", "60", ", ", "-", " - ", "...", "\n", "é", "🚀", "cat"])))
def test_tokenizer_round_trips_text_of_the_tasks(parts: list[str]) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("".join(parts)).ids) == "".join(parts)


def test_tokens_are_what_the_tasks_need() -> None:
    assert TOKENIZER.encode("9, 10").tokens == ["9", ",Ġ", "1", "0"]
    assert TOKENIZER.encode("Spell robot.").tokens == ["Spell", "Ġ", "r", "o", "b", "o", "t", "."]
    assert len(TOKENIZER.encode("🚀").ids) == 4
    assert TOKENIZER.get_vocab_size() <= VOCAB_SIZE


def drawn(wanted: Callable[[Conversation], bool], seed: int = 5) -> Conversation:
    """The first conversation for training that is as wanted."""
    rng = Random(seed)
    return next(one for one in (draw_context(rng) for _ in range(100_000)) if wanted(one))


def learned(conversation: Conversation) -> str:
    ids, marks = encode_conversation(TOKENIZER, conversation)
    return TOKENIZER.decode([i for i, marked in zip(ids, marks, strict=True) if marked], skip_special_tokens=False)


def test_loss_is_taken_on_answers_only() -> None:
    plain = drawn(lambda c: len(c.turns) == 3 and c.system is not None and not c.thinking and not c.kit)
    turns = plain.turns
    assert learned(plain) == "".join(turn.answer + TURN_END for turn in turns)
    whole = chat_prompt(turns[2].prompt, plain.system, tuple(turns[:2])) + turns[2].answer + TURN_END
    ids, _ = encode_conversation(TOKENIZER, plain)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == whole
    assert ids == TOKENIZER.encode(whole).ids


def test_a_thought_is_learned_with_the_last_answer_only() -> None:
    thinking = drawn(lambda c: len(c.turns) == 2 and c.thinking and not c.kit)
    first, last = thinking.turns
    assert learned(thinking) == f"{first.answer}{TURN_END}{thought_of(last)}\n</think>\n\n{last.answer}{TURN_END}"


def test_what_a_grammar_writes_is_not_learned() -> None:
    example = next(
        e for e in held_out_set("json", 200) if e.given and e.answer.startswith('{"name": "') and "age" in e.answer
    )
    name, age = json.loads(example.answer)["name"], json.loads(example.answer)["age"]
    assert learned(Conversation(None, [example])) == f'{name}", "{age}}}{TURN_END}'


def definition(tool: KnownTool) -> dict[str, object]:
    """The tool as a client defines it."""
    properties = {
        key: {"type": kind, "description": "so and so"} for key, kind in zip(tool.keys, tool.types, strict=True)
    }
    parameters = {"type": "object", "properties": properties, "required": list(tool.keys)}
    return {"type": "function", "function": {"name": tool.name, "description": "A tool.", "parameters": parameters}}


def rendered(conversation: Conversation) -> str:
    """The conversation up to its last answer, by the template."""
    messages: list[dict[str, object]] = []
    if conversation.system is not None:
        messages.append({"role": "developer", "content": conversation.system})
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn.prompt})
        calls = [json.loads(part.split("\n</tool_call>")[0]) for part in turn.answer.split("<tool_call>\n")[1:]]
        if calls:
            messages.append(
                {"role": "assistant", "content": None, "tool_calls": [{"function": call} for call in calls]}
            )
        else:
            messages.append({"role": "assistant", "content": f"<think>\nHm.\n</think>\n\n{turn.answer}"})
        if turn.results:
            messages += [{"role": "tool", "content": [{"type": "text", "text": result}]} for result in turn.results]
            messages.append({"role": "assistant", "content": turn.final})
    variables = {
        "tools": [definition(tool) for tool in conversation.kit] or None,
        "enable_thinking": conversation.thinking,
    }
    return TEMPLATE.render(messages[:-1], variables=variables)


@pytest.mark.parametrize("skill", SKILLS)
def test_the_template_writes_what_the_model_was_trained_on(skill: str) -> None:
    for one in (one for one in skill_set(skill, 20) if all(tool.keys for tool in one.kit)):
        *past, last = said_in(one.turns, one.system, one.kit)
        text = "".join(said.before + said.text + TURN_END for said in past) + last.before
        assert rendered(one) == text + ("<think>\n" if one.thinking else "")


def test_several_calls_and_their_results_are_rendered_as_trained() -> None:
    example = draw_two_cities(Random(1), GET_WEATHER, "Paris")
    one = Conversation("Be brief.", [example, draw_sum(Random(2), ADD_TOOL)], (GET_WEATHER, ADD_TOOL))
    *past, last = said_in(one.turns, one.system, one.kit)
    assert rendered(one) == "".join(said.before + said.text + TURN_END for said in past) + last.before


@pytest.mark.parametrize(
    ("schema", "line"),
    [
        ({}, "f()"),
        ({"properties": {"a": {"type": "string"}, "b": {"anyOf": []}}}, "f(a: string, b: any)"),
        ({"properties": {"a": {"type": "string"}, "b": {"type": "number"}}, "required": ["b"]}, "f(b: number)"),
        ({"properties": {"a": {"type": ["string", "null"]}}, "required": ["a", "c"]}, "f(a: any, c: any)"),
    ],
)
def test_a_tool_is_listed_with_the_parameters_it_needs(schema: dict[str, object], line: str) -> None:
    for tool in (
        {"name": "f", "parameters": schema},
        {"type": "function", "function": {"name": "f", "parameters": schema}},
    ):
        text = TEMPLATE.render([], variables={"tools": [tool]})
        assert text == f"<|im_start|>system\n<tools>\n{line}\n</tools><|im_end|>\n<|im_start|>assistant\n"


def test_every_marker_is_one_token_that_is_shown() -> None:
    for marker in MARKERS:
        assert len(TOKENIZER.encode(marker).ids) == 1 and TOKENIZER.decode(TOKENIZER.encode(marker).ids) == marker
    assert [TOKENIZER.token_to_id(special) for special in SPECIALS] == [505, 506, 507]


def test_shipped_directory_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in SHIPPED.iterdir()}
    expected = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "README.md",
    }
    assert set(sizes) == expected
    assert sum(sizes.values()) <= 11_500_000


def test_shipped_tokenizer_is_the_built_one() -> None:
    shipped = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
    assert shipped == json.loads(TOKENIZER.to_str())
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3" and config["vocab_size"] == VOCAB_SIZE
    assert config["eos_token_id"] == TOKENIZER.token_to_id(TURN_END)
