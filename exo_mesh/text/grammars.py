"""Checks grammars that constrain answers, and translates them to Lark, the only form that drivers compile.

The syntax is llguidance's: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. llguidance is compiled
code that recurses over the client's grammar, deeper than a default stack allows: see `in_deep_stack`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import InputError
from exo_mesh.text.detokenizer import is_panic
from exo_mesh.text.json_schema import SchemaError, standard_schema

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_BYTES = 128 << 10
"""Largest text of a grammar. Checking the slowest grammar of this size that we found takes 0.5 s and 100 MB."""

MAX_CHOICES = 4096

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON has the fixed layout of `json.dumps`. With free white space a model may write spaces without end; with a fixed
layout the text between two values is known in advance, so it costs no laps of the ring."""

MAX_MESSAGE = 300
"""Most characters of an error of the library that a message quotes."""


def compile_limits() -> LLParserLimits:
    """Limits of one grammar, the same at the entry peer and the driver.

    They bound the states of the lexer (about 2 kB each) and the items of a step (20,000 take 1 ms on the driver's event
    loop). All other limits are the library's; with them the worst grammar that we found takes 1 s and 80 MB for one
    mask, once, in a thread of its own.
    """
    from llguidance import LLParserLimits  # imported on first use, so that a node starts without it

    return LLParserLimits(max_lexer_states=50_000, step_max_items=20_000, verbose_errors=False)


def check_in_this_stack(spec: GrammarSpec, param: str) -> None:
    """Check that a grammar can be enforced. Raises InputError that names the keyword which cannot be.

    It blocks for up to 0.5 s and needs a deep stack (`exo_mesh.base.deep_stack`). A grammar may still crash it, so
    `TemplateRenderer.check_grammar` runs it in a separate process.
    """
    from llguidance import LLMatcher

    lark = lark_text(spec, param)
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(lark, None, limits=compile_limits())
    except BaseException as exc:
        if not is_panic(exc):
            raise
        raise InputError("the grammar compiler failed on this grammar; use a simpler one", param=param) from exc
    if is_error:
        raise InputError(reason(spec, messages[0]), param=param)


def lark_text(spec: GrammarSpec, param: str = "response_format") -> str:
    """Translate a grammar to a complete Lark grammar. Raises InputError if its text does not fit its kind."""
    check_size(spec, param)
    return spec.text if spec.kind == "lark" else f"start: {lark_of(spec, param)}"


def lark_of(spec: GrammarSpec, param: str = "response_format") -> str:
    """Translate a grammar to an expression for the right-hand side of a Lark rule. Raises InputError if its text does
    not fit its kind."""
    check_size(spec, param)
    match spec.kind:
        case "json_schema":
            return "%json " + _written(_schema(spec.text, param), param)
        case "regex":
            from llguidance import regex_to_lark

            return f"/{regex_to_lark(spec.text, use_ascii='d')}/"
        case "choice":
            return f"({' | '.join(json.dumps(choice) for choice in _choices(spec.text, param))})"
        case "lark":
            return f"%lark {{\n{spec.text}\n}}"


def check_size(spec: GrammarSpec, param: str) -> None:
    """Raises InputError if the grammar is too large, or holds a NUL character or a lone surrogate."""
    try:
        size = len(spec.text) if len(spec.text) > MAX_BYTES else len(spec.text.encode())
    except UnicodeEncodeError as exc:
        raise InputError("the grammar contains a lone surrogate (U+D800 to U+DFFF)", param=param) from exc
    if size > MAX_BYTES:
        raise InputError(f"the grammar has {size} bytes; at most {MAX_BYTES} are allowed", param=param)
    if "\0" in spec.text:
        raise InputError("the grammar contains a NUL character", param=param)


def _schema(text: str, param: str) -> dict[str, Any]:
    schema = _json(text, "schema", param)
    if isinstance(schema, bool):  # in JSON Schema true allows every value and false allows none
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise InputError("the schema is not an object, true or false", param=param)
    try:
        return {**standard_schema(schema), "x-guidance": LAYOUT}
    except SchemaError as exc:
        raise InputError(f"the schema cannot be enforced because of {exc}", param=param) from exc
    except RecursionError as exc:
        raise InputError("the schema is nested too deeply", param=param) from exc


def _written(schema: dict[str, Any], param: str) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError as exc:  # 1e400
        raise InputError(f"the schema is not JSON: {exc}", param=param) from exc


def _choices(text: str, param: str) -> list[str]:
    choices = _json(text, "list of choices", param)
    if not (isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices)):
        raise InputError("the choices are not a non-empty list of strings", param=param)
    if len(choices) > MAX_CHOICES:
        raise InputError(f"there are {len(choices)} choices; at most {MAX_CHOICES} are allowed", param=param)
    return choices


def _json(text: str, what: str, param: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as exc:
        raise InputError(f"the {what} is nested too deeply", param=param) from exc
    except ValueError as exc:
        raise InputError(f"the {what} is not JSON: {exc}", param=param) from exc


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_KEYWORDS: tuple[tuple[str, str], ...] = (
    ("oneOf constraints are not supported", '"oneOf" whose alternatives are not known to exclude each other (use '
     '"anyOf", or a property that is another "const" in each)'),
    ("Unknown format", '"format"'),
    ("regex parse error", '"pattern"'),
    ("circular references", '"$ref" in a circle beside other keywords'),
    ("is not present in a registry", '"$ref" to another document'),
    ("Pointer", '"$ref"'),
    ("float range", '"minimum" and "maximum"'),
    ("integer range", '"minimum" and "maximum"'),
    ("multiple", '"multipleOf"'),
    ("patternProperties", '"patternProperties"'),
)  # fmt: skip
"""(part of an error of the library about a schema, the keywords that cause it)."""


def reason(spec: GrammarSpec, message: str) -> str:
    """Shorten an error of the library to one sentence; its other lines show the position in the text."""
    message = re.sub(r"^at \d+\(\d+\): ", "", message)
    detail = message.removeprefix("failed to compile JSON schema: ")
    if spec.kind == "json_schema" or detail != message:  # a Lark grammar can contain a schema, too
        return _of_schema(" ".join(re.split(r"\n +\d+ \| ", detail)[0].split())[:MAX_MESSAGE])
    first = " ".join(message.split()) if spec.kind == "regex" else message.partition("\n")[0]
    return f"the {spec.kind} grammar cannot be used: {first[:MAX_MESSAGE]}"


def _of_schema(detail: str) -> str:
    if found := re.match(r"Unimplemented keys: \[(.*?)\]", detail):
        return f"the schema has keywords that cannot be enforced: {found[1]}"
    if detail.startswith("recursion limit"):
        return "the schema is nested too deeply"
    for sign, keyword in _KEYWORDS:
        if sign in detail:
            return f"the schema cannot be enforced because of {keyword}: {detail}"
    return f"the schema cannot be enforced: {detail}"
