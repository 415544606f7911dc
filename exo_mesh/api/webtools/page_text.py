"""Reads the title and the text of an HTML page. Pure. It runs in a child process, because pages are untrusted."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

_VOID = frozenset(
    ["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"]
)
_UNSEEN = frozenset(
    [
        "script",
        "style",
        "noscript",
        "template",
        "svg",
        "math",
        "iframe",
        "object",
        "canvas",
        "audio",
        "video",
        "select",
        "head",
    ]
)
_AROUND = frozenset(["nav", "header", "footer", "aside", "form", "button", "dialog", "menu"])
"""Elements around the content of a page."""
_BLOCKS = frozenset(
    [
        "address",
        "article",
        "blockquote",
        "br",
        "dd",
        "div",
        "dl",
        "dt",
        "figcaption",
        "figure",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "hr",
        "li",
        "main",
        "ol",
        "p",
        "pre",
        "section",
        "table",
        "td",
        "th",
        "tr",
        "ul",
    ]
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_MAIN = frozenset({"main", "article"})
_LEAST_MAIN_CHARS = 200
"""With less text in <main> or <article> than this, the whole page counts."""
_MAX_TITLE_CHARS = 300


def read_page(source: str) -> tuple[str, str]:
    """(title, text) of a page: paragraphs apart by an empty line, without menus, headers, footers and scripts."""
    reader = _PageReader()
    reader.feed(source)
    reader.close()
    title = " ".join("".join(reader.title).split())[:_MAX_TITLE_CHARS]
    kept, main, everything = map(_tidy, (reader.kept, reader.main, reader.everything))
    if len(main) >= _LEAST_MAIN_CHARS:
        return title, main
    return title, kept or everything


def tidy_text(text: str) -> str:
    """The text without control characters, trailing spaces and runs of empty lines."""
    shown = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028\u2029\ufeff]", "", text.replace("\r\n", "\n"))
    lines = [line.rstrip() for line in shown.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


class _PageReader(HTMLParser):
    """Collects pieces of text. kept: outside of menus and the like; main: those in <main> or <article>; everything: all
    that a person sees."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.kept: list[str] = []
        self.main: list[str] = []
        self.everything: list[str] = []
        self._open: list[str] = []
        self._num_open: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self._open.append(tag)
            self._num_open[tag] += 1
        self._break(tag)
        if tag == "li":
            self._add("- ")
        elif tag in _HEADINGS:
            self._add(_HEADINGS[tag])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self._break(tag)
        if not self._num_open[tag]:
            return
        ended = ""
        while ended != tag:  # an end tag ends everything inside of it, too
            ended = self._open.pop()
            self._num_open[ended] -= 1

    def handle_data(self, data: str) -> None:
        if self._num_open["title"] and not self._num_open["svg"]:
            if len(self.title) < _MAX_TITLE_CHARS:
                self.title.append(data)
        elif self._num_open["pre"]:
            self._add(data)
        else:
            self._add(re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._add("\n" if tag in ("br", "li", "tr", "td", "th", "dt", "dd") else "\n\n")

    def _add(self, text: str) -> None:
        if self._is_inside(_UNSEEN):
            return
        self.everything.append(text)
        if self._is_inside(_AROUND):
            return
        self.kept.append(text)
        if self._is_inside(_MAIN):
            self.main.append(text)

    def _is_inside(self, tags: frozenset[str]) -> bool:
        return any(self._num_open[tag] for tag in tags)


def _tidy(pieces: list[str]) -> str:
    return tidy_text(re.sub(r" *\n *", "\n", "".join(pieces)))
