"""The readings of other machines in tests/machine/recorded, as files and texts."""

from __future__ import annotations

from pathlib import Path

RECORDED = Path(__file__).resolve().parents[1] / "machine" / "recorded"


def plant(root: Path, name: str) -> Path:
    """Write the tree of a recorded .sysfs file below root."""
    for line in (RECORDED / name).read_text().splitlines():
        path, _, content = line.partition(" ")
        write(root, path, content)
    return root


def write(root: Path, path: str, content: str) -> None:
    """One file of such a tree; a content with escapes is bytes."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode().decode("unicode_escape").encode("latin-1") if "\\x" in content else f"{content}\n".encode()
    file.write_bytes(raw)
