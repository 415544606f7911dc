"""The languages of the page: the built-in ones, and those in the directory that a setting names.

A file `TAG.json` there, such as `fr.json` or `pt-BR.json`, has the same keys as `strings/en.json`; missing keys are
shown in English. Only the texts of known keys are served, so no other content of the directory can be read.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from exo_mesh.api.web.assets import FOLDER
from exo_mesh.base.printable import counted, reason_of

FALLBACK: Final = "en"
MAX_FILE_BYTES: Final = 256 << 10
MAX_LANGUAGES: Final = 64
_TAG = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8}){0,3}")
_MARK = re.compile(r"\{\w+\}")

_log = logging.getLogger(__name__)


class PageLanguages:
    """The languages that the page offers. wanted: their tags; () means all. English is always offered. folder: a
    directory with further languages, which take precedence over the built-in ones."""

    def __init__(self, wanted: tuple[str, ...] = (), folder: Path | None = None) -> None:
        self._wanted = wanted
        self._folder = folder
        self._said: set[str] = set()

    def tags(self) -> list[str]:
        """The tags of the offered languages, English first."""
        found = {*built_in(), *self._in_folder()}
        tags = sorted(found if not self._wanted else found & set(self._wanted))
        return list(dict.fromkeys([FALLBACK, *tags]))[:MAX_LANGUAGES]

    def texts(self, tag: str) -> Mapping[str, str] | None:
        """The texts of an offered language, by key; None if the language is not offered. It blocks."""
        if tag not in self.tags():
            return None
        path = self._in_folder().get(tag)
        texts = self._read(path) if path is not None else None
        return texts if texts is not None else built_in().get(tag)

    def _in_folder(self) -> dict[str, Path]:
        if self._folder is None:
            return {}
        try:
            return {path.stem: path for path in self._folder.glob("*.json") if _TAG.fullmatch(path.stem)}
        except OSError:
            return {}

    def _read(self, path: Path) -> Mapping[str, str] | None:
        try:
            if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"it is not a file, or has more than {MAX_FILE_BYTES} bytes")
            with path.open("rb") as file:
                found = json.loads(file.read(MAX_FILE_BYTES))
            texts, faults = checked(found)
        except (OSError, ValueError, RecursionError) as exc:
            self._say(f"cannot use {path} as a language of the page: {reason_of(exc)}")
            return None
        if faults:
            self._say(f"{path}: {'; '.join(faults)}")
        return texts

    def _say(self, text: str) -> None:
        """Log a warning, once for each text and at most MAX_LANGUAGES times, because a file can change at any time."""
        if text not in self._said and len(self._said) < MAX_LANGUAGES:
            self._said.add(text)
            _log.warning("%s", text)


@cache
def built_in() -> Mapping[str, Mapping[str, str]]:
    """The texts of the built-in languages, by tag."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in (FOLDER / "strings").glob("*.json")}


def checked(found: object) -> tuple[dict[str, str], list[str]]:
    """The texts of a file that the page can show, and the faults of the others. Raises ValueError unless the file is an
    object."""
    if not isinstance(found, dict):
        raise ValueError("it must be a JSON object of texts")
    english = built_in()[FALLBACK]
    texts = {
        key: text
        for key, text in found.items()
        if key in english and isinstance(text, str) and set(_MARK.findall(text)) <= set(_MARK.findall(english[key]))
    }
    faults = {
        "not translated": [key for key in english if key not in found],
        "unknown to this version": [key for key in found if key not in english],
        "not a string, or with a {mark} that the English text does not have": [
            key for key in found if key in english.keys() - texts.keys()
        ],
    }
    return texts, [f"{fault}: {_some(keys)}" for fault, keys in faults.items() if keys]


def _some(keys: list[str]) -> str:
    """The number of keys, and the first three of them."""
    return f"{counted(len(keys), 'key')} ({', '.join(key[:60] for key in keys[:3])}{', …' if len(keys) > 3 else ''})"
