"""Formats plain text for people: aligned columns, and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from exo_mesh.base.printable import cells, padded, printable


def columns(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats a table with left-aligned columns and printable cells; only the header if there are no rows."""
    table = [list(header), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(cells(row[i]) for row in table) for i in range(len(header))]
    lines = ("  ".join(padded(cell, width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)


def human_bytes(num_bytes: float) -> str:
    """Formats bytes as `12.3 GB`, with decimal units like --max-memory and disks."""
    for unit in ("B", "KB", "MB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
