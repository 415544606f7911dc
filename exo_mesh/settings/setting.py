"""The declaration of one setting: its names, its help, and how its texts become its value.

Each field of `config.Settings` is annotated with a declaration and a help text. The methods of a SettingGroup make the
declarations, one method for each kind of value. `table` completes them with the name and the type of the field.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.settings import values

PREFIX = "EXO_MESH_"
"""The beginning of the variable of every setting."""

_TOML_WORDS: dict[type, str] = {
    str: "a string in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}
"""Names of the types of config.toml, for messages."""


class Setting(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Declares one setting.

    group: its subject. name: outside; field: in Settings. parse: turns the text of one item into its value; its
    ValueError says what is needed. separator: set if several items are allowed; it separates them in a variable, and
    the flag may be repeated. toml: types that config.toml may use for an item. show: turns a value into its text.
    alias: a second flag for the same setting, whose name config.toml and variables may use, too. bare: the text that
    the flag without a value stands for, if that is allowed. has_no_flag: whether a flag `--no-NAME` stands for `off`.
    default_words: the default in words, if it depends on the machine. shared: whether the mesh may share it. private:
    whether only admins see its value over the API; the same holds for all paths. secret: whether only the keys of its
    pairs are shown.
    """

    group: str
    name: str
    field: str
    metavar: str
    help: str
    parse: Callable[[str], Any]
    separator: str
    toml: tuple[type, ...] = (str,)
    show: Callable[[Any], str] = str
    alias: str = ""
    bare: str = ""
    has_no_flag: bool = False
    default_words: str = ""
    shared: bool = False
    private: bool = False
    secret: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return self.variables[0]

    @property
    def keys(self) -> tuple[str, ...]:
        """The names in config.toml: its own, then the second flag's."""
        return (self.name, self.alias.removeprefix("--").replace("-", "_")) if self.alias else (self.name,)

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(PREFIX + key.upper() for key in self.keys)

    @property
    def words(self) -> tuple[str, ...]:
        """The allowed words of a setting that is a choice of words; else ()."""
        return self.parse.choices if isinstance(self.parse, values.OneOf | values.SomeOf) else ()

    @property
    def is_switch(self) -> bool:
        return self.toml == (bool,)

    @property
    def is_mapping(self) -> bool:
        return self.parse is values.option

    @property
    def is_private(self) -> bool:
        """Whether only admins see its value over the API."""
        return self.private or self.metavar in ("DIR", "FILE")

    def value(self, settings: object) -> Any:
        """The value in force."""
        return getattr(settings, self.field)

    def text(self, settings: object) -> str:
        """The value in force as a variable would have it; empty if there is none."""
        value = self.value(settings)
        if isinstance(value, dict):
            value = [f"{key}={item}" for key, item in value.items()]
        if self.separator:
            return self.separator.join(map(str, value))
        return "" if value is None else self.show(value)

    def from_texts(self, texts: Iterable[str]) -> Any:
        """Parses the texts of a flag or variable. Raises ValueError."""
        if not self.separator:
            return self.parse(list(texts)[-1])
        return self._several(item.strip() for text in texts for item in text.split(self.separator))

    def from_toml(self, raw: Any) -> Any:
        """Parses the value in config.toml. Raises ValueError."""
        if self.is_mapping and isinstance(raw, dict):
            return self._several(f"{key}={item}" for key, item in raw.items())
        if self.separator and isinstance(raw, list):
            return self._several(self._scalar(item) for item in raw)
        return self.from_texts([self._scalar(raw)])

    def _scalar(self, raw: Any) -> str:
        if type(raw) not in self.toml:
            like = f" ({self.metavar})" if self.metavar else ""
            needed = " or ".join(dict.fromkeys(_TOML_WORDS[kind] for kind in self.toml))
            raise ValueError(f"{needed}{like} is needed, not {_TOML_WORDS.get(type(raw), 'a date or time')}")
        return str(raw).lower() if isinstance(raw, bool) else str(raw)

    def _several(self, items: Iterable[str]) -> Any:
        parsed = [self.parse(item) for item in items if item]
        return dict(parsed) if self.is_mapping else tuple(value for value in parsed if value is not None)


def setting_of(field: str, declared: Declaration, kind: Any, help: str) -> Setting:
    """The setting that a field of Settings declares. kind: the type of the field."""
    name = "no_" + field if declared.keywords["parse"] is values.switched_off else field
    return declared(**{"name": name, **declared.keywords}, field=field, separator=_separator(kind), help=help)


def _separator(kind: Any) -> str:
    """What separates the items of a tuple or dict: as between directories in PATH, or a comma; else ""."""
    if getattr(kind, "__origin__", None) not in (tuple, dict):
        return ""
    return os.pathsep if kind.__args__[0] is Path else ","


Declaration = partial[Setting]
"""A setting without what its field says: name, type and help."""


class SettingGroup:
    """Declares the settings of one subject, which help and docs show together. more: further fields of Setting."""

    def __init__(self, title: str) -> None:
        self.title = title

    def text(self, metavar: str, parse: Callable[[str], Any], **more: Any) -> Declaration:
        """A setting with a parser of its own."""
        return partial(Setting, group=self.title, metavar=metavar, parse=parse, **more)

    def matching(self, metavar: str, pattern: str, what: str, **more: Any) -> Declaration:
        """A text that matches a whole pattern. what: the expected form, for the error."""
        return self.text(metavar, values.matching(pattern, what), **more)

    def one_of(self, metavar: str, *words: str, **more: Any) -> Declaration:
        """One of several words."""
        return self.text(metavar, values.one_of(*words), **more)

    def some_of(self, metavar: str, *words: str, **more: Any) -> Declaration:
        """A list of allowed words; "none" stands for an empty one."""
        return self.text(metavar, values.some_of(*words), **more)

    def path(self, metavar: str, **more: Any) -> Declaration:
        """A path; it becomes absolute."""
        return self.text(metavar, values.path, **more)

    def pairs(self, metavar: str, **more: Any) -> Declaration:
        """Pairs of key and value."""
        return self.text(metavar, values.option, **more)

    def whole(self, metavar: str, low: int, high: int, **more: Any) -> Declaration:
        """A whole number from low to high."""
        return self.text(metavar, values.whole(low, high), toml=(int,), **more)

    def number(self, metavar: str, parse: Callable[[str], float], **more: Any) -> Declaration:
        """A number that may have decimals."""
        return self.text(metavar, parse, toml=(int, float), **more)

    def port(self, **more: Any) -> Declaration:
        """The number of a port; 0 stands for any."""
        return self.whole("PORT", 0, 65535, **more)

    def size(self, parse: Callable[[str], int] = values.size, **more: Any) -> Declaration:
        """A number of bytes, such as 12GB."""
        return self.text("SIZE", parse, toml=(str, int), **more)

    def switch(self, **more: Any) -> Declaration:
        """Turns a field on that is off by default."""
        return self.text("", values.switched_on, toml=(bool,), show=lambda on: str(on).lower(), **more)

    def off_switch(self, **more: Any) -> Declaration:
        """Turns a field off that is on by default; it is named `no_…`."""
        return self.text("", values.switched_off, toml=(bool,), show=lambda on: str(not on).lower(), **more)
