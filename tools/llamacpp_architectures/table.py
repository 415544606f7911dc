"""Writes docs/reference/architectures-llamacpp.md: one line for each architecture of the library."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from exo_mesh_llamacpp.library_file import packaged_library

from tools.llamacpp_architectures.check import Outcome
from tools.llamacpp_architectures.configs import LAYERS, REASONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "architectures-llamacpp.md"
MAX_REASON = 160

_HEAD = """# Architectures of llama.cpp

Which architectures of GGUF files the [llama.cpp engine](engines/llamacpp.md) runs and splits, found by trying. Do not
edit: this page is written by `python -m tools.llamacpp_architectures --write` (about five minutes).
Version of the library: {version}.

{summary}

A random model of {layers} layers in float32 is written as a GGUF file. The library runs the file as it is, from token
ids; the engine runs its layers as stages: all in one, every legal cut in two, and one cut in three. Prompts of two
sequences in several chunks, together and alone, decode steps, a rollback, and a sequence that is saved and restored.
*Exact* means that every bit of every logit is equal. Architectures with experts have four of them.

- **Cuts**: layers before which a stage may begin. Fewer than {most} where layers of several kinds repeat, or where
  every stage must have a layer of a kind.
- **Refused** architectures are not loaded from GGUF files. The page of the [engine](engines/llamacpp.md#limits) says
  which models of the other architectures are refused.

| architecture | cuts | KV | result |
|---|---|---|---|
"""

_NOISE = re.compile(r"load: adding \d+ dummy tokens; |llama_model_load\w*: |error loading model: |failed to load model")

_RESULT = {
    "exact": "exact",
    "whole": "exact in one piece",
    "failed": "refused: {reason}",
    "absent": "refused, not tried: {reason}",
}


def write(outcomes: Iterable[Outcome], page: Path = PAGE) -> None:
    """Write the page anew."""
    found = sorted(outcomes, key=lambda outcome: outcome.arch)
    exact = sum(outcome.state in ("exact", "whole") for outcome in found)
    split = sum(outcome.state == "exact" for outcome in found)
    summary = (
        f"Of {len(found)} architectures, {split} are exact and can be split, {exact - split} run in one piece only,\n"
        f"and {len(found) - exact} are refused with a reason."
    )
    head = _HEAD.format(version=version(), summary=summary, layers=LAYERS, most=LAYERS - 1)
    page.write_text(head + "".join(f"{line(outcome)}\n" for outcome in found), encoding="utf-8")


def line(outcome: Outcome) -> str:
    """A row of the table."""
    reason = REASONS.get(outcome.arch) or outcome.reason or "; ".join(outcome.different)
    cuts = ", ".join(map(str, outcome.cuts)) if outcome.state == "exact" else ""
    kv = outcome.kv if outcome.state in ("exact", "whole") else ""
    return f"| `{outcome.arch}` | {cuts} | {kv} | {_RESULT[outcome.state].format(reason=_short(reason))} |"


def states(page: Path = PAGE) -> dict[str, str]:
    """{architecture: "exact" or "refused"} on the page."""
    rows = (row.split(" | ") for row in page.read_text(encoding="utf-8").splitlines() if row.startswith("| `"))
    return {cells[0].strip("|` "): cells[-1].split()[0].strip(":,|") for cells in rows}


def version() -> str:
    found = packaged_library()
    return found.version if found else "none"


def _short(reason: str) -> str:
    """The last part of the library's reason, for a cell of a table."""
    text = _NOISE.sub("", reason)
    text = re.sub(r"\btmp\w+: model\.gguf: ", "", text)
    return " ".join(text.split()).replace("|", "/").strip("; ")[:MAX_REASON]
