"""What a model can do, as its card, its architecture and its chat template say it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from exo_mesh.api.core.texts import TextModels
from exo_mesh.models.cards.card_store import shipped_cards
from exo_mesh.models.cards.profile import CapabilityProfile, TemplateFacts, resolve_profile
from exo_mesh.models.cards.toml_card import TomlCard, ToolingSection
from exo_mesh.models.profiles import facts_in
from exo_mesh.node.node import Node
from exo_mesh.text.rendering import CompiledTemplate
from exo_mesh.text.template import ChatTemplate
from tests.api.scripted_mesh import TemplatesRenderedHere
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.nodes import Machine, make_node, until
from tests.text.text_models import write_text_model

QWEN_TEMPLATE = "{% if tools %}…{% endif %}{% if enable_thinking is defined %}<think>{% endif %}"
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def of(model: str, template: str | None = None) -> CapabilityProfile:
    card = next(card for card in shipped_cards() if card.id == model)
    return resolve_profile(card.architecture or "", card, (template and TemplateFacts.of(template)) or None)


THINKS = {"supports_thinking": True, "supports_thinking_toggle": True}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-8B", {"family": "qwen", **THINKS, "thinking_format": "token_delimited",
                           "supports_tool_calling": True, "disabled_reasoning_effort": "none",
                           "prompt_renderer": "tokenizer", "output_parser": "generic", "tool_call_format": "generic"}),
        ("Qwen/Qwen3-4B-Instruct-2507", {"supports_thinking": False, "thinking_format": "none",
                                         "supports_tool_calling": True}),
        ("Qwen/Qwen3-4B-Thinking-2507", {"supports_thinking": True, "supports_thinking_toggle": False,
                                         "disabled_reasoning_effort": None}),
        ("google/gemma-3-4b-it", {"family": "gemma", "supports_thinking": False, "supports_image_input": True,
                                  "prompt_renderer": "tokenizer", "supports_tool_calling": False}),
        ("google/gemma-4-E4B-it", {**THINKS, "thinking_format": "channel_delimited", "supports_audio_input": True,
                                   "supports_native_multimodal": True, "prompt_renderer": "gemma4",
                                   "output_parser": "gemma4", "tool_call_format": "gemma4"}),
        ("openai/gpt-oss-20b", {"family": "gpt-oss", "supports_thinking": True, "supports_thinking_toggle": False,
                                "thinking_format": "channel_delimited", "default_reasoning_effort": "medium",
                                "output_parser": "gpt_oss", "tool_call_format": "gpt_oss",
                                "builtin_tools": ("browser", "python")}),
        ("deepseek-ai/DeepSeek-V3.2", {**THINKS, "prompt_renderer": "dsml", "output_parser": "deepseek_v32",
                                       "tool_call_format": "dsml", "supports_tool_calling": True}),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", {"supports_thinking": True, "supports_thinking_toggle": False}),
        ("meta-llama/Llama-3.2-1B-Instruct", {"family": "llama", "supports_thinking": False,
                                              "supports_tool_calling": True, "supports_image_input": False}),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", {**THINKS, "supports_thinking_budget": True}),
    ],
)  # fmt: skip
def test_shipped_cards_say_what_their_models_can(model: str, expected: dict[str, object]) -> None:
    profile = of(model)
    assert {name: getattr(profile, name) for name in expected} == expected


def test_the_template_says_it_for_a_model_without_a_card() -> None:
    thinking = resolve_profile("qwen3", None, TemplateFacts.of(QWEN_TEMPLATE))
    assert thinking.supports_thinking and thinking.supports_thinking_toggle and thinking.supports_tool_calling
    plain = resolve_profile("llama", None, TemplateFacts.of(PLAIN))
    assert plain == CapabilityProfile("llama") == resolve_profile("llama", None, None)


def test_a_template_for_tools_says_that_a_model_takes_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": QWEN_TEMPLATE}]
    for number, template in enumerate((PLAIN, named)):
        facts = facts_in(write_text_model(tmp_path / str(number), template))
        assert facts is not None and facts.tools == bool(number)


def tried(source: str, tool_use: str | None = None) -> TemplateFacts:
    def run(text: str) -> ChatTemplate:
        compiled = CompiledTemplate.compile(text, "test")
        made = ChatTemplate(text, "test", "0")
        return replace(made, variables=compiled.variables, traits=compiled.traits({}), is_tried=True)

    return TemplateFacts.tried(replace(run(source), tool_use=None if tool_use is None else run(tool_use)))


def test_what_a_template_did_counts_more_than_the_words_in_it() -> None:
    comment = PLAIN + "{# tools, enable_thinking and thinking_budget are not supported #}"
    refuses = PLAIN + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    hides = PLAIN + "{% if tools %} {% endif %}"
    for source in (comment, refuses, hides):
        assert TemplateFacts.of(source).tools and not tried(source).tools, source
    assert tried(comment) == tried(PLAIN) == TemplateFacts()
    shows = PLAIN + "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    assert tried(shows).tools and tried(PLAIN, shows).tools and not tried(shows, refuses).tools
    assert tried(PLAIN + "{% if enable_thinking is defined %}<think>{% endif %}").toggle
    assert tried(PLAIN + "{{ '' if '</think>' in messages[0].content }}").thinks, "it only removes thoughts"


async def test_the_list_takes_what_a_renderer_has_found_and_keeps_it(tmp_path: Path) -> None:
    model = tmp_path / "models" / "tiny"
    write_checkpoint(model, TinyModel(layers=2))
    (model / "chat_template.jinja").write_text(PLAIN + "{# tools are not supported #}")
    node = make_node(tmp_path / "a", "alone", Machine(), models_dirs=(tmp_path / "models",), context_limit=256)
    texts = TextModels(TemplatesRenderedHere())
    await node.start()
    try:
        await until(lambda: takes_tools(node))  # the words of the template
        await texts.of(node.models, await node.models.named("tiny"))
        assert not takes_tools(node)
        await node._models.profiles.learn()
        assert not takes_tools(node), "reading the disk again brings no guess back"
        node.models.note_template("gone", ChatTemplate("", "", "", is_tried=True))
    finally:
        await texts.close()
        await node.stop()


def takes_tools(node: Node) -> bool:
    profiles = [entry.profile for entry in node.models.all() if entry.name == "tiny"]
    return any(profile is not None and profile.supports_tool_calling for profile in profiles)


def test_a_section_of_the_card_wins_over_the_template_and_the_template_over_the_list() -> None:
    listed = TomlCard(id="a/b", capabilities=("text", "tools"))
    assert not resolve_profile("llama", listed, TemplateFacts.of(PLAIN)).supports_tool_calling
    assert resolve_profile("llama", listed, None).supports_tool_calling
    section = TomlCard(id="a/b", tooling=ToolingSection(supports_tool_calling=True))
    assert resolve_profile("llama", section, TemplateFacts.of(PLAIN)).supports_tool_calling


def test_it_is_shown_with_its_modalities() -> None:
    shown = of("google/gemma-3-4b-it").to_json()
    assert shown["modalities"]["input"] == ["text", "image"] and shown["thinking"]["supported"] is False
