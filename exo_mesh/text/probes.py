"""Finds out what a chat template can do, by rendering small conversations with it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from exo_mesh.text.template import REASONING_KEYS, Message, TemplateTraits

Render = Callable[[Sequence[Message], Mapping[str, Any]], str | None]
"""Renders a conversation with further variables; None if the template refuses it."""

MAX_WRITTEN = 1 << 16
"""Most characters of `written`; a template writes some hundred for a small conversation."""

_SAID, _ASKED = "zq81said", "zq82asked"  # words that no template writes by itself
_TOOL, _KEY, _VALUE = "zq83tool", "zq84key", "zq85value"
_LONG_ID, _SHORT_ID = "call_zq86abcdefghijklmnop", "zq87abcde"
_ROLE = "zq88role"
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string", "description": "d"}}, "required": [_KEY]}
_TOOLS = [{"type": "function", "function": {"name": _TOOL, "description": "d", "parameters": _PARAMETERS}}]


def traits_of(render: Render) -> TemplateTraits:
    """Render the probes. A template that refuses the plainest conversation gets the default traits."""
    return _Probes(render).traits()


class _Probes:
    """The probes of one template. Later ones use the forms of content, arguments and ids that earlier ones found."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._part_roles: set[str] = set()
        self._text_arguments = False
        self._stand_alone = False
        self._long_ids = True
        self._written: dict[str, None] = {}

    def traits(self) -> TemplateTraits:
        judges = self._judges()
        if not self._shows_role("user"):
            return TemplateTraits(judges=judges, written=self._all_written())
        system = self._shows_role("system")
        assistant = self._message("assistant", "yes")
        self._shows_role("assistant")
        shows_calls, shows_results = self._find_forms_of_calls()
        user = self._message("user", _ASKED)
        late = [user, assistant, self._message("system", _SAID), user]
        shows_tools = self._shows(_TOOL, [user], tools=_TOOLS)
        with_system = not shows_tools and self._shows(_TOOL, [self._message("system", _SAID), user], tools=_TOOLS)
        for is_on in (False, True):  # both forms of the generation prompt, for `written`
            self._text([user], enable_thinking=is_on, thinking=is_on)
        return TemplateTraits(
            shows_system=system,
            shows_late_system=system and self._shows(_SAID, late),
            knows_developer=self._knows_developer(),
            judges=judges,
            part_roles=frozenset(self._part_roles),
            takes_image_parts=self._takes_image_parts(),
            shows_tools=shows_tools or with_system,
            tools_need_system=with_system,
            shows_calls=shows_calls,
            shows_results=shows_results,
            calls_stand_alone=self._stand_alone,
            takes_text_arguments=self._text_arguments,
            takes_long_ids=self._long_ids,
            reasoning_key=self._reasoning_key(),
            written=self._all_written(),
        )

    def _shows_role(self, role: str) -> bool:
        """Whether the content of this role is shown, as a string or else as parts."""
        before = [] if role in ("user", "system") else [self._message("user", _ASKED)]
        after = [] if role == "user" else [self._message("user", _ASKED)]
        if self._shows(_SAID, [*before, {"role": role, "content": _SAID}, *after]):
            return True
        if self._shows(_SAID, [*before, {"role": role, "content": [_text_part(_SAID)]}, *after]):
            self._part_roles.add(role)
            return True
        return False

    def _find_forms_of_calls(self) -> tuple[bool, bool]:
        """Find the form of arguments and ids, and of results, with which most is shown. Returns whether calls and
        whether results are shown."""
        best, best_form, best_parts = (False, False, False), (False, True, False), False
        either = (False, True)
        for as_parts, is_alone, is_short, is_text, tools in product(either, either, either, either, (None, _TOOLS)):
            self._stand_alone, self._long_ids, self._text_arguments = form = is_alone, not is_short, is_text
            made = self._text(self._called([_text_part(_SAID)] if as_parts else _SAID), tools=tools) or ""
            # Python's form of an object, and a string that was quoted once more, are no JSON
            is_json = f"'{_KEY}'" not in made and f'\\"{_KEY}' not in made
            seen = (_VALUE in made, _SAID in made, _VALUE in made and is_json)
            if sum(seen) > sum(best):
                best, best_form, best_parts = seen, form, as_parts
            if all(best):
                break
        self._stand_alone, self._long_ids, self._text_arguments = best_form
        self._part_roles |= {"tool"} if best_parts else set()
        return best[0], best[1]

    def _called(self, result: Any) -> list[Message]:
        """A call and its result, in the form that is tried."""
        call_id = _LONG_ID if self._long_ids else _SHORT_ID
        arguments: Any = f'{{"{_KEY}": "{_VALUE}"}}' if self._text_arguments else {_KEY: _VALUE}
        calls = [{"id": call_id, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}]
        return [
            self._message("user", _ASKED),
            {**self._message("assistant", ""), "tool_calls": calls, **({"content": None} if self._stand_alone else {})},
            {"role": "tool", "content": result, "tool_call_id": call_id, "name": _TOOL},
        ]

    def _knows_developer(self) -> bool:
        """Whether the role developer gets another treatment than a role that no template can know."""
        messages = [self._message("developer", _SAID), self._message("user", _ASKED)]
        made = self._text(messages)
        other = self._text([{**messages[0], "role": _ROLE}, messages[1]])
        if made is None or _SAID not in made:
            return False
        return other is None or made.replace("developer", _ROLE) != other.replace("developer", _ROLE)

    def _judges(self) -> bool:
        made = self._text([self._message("query", _SAID), self._message("document", _ASKED)]) or ""
        return _SAID in made and _ASKED in made

    def _takes_image_parts(self) -> bool:
        words = [_text_part(_SAID)]
        plain = self._text([{"role": "user", "content": words}])
        if plain is None or _SAID not in plain or "'type'" in plain or '"type"' in plain:
            return False
        image = self._text([{"role": "user", "content": [{"type": "image"}, *words]}])
        return image is not None and _SAID in image and image != plain

    def _reasoning_key(self) -> str:
        """The field in which the template looks for earlier reasoning."""
        user, said = self._message("user", _ASKED), self._message("assistant", "yes")
        called = self._called("no")
        for key in REASONING_KEYS:
            histories = ([user, {**said, key: _SAID}], [called[0], {**called[1], key: _SAID}, called[2]])
            if any(self._shows(_SAID, history) for history in histories):
                return key
        return REASONING_KEYS[0]

    def _message(self, role: str, text: str) -> Message:
        return {"role": role, "content": [_text_part(text)] if role in self._part_roles else text}

    def _shows(self, word: str, messages: Sequence[Message], **variables: Any) -> bool:
        return word in (self._text(messages, **variables) or "")

    def _text(self, messages: Sequence[Message], **variables: Any) -> str | None:
        made = self._render(messages, variables)
        if made is not None:
            self._written[made] = None
        return made

    def _all_written(self) -> str:
        return "\n".join(self._written)[:MAX_WRITTEN]


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
