"""Models without a chat template of their own get prompts as they were trained on."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.text.built_in_templates import built_in_template
from exo_mesh.text.output.formats import format_of, prompt_starts_reasoning
from exo_mesh.text.rendering import CompiledTemplate

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "It's the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City"}},
            "required": ["city"],
        },
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "days": [1]}}}
CHAT: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Plan"}]
TURNS: list[dict[str, Any]] = [
    *CHAT,
    {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    {"role": "tool", "content": "rain", "tool_call_id": "c2"},
]
LONGER = [*TURNS, {"role": "assistant", "content": "Go."}, {"role": "user", "content": "Thanks"}]


def rendered(architecture: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    template = built_in_template(architecture)
    assert template is not None
    return CompiledTemplate.compile(template.source, template.where).render(messages, variables=variables)


def encode_by_mlx_lm(messages: list[dict[str, Any]], *, thinks: bool, tools: list[Any] | None) -> str:
    """What mlx-lm makes of the same messages, whose arguments are JSON texts there."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("mlx-lm is not installed")
    path = Path(spec.submodule_search_locations[0]) / "chat_templates" / "deepseek_v32.py"
    own = importlib.util.spec_from_file_location("deepseek_v32_of_mlx_lm", path)
    assert own is not None and own.loader is not None
    module = importlib.util.module_from_spec(own)
    sys.modules.setdefault("deepseek_v32_of_mlx_lm", module)
    own.loader.exec_module(module)
    theirs = json.loads(json.dumps(messages))
    for message in theirs:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    mode = "thinking" if thinks else "chat"
    return str(module.encode_messages(theirs, thinking_mode=mode, tools=tools))


@pytest.mark.extended
@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("messages", [CHAT, TURNS, LONGER, CHAT[1:]], ids=["chat", "tools", "longer", "user"])
def test_deepseek_is_prompted_as_by_mlx_lm(messages: list[dict[str, Any]], thinks: bool) -> None:
    tools = [TOOL] if messages[0]["role"] == "system" else None
    mine = rendered("deepseek_v32", messages, tools=tools, enable_thinking=thinks)
    assert mine == encode_by_mlx_lm(messages, thinks=thinks, tools=tools)


def test_deepseek_gets_calls_and_results_in_its_tags() -> None:
    prompt = rendered("deepseek_v32", TURNS, tools=[TOOL])
    assert prompt.startswith("<｜begin▁of▁sentence｜>Be brief.\n\n## Tools\n")
    assert '{"name": "weather", "description": "It\'s the weather."' in prompt
    assert prompt.endswith(
        "<｜User｜>Plan<｜Assistant｜><think>Hm.</think>Wait.\n\n<｜DSML｜function_calls>\n"
        + '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        * 2
        + "</｜DSML｜function_calls><｜end▁of▁sentence｜>\n\n<function_results>\n<result>sunny</result>\n"
        "<result>rain</result>\n</function_results>\n\n<think>"
    )
    assert prompt_starts_reasoning(format_of(None, "deepseek_v32", ["</think>"]), prompt)


def test_gemma_gets_declarations_calls_and_results() -> None:
    assert rendered("gemma4_text", TURNS, tools=[TOOL], enable_thinking=True) == (
        "<bos><|turn>system\n<|think|>\nBe brief."
        '<|tool>declaration:weather{description:<|"|>It\'s the weather.<|"|>,parameters:{'
        'properties:{city:{description:<|"|>City<|"|>,type:<|"|>STRING<|"|>}},required:[<|"|>city<|"|>],'
        'type:<|"|>OBJECT<|"|>}}<tool|><turn|>\n'
        "<|turn>user\nPlan<turn|>\n"
        '<|turn>model\nWait.<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:[1]}<tool_call|>'
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:[1]}<tool_call|>'
        '<|tool_response>response:weather{value:<|"|>sunny<|"|>}<tool_response|>'
        '<|tool_response>response:weather{value:<|"|>rain<|"|>}<tool_response|>'
    )


def test_gemma_that_shall_not_think_finds_its_thought_closed() -> None:
    prompt = rendered("gemma4", CHAT[1:])
    assert prompt == "<bos><|turn>user\nPlan<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    assert not prompt_starts_reasoning(format_of(None, "gemma4", ()), prompt)


def test_other_models_have_no_built_in_template() -> None:
    assert built_in_template("qwen3") is None
