"""The format in which a model writes is found from its template, its architecture and its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from exo_mesh.models.cards.card_store import shipped_cards
from exo_mesh.models.cards.profile import resolve_profile
from exo_mesh.text.output.families.table import FAMILIES
from exo_mesh.text.output.formats import (
    HARMONY,
    PLAIN,
    format_of,
    prompt_starts_reasoning,
)
from tests.text.output.family_calls import TOOLS
from tests.text.output.outputs import parse

THINK = ("<think>", "</think>")
TEMPLATES: dict[str, tuple[str, str, tuple[str, str]]] = {
    "qwen3": ("<tools>{{ tools }}</tools><tool_call>{{ tool_call.name }}</think>", "hermes", THINK),
    "qwen2.5": ("{% if tools %}<tool_call>\n{{ tool_call.name }}\n</tool_call>{% endif %}", "hermes", ("", "")),
    "qwen3-coder": ("<tool_call>\n<function={{ tool_call.name }}>\n<parameter=", "qwen3_coder", ("", "")),
    "qwen3.5": ("{{ '<tool_call>\\n<function=' }}{{ '<think>\\n' }}</think>", "qwen3_coder", THINK),
    "deepseek-r1": ("<｜tool▁calls▁begin｜>{{ '<｜Assistant｜><think>\\n' }}</think>", "deepseek_v3", THINK),
    "deepseek-v3.2": ("<｜DSML｜function_calls></think>", "dsml", THINK),
    "glm-4.7": ("<tool_call>{function-name}<arg_key>{k}</arg_key></tool_call> </think>", "glm47", THINK),
    "minimax-m2": ("<minimax:tool_call><invoke name=</think>", "minimax_m2", THINK),
    "kimi-k2": ("<|tool_calls_section_begin|>", "kimi_k2", ("", "")),
    "seed-oss": ("<seed:tool_call>\n<function=</seed:think>", "seed_oss", ("<seed:think>", "</seed:think>")),
    "longcat": ("<longcat_tool_call></longcat_think>", "longcat", ("<longcat_think>", "</longcat_think>")),
    "magistral": ("[TOOL_CALLS][ARGS][THINK]x[/THINK]", "mistral", ("[THINK]", "[/THINK]")),
    "mistral": ("[TOOL_CALLS] [{{ tool_call.function }}]", "mistral", ("", "")),
    "llama3.1": ('"parameters": dictionary of argument name and its value <|python_tag|>', "llama3_json", ("", "")),
    "llama4": ("[func_name1(params_name1=params_value1)] <|python_start|>", "llama4_pythonic", ("", "")),
    "gemma4": ("<|tool_call>call: <|channel>thought\n<channel|>", "gemma4", ("<|channel>", "<channel|>")),
    "functiongemma": ("<start_function_call>call:", "function_gemma", ("", "")),
    "lfm2": ("<|tool_list_start|>{{ tools }}<|tool_list_end|>", "pythonic", ("", "")),
    "olmo3": ("<functions>{{ tools }}</functions><function_calls>", "olmo3", THINK),
    "granite3": ("<|tool_call|>{{ tools }}", "granite", ("", "")),
    "phi4-mini": ("<|tool|>{{ tools }}<|/tool|><|tool_call|><|/tool_call|>", "phi4", ("", "")),
    "nemotron-nano": ("<TOOLCALL>{{ tools }}</think>", "nemotron", THINK),
    "command-a": (
        "<|START_THINKING|><|END_THINKING|><|START_ACTION|><|START_RESPONSE|>",
        "command",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "minicpm5": ('<function name="x"><param name="y"></think>', "minicpm5", THINK),
    "smollm": ("{{ message.content }}", "", ("", "")),
}  # fmt: skip


@pytest.mark.parametrize("model", sorted(TEMPLATES))
def test_a_template_shows_its_family(model: str) -> None:
    source, family, thought = TEMPLATES[model]
    tokens = THINK if model == "olmo3" else ()
    output = format_of(source, "any", tokens)
    assert (output.tool_family, (output.reasoning_start, output.reasoning_end)) == (family, thought)
    assert not family or family in FAMILIES


def test_gpt_oss_is_known_by_template_or_architecture() -> None:
    assert format_of("<|start|>assistant<|channel|>final<|message|>", "", ()) == HARMONY
    assert format_of(None, "gpt_oss", ()) == HARMONY


def test_tokens_tell_where_the_template_does_not() -> None:
    assert format_of("{{ messages }}", "lfm2", ["<|tool_call_start|>"]).tool_family == "pythonic"
    kimi = format_of(None, "kimi_k3", ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"])
    assert kimi.tool_family == "kimi_k3"
    assert {"<|open|>", "<|sep|>"} <= kimi.markers(has_tools=False), "the tokens that its markers are made of"
    assert format_of(None, "llama", ["<s>", "</s>"]) == PLAIN


def test_markers_that_are_tokens_come_with_their_ids() -> None:
    output = format_of("<tool_call>{{ tool_call.name }}</think>", "qwen3", {"</think>": 7, "<tool_call>": 8, "<s>": 1})
    assert output.tokens == (("</think>", 7), ("<tool_call>", 8))
    assert output.markers(has_tools=False) == {"<think>", "</think>"}


@pytest.mark.parametrize(
    ("prompt", "starts"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|Assistant|><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("what is <think>?<|im_end|>", False),
    ],
)
def test_a_prompt_that_opens_the_thought(prompt: str, starts: bool) -> None:
    assert prompt_starts_reasoning(format_of("</think>", "qwen3", ()), prompt) is starts
    assert not prompt_starts_reasoning(PLAIN, prompt)


def test_gemmas_thought_begins_with_its_channel() -> None:
    gemma = format_of(None, "gemma4", ())
    assert prompt_starts_reasoning(gemma, "<|turn>model\n<|channel>thought\n")
    text = "<|channel>thought\nHm.<channel|>Yes."
    assert parse(gemma, text) == parse(gemma, "Hm.<channel|>Yes.", starts_in_reasoning=True)
    assert parse(gemma, text).reasoning == "Hm."


def test_the_shipped_cards_agree_with_the_formats() -> None:
    families = {"gpt_oss": "harmony", "gemma4": "gemma4", "deepseek_v32": "dsml"}
    seen = set()
    for card in shipped_cards():
        if card.runtime is not None and card.runtime.output_parser is not None:
            seen.add(card.runtime.output_parser)
    assert seen <= families.keys() | {"generic"}
    for architecture, family in families.items():
        profile = resolve_profile(architecture, None, None)
        assert profile.output_parser == architecture
        assert format_of(None, architecture, ()).tool_family == family


HEAD = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "text_part", "reasoning", "calls"),
    [
        (f"{HEAD}<|channel|>final<|message|>Yes.<|return|>", "Yes.", "Hm.", []),
        ("<|channel|>final<|message|>Yes.", "Yes.", "", []),
        ("Yes.", "Yes.", "", []),
        (
            f'{HEAD}<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{{"a": "<|x"}}<|call|>',
            "",
            "Hm.",
            [["ping", '{"a": "<|x"}']],
        ),
        (' to=functions.ping<|channel|>commentary<|message|>{"a": 1}<|call|>', "", "", [["ping", '{"a": 1}']]),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.ping"
            "<|message|>{}<|call|>",
            "I look.",
            "",
            [["ping", "{}"]],
        ),
        ("<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.",
         "One.\n\nTwo.", "", []),
        ("<|channel|>commentary to=functions.ping<|message|>no JSON<|call|>", "no JSON", "", []),
        ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", "", "1 + 1", []),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}", "", []),
        ("<|channel|>analysis<|message|>Hm<|en", "", "Hm", []),
        ("<|channel|>ana", "", "", []),
        ("<|channel|>final<|message|>", "", "", []),
    ],
)  # fmt: skip
def test_harmony(text: str, text_part: str, reasoning: str, calls: Sequence[list[str]]) -> None:
    parsed = parse(HARMONY, text, tools=TOOLS)
    assert (parsed.text, parsed.reasoning, parsed.calls) == (text_part, reasoning, calls)
    assert parsed.finish == ("tool_calls" if calls else "stop")


def test_the_markers_around_answers_are_dropped() -> None:
    command = format_of("<|END_THINKING|><|START_ACTION|><|START_RESPONSE|><|END_RESPONSE|>", "cohere2", ())
    text = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    assert parse(command, text).text == "Yes."
    hunyuan = format_of("</think>\n<answer>\n", "hunyuan", ())
    assert parse(hunyuan, "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>").text == "Yes."
