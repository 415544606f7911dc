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
_AGAIN, _OTHER = "zq89again", "zq90other"  # a second text, and a second value of an argument
_LONG_ID, _NINE_ID, _SHORT_ID = "call_zq86abcdefghijklmnop", "zq87abcde", "c1"
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
        self._call_id = _LONG_ID
        self._always: dict[str, Any] = {}  # variables without which the template refuses all
        self._written: dict[str, None] = {}
        self._num_written = 0

    def traits(self) -> TemplateTraits:
        is_shown = self._shows_user()
        judges = self._judges()
        if not is_shown:
            return TemplateTraits(judges=judges, written="\n".join(self._written))
        system = self._shows_role("system")
        self._shows_role("assistant")
        shows_calls, shows_results = self._find_forms_of_calls()
        takes_any_ids = self._takes_short_ids()
        user = self._message("user", _ASKED)
        knows_developer = self._knows_developer()
        shows_tools = self._shows(_TOOL, [user], tools=_TOOLS)
        with_system = not shows_tools and self._shows(_TOOL, [self._message("system", _SAID), user], tools=_TOOLS)
        for is_on in (False, True):  # both forms of the generation prompt, for `written`
            self._text([user], enable_thinking=is_on, thinking=is_on)
        return TemplateTraits(
            shows_system=system,
            shows_late_system=system and self._shows_both_systems(knows_developer, is_late=True),
            takes_several_systems=self._shows_both_systems(knows_developer, is_late=False),
            knows_developer=knows_developer,
            judges=judges,
            part_roles=frozenset(self._part_roles),
            takes_image_parts=self._takes_image_parts(),
            needs_tools=bool(self._always),
            shows_tools=shows_tools or with_system,
            tools_need_system=with_system,
            shows_calls=shows_calls,
            shows_results=shows_results,
            calls_stand_alone=self._stand_alone,
            hides_text_of_calls=shows_calls and not self._stand_alone and self._hides_text_of_calls(),
            takes_several_calls=not shows_calls or self._shows_both_calls(shows_results),
            takes_text_arguments=self._text_arguments,
            takes_any_ids=takes_any_ids,
            reasoning_key=self._reasoning_key(),
            written="\n".join(self._written),
        )

    def _shows_user(self) -> bool:
        """Whether a message of the user is shown, if necessary with a list of tools: some templates for tools refuse
        all else."""
        ways: tuple[dict[str, Any], ...] = ({}, {"tools": []}, {"tools": _TOOLS})
        for self._always in ways:
            if self._shows_role("user"):
                return True
        self._always = {}
        return False

    def _shows_both_systems(self, knows_developer: bool, *, is_late: bool) -> bool:
        """Whether two messages of the system, or of a developer, are shown: both at the start, or one of them late."""
        user = self._message("user", _ASKED)
        between = [user, self._message("assistant", "yes")] if is_late else []
        roles = [("system", "system"), *([("system", "developer"), ("developer", "system")] if knows_developer else [])]
        histories = [[self._message(a, _SAID), *between, self._message(b, _AGAIN), user] for a, b in roles]
        return all(self._shows_all((_SAID, _AGAIN), history) for history in histories)

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
        best, best_form, best_parts = (False, False, False), (False, _LONG_ID, False), False
        either, ids = (False, True), (_LONG_ID, _NINE_ID)
        for as_parts, is_alone, call_id, is_text, tools in product(
            either, either, ids, either, ({}, {"tools": _TOOLS})
        ):
            self._stand_alone, self._call_id, self._text_arguments = form = is_alone, call_id, is_text
            made = self._text(self._called([_text_part(_SAID)] if as_parts else _SAID), **tools) or ""
            # Python's form of an object, and a string that was quoted once more, are no JSON
            is_json = f"'{_KEY}'" not in made and f'\\"{_KEY}' not in made
            seen = (_VALUE in made, _SAID in made, _VALUE in made and is_json)
            if sum(seen) > sum(best):
                best, best_form, best_parts = seen, form, as_parts
            if all(best):
                break
        self._stand_alone, self._call_id, self._text_arguments = best_form
        self._part_roles |= {"tool"} if best_parts else set()
        return best[0], best[1]

    def _called(self, result: Any) -> list[Message]:
        """A call and its result, in the form that is tried."""
        calls = [self._call(self._call_id, _VALUE)]
        return [self._message("user", _ASKED), self._calling(calls), self._result(self._call_id, result)]

    def _call(self, call_id: str, value: str) -> dict[str, Any]:
        arguments: Any = f'{{"{_KEY}": "{value}"}}' if self._text_arguments else {_KEY: value}
        return {"id": call_id, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}

    def _calling(self, calls: Sequence[dict[str, Any]], text: str = "") -> Message:
        content = {"content": None} if self._stand_alone else {}
        return {**self._message("assistant", text), "tool_calls": calls, **content}

    def _result(self, call_id: str, content: Any) -> Message:
        return {"role": "tool", "content": content, "tool_call_id": call_id, "name": _TOOL}

    def _takes_short_ids(self) -> bool:
        """Whether a short id shows as much as the id that was found."""
        if self._call_id != _LONG_ID:
            return False
        histories = []
        for call_id in (_SHORT_ID, _LONG_ID):
            self._call_id = call_id
            made = self._text(self._called(self._message("tool", _SAID)["content"])) or ""
            histories.append((_VALUE in made, _SAID in made))
        return histories[0] == histories[1]

    def _shows_both_calls(self, shows_results: bool) -> bool:
        """Whether two calls in one message are shown, with their results if it shows any."""
        other_id = self._call_id[:-1] + "z"
        calling = self._calling([self._call(self._call_id, _VALUE), self._call(other_id, _OTHER)])
        results = [
            self._result(call_id, self._message("tool", text)["content"])
            for call_id, text in ((self._call_id, _SAID), (other_id, _AGAIN))
        ]
        words = (_VALUE, _OTHER, *((_SAID, _AGAIN) if shows_results else ()))
        return self._shows_all(words, [self._message("user", _ASKED), calling, *results])

    def _hides_text_of_calls(self) -> bool:
        """Whether the text beside a call is shown only if it is in a message of its own."""
        user, answer = self._message("user", _ASKED), self._message("assistant", "yes")
        calls, result = (
            [self._call(self._call_id, _VALUE)],
            self._result(self._call_id, self._message("tool", "no")["content"]),
        )
        if self._shows(_SAID, [user, self._calling(calls, _SAID), result, answer, user]):
            return False
        apart = [user, self._message("assistant", _SAID), self._calling(calls), result, answer, user]
        return self._shows_all((_SAID, _VALUE), apart)

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
        return self._shows_all((word,), messages, **variables)

    def _shows_all(self, words: Sequence[str], messages: Sequence[Message], **variables: Any) -> bool:
        made = self._text(messages, **variables) or ""
        return all(word in made for word in words)

    def _text(self, messages: Sequence[Message], **variables: Any) -> str | None:
        made = self._render(messages, {**self._always, **variables})
        if made is not None and made not in self._written and self._num_written + len(made) < MAX_WRITTEN:
            self._written[made] = None
            self._num_written += len(made)
        return made


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
