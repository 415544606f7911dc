"""What a chat template can do is found by rendering with it, and never by what its source mentions."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import asdict

from exo_mesh.errors import InputError
from exo_mesh.text.rendering import CompiledTemplate
from exo_mesh.text.template import TemplateTraits
from tests.text.chat_templates import TEMPLATES

ONE_SYSTEM = {"shows_late_system": False, "takes_several_systems": False}
PLAIN = {"shows_tools": False, "shows_calls": False}


def traits(source: str) -> TemplateTraits:
    return CompiledTemplate.compile(source, "test").traits({"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", PLAIN),
        ("trims", PLAIN),
        ("parts", {**PLAIN, "part_roles": {"user", "system", "assistant", "tool"}, "takes_image_parts": True,
                   "judges": False}),
        ("parts of the user", {**PLAIN, "part_roles": {"user"}}),
        ("no system", {**PLAIN, "shows_system": False, **ONE_SYSTEM, "shows_results": False,
                       "judges": False}),
        ("hides system", {**PLAIN, "shows_system": False, **ONE_SYSTEM}),
        ("hides late system", {**PLAIN, **ONE_SYSTEM, "shows_results": False, "judges": False}),
        ("tools", {}),
        ("text arguments", {"takes_text_arguments": True}),
        ("prints arguments", {"takes_text_arguments": True}),
        ("calls stand alone", {"calls_stand_alone": True, "takes_text_arguments": True}),
        ("refuses both", {"reasoning_key": "thinking"}),
        ("tools beside system", {"tools_need_system": True}),
        ("short ids", {"takes_any_ids": False, **ONE_SYSTEM, "judges": False}),
        ("needs names", {}),
        ("thinks", {**PLAIN, "reasoning_key": "thinking"}),
        ("developer", {**PLAIN, "knows_developer": True}),
        ("first call", {"takes_several_calls": False}),
        ("one call", {"takes_several_calls": False}),
        ("calls or text", {"hides_text_of_calls": True}),
        ("last system", {**PLAIN, **ONE_SYSTEM, "shows_results": False,
                         "judges": False}),
        ("first instructions", {**PLAIN, **ONE_SYSTEM,
                                "shows_results": False, "judges": False, "knows_developer": True}),
        ("no short ids", {"takes_any_ids": False, **ONE_SYSTEM,
                          "judges": False}),
        ("loops over tools", {"needs_tools": True}),
        ("deepseek v3.2", {"knows_developer": True, "judges": False}),
        ("gemma 4", {}),
    ],
)  # fmt: skip
def test_the_habits_of_a_template_are_seen_in_what_it_writes(name: str, expected: dict[str, Any]) -> None:
    found = asdict(traits(TEMPLATES[name]))
    assert found.pop("written")
    usual = asdict(TemplateTraits())
    usual.pop("written")
    assert found == {**usual, **expected}


def test_letters_in_a_comment_say_nothing() -> None:
    words = "{# name system developer tools tool_calls tool_call_id image reasoning_content 'image' is string #}"
    assert traits(words + TEMPLATES["chatml"]) == traits(TEMPLATES["chatml"])


def test_a_template_that_refuses_all_keeps_the_usual_traits() -> None:
    assert traits("{{ raise_exception('never') }}") == TemplateTraits(judges=False)


def test_probes_end_within_their_limit_together() -> None:
    times = iter(range(10**6))
    source = "{% for i in range(99) %}{% endfor %}" + TEMPLATES["chatml"]
    compiled = CompiledTemplate.compile(source, "test")
    with pytest.raises(InputError, match="too long"):
        compiled.traits({}, limit_s=1000.0, clock=lambda: float(next(times)))
