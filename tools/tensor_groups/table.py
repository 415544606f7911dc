"""Writes the table of architectures in docs/how-it-works/tensor-groups.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

DOCUMENT = Path("docs/how-it-works/tensor-groups.md")
BEGIN, END = "<!-- architectures: python -m tools.tensor_groups --write -->", "<!-- end of architectures -->"

TOLERANCE = 1e-4
"""Largest difference between logits of a group and of one process, in float32; logits of the tiny models are of size 1
to 10."""


def write_table(answers: Sequence[dict[str, Any]], size: int, document: Path = DOCUMENT) -> None:
    """Writes the table between its marks."""
    text = document.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    document.write_text(f"{before}{BEGIN}\n{table(answers, size)}\n{END}{after}")


def table(answers: Sequence[dict[str, Any]], size: int) -> str:
    """Returns the table as Markdown."""
    done = [answer for answer in answers if "difference" in answer]
    right = sum(answer["difference"] <= TOLERANCE for answer in done)
    lines = [
        f"With mlx {metadata.version('mlx')}, mlx-lm {metadata.version('mlx-lm')} and {size} ranks: {right} of "
        f"{len(answers)} architectures within {TOLERANCE:g} of one process (float32, tiny random models, a prompt in "
        "two chunks and six decode steps, every position).",
        "",
        "| architecture | largest difference of logits | worst layer of the canary | share of split tensors per rank | "
        "whole on every rank |",
        "|---|---|---|---|---|",
        *(_line(answer) for answer in sorted(answers, key=lambda answer: str(answer["architecture"]).lower())),
    ]
    return "\n".join(lines)


def _line(answer: dict[str, Any]) -> str:
    name = answer["architecture"]
    if "difference" not in answer:
        why = answer.get("failed") or f"does not run here: {answer.get('absent')}"
        return f"| {name} | {re.sub(r' of /[^ ]+', '', str(why)).replace('|', '/')} | | | |"
    share = answer["split"] / answer["full"] if answer["full"] else 0.0
    whole = answer["whole"] / (answer["whole"] + answer["full"])
    kinds = sorted({_short(kind) for kind in answer["kinds"]})
    figures = f"{answer['difference']:.1e} | {answer['canary']:.1e} | {share:.3f}"
    return f"| {name} | {figures} | {whole:.1%}: {', '.join(kinds)} |"


def _short(kind: str) -> str:
    """Shortens `self_attn.q_norm.weight` to `self_attn.q_norm`, without list indexes."""
    parts = [part for part in kind.split(".") if not part.isdigit()]
    return ".".join(parts[:-1] if parts[-1] in ("weight", "bias", "scales", "biases") and len(parts) > 1 else parts)
