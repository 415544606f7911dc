"""The declaration of one setting: its names, its help, and how its texts become its value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from exo_mesh.settings import values
from exo_mesh.settings.config import PREFIX, Settings


@dataclass(frozen=True, slots=True)
class Setting:
    """Declares one setting: its names, its help, and how its texts are parsed.

    parse: turns the text of one item into its value; its ValueError says what is needed. field: the name in
    Settings, if it differs. toml: types that config.toml may use for an item. separator: set if several items are
    allowed; it separates them in a variable, and the flag may be repeated. show: turns a value into its text.
    alias: a second flag for the same setting, whose name config.toml and variables may use, too. bare: the text
    that the flag without a value stands for, if that is allowed.
    """

    name: str
    metavar: str
    help: str
    parse: Callable[[str], Any]
    field: str = ""
    toml: tuple[type, ...] = (str,)
    separator: str = ""
    show: Callable[[Any], str] = str
    alias: str = ""
    bare: str = ""

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

    def value(self, settings: Settings) -> Any:
        """The value in force."""
        return getattr(settings, self.field or self.name)

    def text(self, settings: Settings) -> str:
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
            raise ValueError(f"a value like {self.metavar or 'true'} is needed, not a TOML {type(raw).__name__}")
        return str(raw).lower() if isinstance(raw, bool) else str(raw)

    def _several(self, items: Iterable[str]) -> Any:
        parsed = [self.parse(item) for item in items if item]
        return dict(parsed) if self.is_mapping else tuple(value for value in parsed if value is not None)
