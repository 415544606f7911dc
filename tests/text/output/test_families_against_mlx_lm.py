"""Each family of tool calls means the same here as to mlx-lm, which is where many of these models are first run."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.text.output.families.table import FAMILIES
from exo_mesh.text.output.formats import OutputFormat
from tests.text.output.family_calls import CALLS, TOOLS
from tests.text.output.outputs import parse

PACKAGE = "tool_parsers_of_mlx_lm"


def import_parsers() -> Path | None:
    """Make mlx-lm's parsers a package of their own: mlx_lm itself takes seconds to import. None if it is not there."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("regex") is None:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "tool_parsers"
    own = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert own is not None
    sys.modules[PACKAGE] = importlib.util.module_from_spec(own)
    return folder


FOLDER = import_parsers()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="mlx-lm is not installed")

MODULES = {
    "hermes": "json_tools",
    "glm47": "glm47",
    "longcat": "longcat",
    "qwen3_coder": "qwen3_coder",
    "minimax_m2": "minimax_m2",
    "minicpm5": "minicpm5",
    "muse_spark": "muse_spark",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "gemma4": "gemma4",
    "function_gemma": "function_gemma",
    "mistral": "mistral",
    "pythonic": "pythonic",
}


def cases() -> Iterator[Any]:
    for family in MODULES:
        for index, text in enumerate(CALLS[family]):
            yield pytest.param(family, text, id=f"{family}-{index}")


def by_mlx_lm(family: str, text: str) -> list[list[Any]]:
    """[name, arguments] of each call, section by section as mlx-lm's server cuts them."""
    module = importlib.import_module(f"{PACKAGE}.{MODULES[family]}")
    start, end = module.tool_call_start, module.tool_call_end
    tools = [tool.as_function() for tool in TOOLS]
    calls: list[list[Any]] = []
    for section in text.split(start)[1:]:
        found = module.parse_tool_call(section.partition(end)[0] if end else section, tools)
        calls += [[call["name"], call["arguments"]] for call in (found if isinstance(found, list) else [found])]
    return calls


@pytest.mark.parametrize(("family", "text"), list(cases()))
def test_a_call_means_what_mlx_lm_says(family: str, text: str) -> None:
    parsed = parse(OutputFormat(family, tool_family=family), text, tools=TOOLS)
    assert [[name, json.loads(arguments)] for name, arguments in parsed.calls] == by_mlx_lm(family, text)
    assert parsed.calls
    assert parsed.text == ""


def test_every_parser_of_mlx_lm_has_its_family_here() -> None:
    assert FOLDER is not None
    theirs = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "laguna"}
    assert theirs == set(MODULES.values()), "laguna is glm47 by another name"
    assert MODULES.keys() <= FAMILIES.keys()
