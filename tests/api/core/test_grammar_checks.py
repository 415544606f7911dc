"""Grammars are checked where a hostile one can do no harm."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from exo_mesh.api.core.templates import TemplateRenderer
from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import InputError


@pytest.fixture
async def renderer() -> AsyncIterator[TemplateRenderer]:
    renderer = TemplateRenderer()
    yield renderer
    await renderer.close()


async def test_a_sound_grammar_passes_and_another_is_refused(renderer: TemplateRenderer) -> None:
    await renderer.check_grammar(GrammarSpec("json_schema", '{"type": "object"}'))
    with pytest.raises(InputError, match='"not"') as caught:
        await renderer.check_grammar(GrammarSpec("json_schema", '{"not": {}}'), "tools")
    assert caught.value.param == "tools"
    with pytest.raises(InputError, match="surrogate"):
        await renderer.check_grammar(GrammarSpec("regex", "\udcff"))
    assert len(renderer.pids) == 1


@pytest.mark.extended
async def test_a_chain_of_rules_that_overflows_a_usual_stack_is_checked_like_others(renderer: TemplateRenderer) -> None:
    rules = "\n".join(f"a{i:x}:a{i + 1:x}" for i in range(10_000))
    await renderer.check_grammar(GrammarSpec("lark", f'start:a0\n{rules}\na2710:"z"'))
    links = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(2700)}
    await renderer.check_grammar(
        GrammarSpec("json_schema", json.dumps({"$defs": {**links, "2700": {}}, "$ref": "#/$defs/0"}))
    )
    assert len(renderer.pids) == 1, "the process has survived it"
