"""Texts that several verbs print: JSON, tables, names of peers, and which peer holds which layers.

Tables are for people: with colours on a terminal; plain, aligned text in a pipe or with NO_COLOR.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

from exo_mesh.base.printable import cells, escaped_json, printable
from exo_mesh.base.telemetry.tables import columns
from exo_mesh.domain.peer_names import told_apart

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PIPE_WIDTH = 200
"""Columns of a picture that is not drawn on a terminal: no name or address is cut there."""

_STYLES = {
    "ok": "green", "ready": "green", "loaded": "green", "yes": "green",
    "degraded": "yellow", "loading": "yellow", "draining": "yellow", "starting": "yellow", "waiting": "yellow",
    "no": "yellow",
    "failed": "red", "unusable": "red", "stopping": "red",
    "asleep": "dim", "note": "dim",
}  # fmt: skip
"""Colours by the first word of a state."""


def print_json(value: Any) -> None:
    """Prints a value as indented JSON, with escapes for control characters and for what the output cannot show."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    print(escaped_json(text))


def complain(text: str) -> None:
    """Prints an error on standard error; see `say`."""
    say(f"exo-mesh: {text}", sys.stderr)


def say(text: str, stream: TextIO | None = None, hanging: int | None = None) -> None:
    """Prints sentences, on standard output by default. On a terminal their lines end between words; the terminal itself
    would cut them. Not for commands to paste, which must stay on one line. hanging: indent of continued lines."""
    stream = stream or sys.stdout
    width = line_width(stream)
    print(text if width is None else wrapped(text, width, hanging), file=stream, flush=True)


def line_width(stream: TextIO | None = None) -> int | None:
    """Columns that a line may have on a terminal, by default that of standard output; None if it is none."""
    return shutil.get_terminal_size().columns - 1 if (stream or sys.stdout).isatty() else None


def wrapped(text: str, width: int, hanging: int | None = None) -> str:
    """The text with lines of at most this width that end between words, indented by `hanging` or as the line that
    they continue; a longer word has a line of its own."""
    return "\n".join(
        line
        if len(line) <= width
        else textwrap.fill(
            line,
            max(width, 20),
            subsequent_indent=" " * (len(line) - len(line.lstrip()) if hanging is None else hanging),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )


def people_console() -> Console:
    """The console of verbs that print for people: it has colours only on a terminal and without NO_COLOR."""
    from rich.console import Console

    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(highlight=False, markup=False, emoji=False, color_system=colours)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def state_text(state: str) -> Text:
    """A state such as `ok`, `degraded` or `no: 5 GB of weights, …`, coloured by its first word."""
    from rich.text import Text

    word = state.partition(" ")[0].rstrip(":,")
    return Text(printable(state), _STYLES.get(word, ""))


def print_table(console: Console, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows below a header. A cell is any value, or the Text that state_text made.

    A console without colours gets plain text; see `fitted`. One with colours has the same lines.
    """
    from rich.table import Table
    from rich.text import Text

    rows = [list(row) for row in rows]
    width = console.width if console.is_terminal else None
    if console.color_system is None or not _has_room(header, rows, _room(header, rows, width)):
        console.print(Text(fitted(header, rows, width)), soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in header:
        table.add_column(title, overflow="fold", no_wrap=title is not header[-1])
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(str(cell))) for cell in row))
    console.print(table)


def say_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a plain table on standard output; see `fitted`."""
    print(fitted(header, list(rows), line_width()))


_LEAST_ROOM = 24
"""Columns that the last column of a table needs on a terminal, if its cells are longer than the terminal is wide."""


def fitted(header: Sequence[str], rows: Sequence[Sequence[object]], width: int | None) -> str:
    """Aligned columns whose lines have at most this width. If they are wider, the lines of the last column end between
    words; without room for that, each row is a block with a line per cell, without cells that are empty or `-`."""
    room = _room(header, rows, width)
    if width is None or room >= max((cells(str(line[-1])) for line in (header, *rows)), default=0):
        return columns(header, rows)
    if _has_room(header, rows, room):
        folded: list[list[object]] = [
            [*(row[:-1] if first else [""] * (len(header) - 1)), part]
            for row in rows
            for first, part in _parts(printable(str(row[-1])), room)
        ]
        return columns(header, folded)
    titles = [title.strip() for title in header[1:]]
    pad = max(map(len, titles), default=0)
    blocks = []
    for row in rows:
        named = zip(titles, (printable(str(cell)) for cell in row[1:]), strict=True)
        lines = [
            f"  {title if first else '':{pad}}  {part}"
            for title, text in named
            if text not in ("", "-")
            for first, part in _parts(text, max(width - pad - 4, 10))
        ]
        blocks.append("\n".join([printable(str(row[0])).strip(), *lines]))
    return "\n".join(blocks) or columns(header, rows)


def _room(header: Sequence[str], rows: Sequence[Sequence[object]], width: int | None) -> int:
    """Columns that a table of this width leaves to its last column."""
    if width is None:
        return sys.maxsize
    others = [max(cells(printable(str(line[i]))) for line in (header, *rows)) for i in range(len(header) - 1)]
    return width - sum(others) - 2 * len(others)


def _has_room(header: Sequence[str], rows: Sequence[Sequence[object]], room: int) -> bool:
    """Whether the cells of the last column can be read in so many columns, without breaking a word."""
    words = [word for line in (header, *rows) for word in printable(str(line[-1])).split()]
    return room >= max([_LEAST_ROOM, *map(cells, words)])


def _parts(text: str, width: int) -> Iterator[tuple[bool, str]]:
    """The text in lines of at most this width, each with whether it is the first."""
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    yield from ((index == 0, line) for index, line in enumerate(lines))


def peer_names(state: dict[str, Any]) -> dict[str, str]:
    """Names by peer id, also of peers that are gone, which models may still name; peers that share a name get the first
    letters of their ids added."""
    names = told_apart((peer["id"], printable(peer["name"])) for peer in state["view"]["peers"])
    for peer in state.get("health", {}).get("peer_health", ()):
        name = printable(peer["name"])
        names.setdefault(peer["id"], f"{name} ({peer['id'][:8]})" if name in names.values() else name)
    return names


def ring_line(instance: dict[str, Any], names: dict[str, str]) -> str:
    """`alpha 0-5 → beta 6-11`: the peers of an instance in ring order, each with its layers.

    While the instance loads, each with its progress, too: `alpha 0-5 (loading 3/8) → beta 6-11 (ready)`.
    """
    parts = []
    for stage in instance["stages"]:
        part = f"{names.get(stage['peer'], stage['peer'][:8])} {layers_text(stage['layers'])}"
        progress = stage.get("progress") if instance.get("state") == "loading" else ""
        parts.append(f"{part} ({progress})" if progress else part)
    return " → ".join(parts)


def layers_text(layers: Sequence[int]) -> str:
    """`0-5` for the half-open range [0, 6)."""
    start, stop = layers
    return f"{start}-{stop - 1}" if stop - start > 1 else str(start)
