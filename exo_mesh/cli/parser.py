"""Parses arguments: suggests the nearest flag for an unknown one, and adds a flag for every setting of a node."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from exo_mesh.base.printable import quoted, typed
from exo_mesh.settings.config import ConfigError
from exo_mesh.settings.default_paths import DEFAULT_API_URL
from exo_mesh.settings.foreign import ASKING_FLAGS, FLAGS
from exo_mesh.settings.setting import Setting
from exo_mesh.settings.spelling import did_you_mean
from exo_mesh.settings.table import GROUPS, SETTINGS

_MISSING = "the following arguments are required: "
"""The beginning of argparse's message; the names of arguments follow."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of exiting, and accepts no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.verbs: Collection[str] = ()
        """Words that are verbs where the first word of the line was a flag, and so no verb was recognised."""
        self.rest = ""
        """The name under which the words after -- are kept; "" if the verb takes none. They are not parsed."""

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses argv. Raises ConfigError for an unknown flag or argument, with the nearest known flag."""
        words = list(argv)
        if self.rest:
            end = words.index("--") if "--" in words else len(words)
            self.set_defaults(**{self.rest: words[end + 1 :]})
            argv = words[:end]
        hints = self._hints()
        foreign = (word.partition("=")[0] for word in argv)
        if hint := next((hints[flag] for flag in foreign if flag in hints and not self._knows(flag)), None):
            raise ConfigError(hint)
        # argparse by itself takes no optional argument after a flag; with subcommands it knows no other way
        has_parts = any(isinstance(action.choices, dict) for action in self._actions)
        args, rest = self.parse_known_args(argv) if has_parts else self.parse_known_intermixed_args(argv)
        for name, value in vars(args).items():
            if isinstance(value, str) and not value.isascii() and not os.path.lexists(value):
                setattr(args, name, typed(value))
        if verb := next((word for word in rest if word in self.verbs), ""):
            others = list(argv)
            others.remove(verb)
            raise ConfigError(f"the verb comes first: exo-mesh {shlex.join([verb, *others])}")
        if rest:
            self._refuse(next((word for word in rest if word.startswith("-")), rest[0]))
        return args

    def _knows(self, flag: str) -> bool:
        """Whether this verb or one of its subcommands has the flag."""
        parts = [
            part for action in self._actions if isinstance(action.choices, dict) for part in action.choices.values()
        ]
        return any(flag in parser._option_string_actions for parser in (self, *parts))

    def _hints(self) -> Mapping[str, str]:
        """By flag of other programs: what to use instead with this verb."""
        takes = {action.metavar for action in self._get_positional_actions()}
        if "PROMPT" in takes:
            return {**FLAGS, **ASKING_FLAGS}
        if "--models-dir" in self._option_string_actions:
            return FLAGS
        return (
            dict.fromkeys(("-m", "--model"), f"the model needs no flag: {self.prog} MODEL") if "MODEL" in takes else {}
        )

    def _refuse(self, word: str) -> NoReturn:
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            raise ConfigError(f"unexpected argument {quoted(word)}; see {self.prog} --help")
        hint = did_you_mean(flag, self._option_string_actions) or f"; see {self.prog} --help"
        raise ConfigError(f"unknown flag {flag}{hint}")

    def error(self, message: str) -> NoReturn:
        if message.startswith(_MISSING):
            missing = message.removeprefix(_MISSING).split(", ")
            for action in self._get_positional_actions():
                if action.choices and (action.metavar or action.dest) in missing:
                    message = f"one of these words is needed: {', '.join(map(str, action.choices))}"
        raise ConfigError(re.sub(r"^argument ", "", message) + f"; see {self.prog} --help")


SETTINGS_NOTE = "Each setting is also a variable EXO_MESH_… and a key of config.toml: see `exo-mesh config reference`."


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting of a node, in the groups of the settings. Call it after adding what a verb has."""
    parser.usage = " ".join(["%(prog)s [flags]", *map(_placeholder, parser._get_positional_actions())])
    parser.epilog = SETTINGS_NOTE
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for title, settings in GROUPS.items():
        for setting in settings:
            _add_setting(groups[title], setting)
    for setting in SETTINGS.values():
        if setting.has_no_flag:
            flag, text = setting.flag.replace("--", "--no-", 1), f"the same as {setting.flag} off"
            dest = f"setting_{setting.name}"
            groups[setting.group].add_argument(flag, dest=dest, action="append_const", const="off", help=text)
    for flag, level in (("-v", "debug"), ("-q", "warning")):
        text = f"the same as --log-level {level}"
        groups["logging"].add_argument(flag, dest="setting_log_level", action="append_const", const=level, help=text)


def _placeholder(action: argparse.Action) -> str:
    """A positional argument in the line of usage, which would list a hundred flags otherwise."""
    name = str(action.metavar or f"{{{','.join(map(str, action.choices or ()))}}}")
    return {"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(action.nargs), name)


def _add_setting(group: argparse._ArgumentGroup, setting: Setting) -> None:
    text = setting.help.replace("%", "%%")
    flags = [setting.flag, setting.alias] if setting.alias else [setting.flag]
    dest = f"setting_{setting.name}"
    if setting.is_switch:
        group.add_argument(setting.flag, dest=dest, action="append_const", const="true", help=text)
    elif setting.bare:
        group.add_argument(
            *flags, dest=dest, action="append", nargs="?", const=setting.bare, metavar=setting.metavar, help=text
        )
    else:
        group.add_argument(*flags, dest=dest, action="append", metavar=setting.metavar, help=text)


def node_flags(args: argparse.Namespace) -> dict[str, list[str]]:
    """The texts of the flags of add_node_flags that were given, by name of the setting."""
    texts = {name: getattr(args, f"setting_{name}", None) for name in SETTINGS}
    return {name: given for name, given in texts.items() if given}


def model_argument(text: str) -> str:
    """The type of arguments that name a model: makes a path absolute, since the node may run elsewhere.

    Raises UnknownModelError for a path where no model can be. Other names are left to the node.
    """
    if os.path.lexists(text) or text.startswith(("./", "../", "~")):
        from exo_mesh.cli.model_paths import model_name  # reads models, which few calls need

        return model_name(text)
    return text


def seconds(text: str) -> float:
    """The type of arguments that are durations: a number of seconds, 0 or more. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number of seconds, such as 30")
    return value


def api_words(args: argparse.Namespace) -> list[str]:
    """The given flags of add_api_flags that name the node, for a command that a verb prints."""
    given = (("--api-url", args.api_url), ("--home", args.home))
    return [word for flag, value in given if value for word in (flag, str(value))]


def add_api_flags(parser: argparse.ArgumentParser, *, json: bool = True, home: bool = True) -> None:
    """Adds `--api-url`, `--home` for verbs without the settings of a node, and `--json` for verbs that read."""
    parser.add_argument("--api-url", metavar="URL", help=f"node to call ({DEFAULT_API_URL}; also EXO_MESH_API_URL)")
    if home:
        parser.add_argument("--home", metavar="DIR", help="home of that node, which has its local token")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
