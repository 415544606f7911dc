"""Chat templates: where they are found, what they render, and that a hostile one can do nothing but fail."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.errors import InputError, ModelError
from exo_mesh.text.rendering import CompiledTemplate
from exo_mesh.text.template import MAX_SOURCE, ChatTemplate, find_template

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi {there: {you 100%}}"}]


def render(source: str, messages: list[dict[str, Any]] = HI, **options: Any) -> str:
    return CompiledTemplate.compile(source, "test").render(messages, **options)


ROLES = str([message["role"] for message in HI]) + "A" + str(list("b")).upper()

NESTED = """{% set n = namespace(a=[1], b=[1]) %}{% for i in range(99) %}
{% set n.a = [n.a, n.a] %}{% set n.b = (n.b, n.b) | list %}{% endfor %}"""
"""Two lists of 2**99 ones each, in 99 objects."""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content }}", "Hi {there: {you 100%}}"),
        ("{{ messages[0]['content'].split('{')[0] | trim }}", "Hi"),
        ("{{ messages | tojson }}", json.dumps(HI)),
        ("{{ {'é': '<'} | tojson(indent=1) }}", '{\n "é": "<"\n}'),
        ("{% for m in messages %}{{ loop.index0 }}{{ loop.length }}{{ loop.last }}{% break %}{% endfor %}", "01True"),
        ("{% for x in [1, 2, 3] if x > 1 %}{{ x }}{% else %}none{% endfor %}", "23"),
        ("{% for x in nothing %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% set ns = namespace(n=1) %}{% for i in range(3) %}{% set ns.n = ns.n * 2 %}{% endfor %}{{ ns.n }}", "8"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a' ~ 1) }}", "<a1>"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2030"),
        ("{% if tools %}tools{% endif %}{{ extra is defined }}", "False"),
        ("{% set a, b = (1, [2]) %}{% for x, y in {a: b}.items() %}{{ x }}{{ y }}{% endfor %}", "1[2]"),
        ("{{ [1, 2] | sum }} {{ [{'n': 1}, {'n': 2}] | sum(attribute='n', start=0.5) }}", "3 3.5"),
        ("{{ messages | map(attribute='role') | list }}{% filter upper %}a{{ 'b' | list }}{% endfilter %}", ROLES),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{{ '%s and %05d' % ('x', 7) }} {{ '{:>4}'.format(1) }}", "x and 00007    1"),
    ],
)
def test_what_templates_of_the_hub_use(source: str, text: str) -> None:
    assert render(source, now=lambda: datetime(2030, 1, 2, tzinfo=UTC)) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('not like this') }}",
        "{{ missing.field }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content.x }}",
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ range(99999) | join('a' * 4000) }}",
        "{{ ('a' * 4000000).replace('a', 'a' * 4000000) }}",
        "{{ ('a' * 4000000) | replace('a', 'a' * 4000000) }}",
        "{{ 'a' | indent(10**9, true) }}",
        "{{ {} | tojson(indent=10**9) }}",
        "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
        "{% set n = namespace(s=3) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for i in range(99999) %}" + "x" * 99 + "{% endfor %}",
        "{{ range(10**7) }}",
        "{{ ([[1] * 40] * 30000) | sum(start=[]) | length }}",
        "{{ ([[1] * 40000] * 40000) | sort | length }}",
        "{% set a = namespace(x=1) %}{% set b = namespace(x=a, y=a) %}{{ b }}",
        "{{ ('a' * 4000000) " + "| list | string " * 9 + "}}",
        "{{ ['a' * 4000000] | map('list') " + "| map('string') | map('list') " * 9 + "| list }}",
    ],
)
def test_a_template_that_fails_is_an_input_error(source: str) -> None:
    with pytest.raises(InputError) as caught:
        render(source, limit_s=2.0)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "source",
    [
        NESTED + "{{ n.a }}",
        NESTED + "{{ n.a == n.b }}",
        NESTED + "{{ n.a | tojson }}",
        "{% set n = namespace() %}{% for i in range(99) %}{% set n.a = {'x': n.a, 'y': n.a} %}{% endfor %}",
    ],
)
def test_what_is_small_and_takes_for_ever_is_ended_in_time(source: str) -> None:
    with pytest.raises(InputError, match="runs too long") as caught:
        render(source, limit_s=0.3)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_ended(source: str) -> None:
    """With a clock that jumps a second whenever it is looked at."""
    times = iter(range(10**9))
    with pytest.raises(InputError, match=r"runs too long|recurses"):
        render(source, limit_s=50.0, clock=lambda: float(next(times)))


def test_the_message_of_the_template_reaches_the_caller() -> None:
    with pytest.raises(InputError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source", ["{% for", "{{ ", "{% unknown %}", "{{ x | nofilter }}", "{{ " + "(" * 5000, "{{ 'a'|center }}"]
)
def test_what_is_no_template_names_its_file(source: str) -> None:
    with pytest.raises(ModelError, match="here"):
        CompiledTemplate.compile(source, "here")


def test_the_names_that_a_template_reads() -> None:
    source = "{% set x = 1 %}{% if enable_thinking %}{{ messages }}{{ x }}{% endif %}"
    variables = CompiledTemplate.compile(source, "").variables
    assert {"enable_thinking", "messages"} <= variables
    assert "x" not in variables


def test_a_template_that_reads_thousands_of_names_is_refused() -> None:
    with pytest.raises(ModelError, match=r"here.*2000 variables"):
        CompiledTemplate.compile("".join(f"{{{{ x{i} }}}}" for i in range(2000)), "here")


def test_a_template_that_is_too_long_is_refused_before_anybody_compiles_it() -> None:
    with pytest.raises(ModelError, match=r"here.*characters"):
        ChatTemplate.found("x" * (MAX_SOURCE + 1), "here")


@pytest.mark.parametrize(
    ("content", "end"), [("Once upon", "Once upon"), ("  Once upon ", "Once upon "), ("Once\n", "Once\n")]
)
def test_continuing_the_final_message_ends_inside_it(content: str, end: str) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</end>\n{% endfor %}"
    messages = [*HI, {"role": "assistant", "content": content}]
    text = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith(end)
    assert text.count("</end>") == 1


def test_continuing_a_message_that_the_template_hides_is_refused() -> None:
    with pytest.raises(InputError, match="does not show the text"):
        render("x", [{"role": "assistant", "content": "Once"}], continue_final_message=True)


def test_where_the_template_for_tools_is_found(tmp_path: Path) -> None:
    def found(config: dict[str, Any]) -> tuple[str, str | None]:
        template = find_template(tmp_path, config)
        assert template is not None
        return template.source, template.tool_use.source if template.tool_use else None

    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}, {"name": "rag"}]
    assert found({"chat_template": "plain"}) == ("plain", None)
    assert found({"chat_template": named}) == ("d", "t")
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert found({"chat_template": named}) == ("from jinja", None)
    (tmp_path / "additional_chat_templates.tool_use.jinja").write_text("fetched")
    assert found({"chat_template": named}) == ("from jinja", "fetched")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("in its folder")
    assert found({"chat_template": named}) == ("from jinja", "in its folder")
    (tmp_path / "chat_template.jinja").unlink()
    assert found({"chat_template": "plain"}) == ("plain", "in its folder")


def test_where_a_template_is_found(tmp_path: Path) -> None:
    def found(config: dict[str, Any]) -> str | None:
        template = find_template(tmp_path, config)
        return template.source if template else None

    assert found({}) is None
    assert found({"chat_template": "plain"}) == "plain"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert found({"chat_template": named}) == "d"
    with pytest.raises(ModelError, match=r'\["tool_use"\]'):
        found({"chat_template": named[:1]})
    with pytest.raises(ModelError, match="7, not a string"):
        found({"chat_template": 7})
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert found({"chat_template": "plain"}) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert found({"chat_template": "plain"}) == "from jinja"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="not UTF-8 text"):
        found({})
