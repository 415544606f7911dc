"""The slash commands of a conversation, with their help and completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from exo_mesh.base.printable import escaped, printable
from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.verbs.chat.conversation import Dialogue, SavedChats
from exo_mesh.cli.verbs.chat.knobs import DEFAULT, KNOBS, OTHER_NAMES, read_knob, shown_knobs
from exo_mesh.cli.verbs.models.facts import context_text, model_path, quantisation, size_text
from exo_mesh.errors import InputError, MeshError
from exo_mesh.settings.spelling import did_you_mean

_ASK_DEADLINE_S = 2.0

_SCREEN_KNOBS = {
    "markdown": "on or off: show answers as markdown",
    "verbose": "on or off: show tokens/s and time to first token after each answer",
    "history": "on or off: save questions for the next run",
}
_WORDS = {
    "verbose": ("verbose", "on"),
    "quiet": ("verbose", "off"),
    "think": ("think", "on"),
    "nothink": ("think", "off"),
    "history": ("history", "on"),
    "nohistory": ("history", "off"),
}
"""`/set WORD` without a value, as in Ollama: (setting, value) by word."""


@dataclass
class ChatState:
    """A conversation and its display settings."""

    conversation: Dialogue
    markdown: bool = True
    verbose: bool = True
    history: bool = True


class Command(msgspec.Struct, frozen=True):
    """A slash command. run: takes the text after the name, returns what to print. complete: words for that text."""

    usage: str
    help: str
    run: Callable[[str], str]
    complete: Callable[[], Iterable[str]] = tuple


class LeaveChat(Exception):
    """Raised by /bye: ends the conversation."""


class Commands:
    """Runs slash commands on the state of a chat."""

    def __init__(self, state: ChatState, members: MeshNodes, saved: SavedChats) -> None:
        self._state = state
        self._members = members
        self._saved = saved
        self._models: list[str] | None = None
        settings = [*KNOBS, *_SCREEN_KNOBS, "system", "quiet", "nothink", "nohistory"]
        self.table = {
            "/set": Command("/set NAME VALUE", "change a setting; /set lists them", self._set, lambda: settings),
            "/show": Command(
                "/show [info|system|messages]", "show settings, the model, or the messages", self._show,
                lambda: ("info", "settings", "system", "messages"),
            ),
            "/model": Command("/model NAME", "continue with another model", self._model, self._model_names),
            "/clear": Command("/clear", "forget all messages; settings stay", self._clear),
            "/save": Command("/save NAME", "save the conversation", self._save, saved.names),
            "/load": Command("/load NAME", "continue a saved conversation", self._load, saved.names),
            "/help": Command("/help", "show this list; also /?", self._help),
            "/bye": Command("/bye", "leave; also Ctrl-D", self._bye),
        }  # fmt: skip

    def run(self, line: str) -> str:
        """Runs a line that begins with a slash; returns what to print. Raises InputError, and LeaveChat for /bye."""
        name, _, rest = line.partition(" ")
        name = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/reset": "/clear"}.get(name, name)
        if command := self.table.get(name):
            return command.run(rest.strip())
        raise InputError(f"no such command: {name}{did_you_mean(name, self.table) or '; /help lists them'}")

    def complete(self, line: str, word: str) -> Iterable[str]:
        """The possible words in place of `word`, which ends the line."""
        before = line[: len(line) - len(word)].split()
        if not line.startswith("/"):
            return ()
        if not before:
            return self.table
        command = self.table.get(before[0])
        if before[0] == "/set" and len(before) == 2:
            knob = KNOBS.get(before[1])
            words = knob.values.replace(" or ", ", ").split(", ") if knob and "on or" in knob.values else ("on", "off")
            return words if before[1] in _SCREEN_KNOBS or (knob and "on or" in knob.values) else (DEFAULT,)
        return command.complete() if command and len(before) == 1 else ()

    def _help(self, _: str) -> str:
        rows = [(command.usage, command.help) for command in self.table.values()]
        rows += [('"""', "begin and end a message of several lines; pasted lines stay together")]
        rows += [("Ctrl-C", "stop the answer"), ("Ctrl-D", "leave")]
        width = max(len(usage) for usage, _ in rows)
        return "\n".join(f"  {usage:{width}}  {text}" for usage, text in rows)

    def _set(self, rest: str) -> str:
        name, _, text = rest.removeprefix("parameter ").strip().partition(" ")
        text = text.strip()
        if not name:
            return self._settings_help()
        if not text and name in _WORDS:
            name, text = _WORDS[name]
        if name == "system":
            return self._set_system(text)
        if not text:
            raise InputError(f"/set {name} needs a value")
        if name in _SCREEN_KNOBS:
            return self._set_screen(name, text)
        field, value = read_knob(name, text)
        parameters = self._state.conversation.parameters
        parameters.pop(field, None)
        if value is None:
            return f"{name}: the node's default"
        parameters[field] = value
        return f"{name}: {dict(shown_knobs({field: value}))[_own_name(name)]}"

    def _set_screen(self, name: str, text: str) -> str:
        if text not in ("on", "off"):
            raise InputError(f"{name} must be on or off")
        setattr(self._state, name, text == "on")
        return f"{name}: {text}"

    def _set_system(self, text: str) -> str:
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
            text = text[1:-1]
        self._state.conversation.system = "" if text == DEFAULT else text
        return "the system message is set" if self._state.conversation.system else "no system message"

    def _settings_help(self) -> str:
        rows = [(name, f"{knob.values}: {knob.help}") for name, knob in KNOBS.items()]
        rows += [("system", "instructions for the model"), *_SCREEN_KNOBS.items()]
        lines = [f"  /set {name:20} {text}" for name, text in rows]
        return "\n".join([*lines, f"The value `{DEFAULT}` returns to the node's default."])

    def _show(self, what: str) -> str:
        match what:
            case "" | "settings" | "parameters":
                return self._shown_settings()
            case "system":
                return escaped(self._state.conversation.system or "no system message", keep_newlines=True)
            case "messages":
                said = (f"{one['role']}: {one['content']}" for one in self._state.conversation.messages)
                return escaped("\n".join(said) or "no messages yet", keep_newlines=True)
            case "info":
                return self._info()
        raise InputError(f"/show {what} is not possible: use settings, info, system or messages")

    def _shown_settings(self) -> str:
        state, conversation = self._state, self._state.conversation
        rows = [("model", conversation.model), ("node", self._members.name_of(self._members.client))]
        rows += [("system", conversation.system), *shown_knobs(conversation.parameters)]
        rows += [(name, "on" if getattr(state, name) else "off") for name in _SCREEN_KNOBS]
        rows += [("messages", str(len(conversation.messages)))]
        return "\n".join(f"  {name:20} {printable(text)}" for name, text in rows if text)

    def _info(self) -> str:
        model = self._members.client.get(f"/v1/models/{model_path(self._state.conversation.model)}")
        rows = [
            ("model", model["id"]),
            ("context", f"{context_text(model)} tokens"),
            ("numbers", quantisation(model)),
            ("size", size_text(model["num_bytes"])),
        ]
        return "\n".join(f"  {name:20} {text}" for name, text in rows)

    def _model(self, name: str) -> str:
        if not name:
            raise InputError("/model needs the name of a model; Tab completes it")
        self._state.conversation.model = name
        return f"{printable(name)} gives the next answer"

    def _model_names(self) -> Iterable[str]:
        if self._models is None:
            try:
                found = self._members.client.get("/v1/models", _ASK_DEADLINE_S)["data"]
            except MeshError:
                return ()
            self._models = [name for entry in found for name in (entry["id"], *entry["aliases"])]
        return self._models

    def _clear(self, _: str) -> str:
        self._state.conversation.messages.clear()
        return "messages deleted; the next question starts a new conversation"

    def _save(self, name: str) -> str:
        if not name:
            raise InputError("/save needs a name")
        return f"saved as {self._saved.save(name, self._state.conversation)}"

    def _load(self, name: str) -> str:
        if not name:
            raise InputError(f"/load needs a name; saved: {', '.join(self._saved.names()) or 'none yet'}")
        loaded = self._saved.load(name)
        self._state.conversation.__dict__.update(vars(loaded))
        return f"{name}: {len(loaded.messages)} messages with {printable(loaded.model)}"

    def _bye(self, _: str) -> str:
        raise LeaveChat


def _own_name(name: str) -> str:
    return OTHER_NAMES.get(name, name)
