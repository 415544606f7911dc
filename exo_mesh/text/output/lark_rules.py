"""Collects the rules of one grammar in llguidance's Lark. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import InputError
from exo_mesh.text.grammars import MAX_BYTES, lark_of

_TOKEN = re.compile(r"<[^<>\s]+>")


class LarkRules:
    """Collects the rules of one grammar. tokens: texts that are one token of the model each, with the id or None.

    A marker that is one token of the model is written as `<marker>`, which matches only that token; other text is
    quoted.
    """

    def __init__(self, tokens: Collection[tuple[str, int | None]]) -> None:
        self._written = {
            text: text if token_id is None else f"<[{token_id}]>"
            for text, token_id in tokens
            if token_id is not None or _TOKEN.fullmatch(text)
        }
        longest_first = sorted(self._written, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: list[str] = []
        self._notes: list[str] = []
        self._size = 0
        self._schemas: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def literal(self, text: str) -> str:
        """An expression that matches exactly this text."""
        parts, at = [], 0
        for found in self._tokens.finditer(text):
            parts += [json.dumps(text[at : found.start()]), self._written[found.group()]]
            at = found.end()
        return " ".join(part for part in [*parts, json.dumps(text[at:])] if part != '""') or '""'

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._name("r", body)

    def terminal(self, body: str) -> str:
        """The name of a terminal, which is one regular expression; it may use `&` and `~`."""
        return self._name("T", body)

    def _name(self, prefix: str, body: str) -> str:
        if prefix + body not in self._names:
            self._size += len(body)
            if self._size > MAX_BYTES:
                raise InputError(
                    f"the grammar of the calls has more than {MAX_BYTES} bytes; use fewer or simpler tools"
                )
            name = self._names[prefix + body] = f"{prefix}{len(self._rules)}"
            self._rules.append(f"{name}: {body}")
        return self._names[prefix + body]

    def reserve(self) -> str:
        """The name of a rule whose body follows with `define`, so that it can use itself."""
        self._rules.append("")
        return f"r{len(self._rules) - 1}"

    def define(self, name: str, body: str) -> None:
        """Give a reserved rule its body."""
        self._rules[int(name[1:])] = f"{name}: {body}"

    def text(self, expression: str, end: str) -> str:
        """The name of a rule that matches a text of this regular expression, and `end`. No such text may contain the
        marker that `end` begins with, or has after white space."""
        if found := self._tokens.search(end):
            before, rest = json.dumps(end[: found.start()]), end[found.end() :]
            body = expression if before == '""' else f"({expression}) {before}"
            return self.rule(
                f"{self.terminal(body)} {self._written[found.group()]} {self.literal(rest) if rest else ''}"
            )
        return self.terminal(f"({expression}) {json.dumps(end)}")

    def text_until(self, end: str) -> str:
        """The name of a rule that matches any text up to and including the first `end`."""
        return self.text(any_text_without(end), end)

    def json(self, schema: dict[str, Any]) -> str:
        """The name of a rule that matches a JSON value of this schema."""
        text = json.dumps(schema)
        if text not in self._schemas:
            self._schemas[text] = self.rule(lark_of(GrammarSpec("json_schema", text)))
        return self._schemas[text]

    def grammar(self, start: str) -> GrammarSpec:
        """The complete grammar, with `start` as its start rule."""
        return GrammarSpec("lark", "\n".join([f"start: {start}", *self._rules, *self._notes]) + "\n")

    def note(self, text: str) -> None:
        """Add a comment at the end of the grammar."""
        self._notes.append(f"// {text}")


def in_regex(text: str) -> str:
    """The text in a regular expression of Lark."""
    return re.escape(text).replace("/", r"\/")


def any_text_without(marker: str) -> str:
    """An expression for any text that does not contain the marker."""
    return rf"/(?s:.*)/ & ~/(?s:.*){in_regex(marker)}(?s:.*)/"
