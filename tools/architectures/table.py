"""Writes docs/reference/architectures.md from the outcomes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata

from tools.architectures.check import MARGIN, Outcome
from tools.architectures.sequences import CHUNKS, DECODE_STEPS
from tools.architectures.sizes import WINDOW

_HEAD = """# Architectures

Which model architectures of mlx-lm the MLX engine can split over machines, found by trying. Do not edit: this page is
written by `python -m tools.architectures --all --write docs/reference/architectures.md` (about ten minutes).
Versions: {versions}.

{summary}

For each architecture a tiny model (random weights with noise on every parameter, float32, windows and chunks of
{window} positions) is written to disk as safetensors and loaded by real stages. Every legal cut in two and up to five
cuts in three are run: {sequences} prompts, the longest of {prompt} tokens, prefilled in two chunks each, then {steps}
greedy decode steps, alone and sharing frames; unsplit and in three also after every stage's KV was saved half-way and
restored into another sequence. *Equal* means: every bit of every logit is that of mlx-lm's own unsplit model, computed
alone.

- **Cuts**: layers before which a stage may begin. Fewer than layers - 1 where layers share KV or pass on what grows
  with the context.
- **Crosses a cut**: the tensors of a frame, per token.
- **KV**: what the layers keep. **Rollback**: whether a sequence can be cut back to any earlier position.
- **Together**: *yes*: rows of several sequences go through the model in one forward; *no*: one after the other. *In
  blocks*: they also attend in one call, in at least some layers, with logits within {margin} of the model's own,
  relative to their root mean square. `batch_attention=off` turns this off, and all other columns are without it.

| architecture | layers | cuts | crosses a cut | KV | rollback | together | splits run | result |
|---|---|---|---|---|---|---|---|---|
"""

TRANSFORMERS = "\n## Families of transformers\n"
"""The heading of the part that tools.torch_architectures writes."""

_TEXT = {
    "split": "equal",
    "whole": "runs in one piece: {reason}",
    "absent": "not run here: {reason}",
    "failed": "**fails**: {reason}",
}


def render(outcomes: Sequence[Outcome], page: str = "") -> str:
    """Renders the whole page. page: an earlier version. Its other rows are kept if the library versions are equal, and
    its part about transformers is always kept."""
    transformers = transformers_part(page)
    page = page.removesuffix(transformers)
    rows = _rows_of(page) if f"Versions: {versions()}." in page else {}
    rows |= {outcome.architecture: _line(outcome) for outcome in outcomes}
    head = _HEAD.format(
        versions=versions(),
        summary=summary([state_of(row) for row in rows.values()]),
        window=WINDOW,
        sequences=len(CHUNKS),
        prompt=max(map(sum, CHUNKS)),
        steps=DECODE_STEPS,
        margin=f"{MARGIN:g}",
    )
    return head + "".join(rows[name] for name in sorted(rows, key=str.lower)) + transformers


def transformers_part(page: str) -> str:
    """Returns the end of a page, which tools.torch_architectures writes; "" if there is none."""
    _, heading, after = page.partition(TRANSFORMERS)
    return heading + after


def versions() -> str:
    """Returns the versions of the libraries in the table."""
    names = ("mlx", "mlx-lm")
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def summary(states: Sequence[str]) -> str:
    """Returns two sentences with the counts of Outcome.state."""
    ran = len(states) - states.count("absent")
    split = states.count("split")
    share = 100 * split / ran if ran else 0.0
    return (
        f"Of {len(states)} architectures, mlx-lm itself runs {ran} here. Of these {split} ({share:.1f} %) split with "
        f"equal bits,\n{states.count('whole')} run in one piece only, and {states.count('failed')} fail."
    )


def _rows_of(page: str) -> dict[str, str]:
    """Returns {architecture: its line}."""
    return {line.split("`")[1]: line for line in page.splitlines(keepends=True) if line.startswith("| `")}


def state_of(row: str) -> str:
    """Reads Outcome.state back from the last cell."""
    result = row.rstrip("| \n").rpartition(" | ")[2]
    return next(state for state, text in _TEXT.items() if result.startswith(text.partition("{")[0]))


def _line(outcome: Outcome) -> str:
    cuts = _ranges(outcome.legal_cuts)
    result = _TEXT[outcome.state].format(reason=_short(outcome.reason))
    live = "<br>".join(f"`{tensor}`" for tensor in outcome.live)
    cells = [
        f"`{outcome.architecture}`", outcome.layers or "", cuts, live, ", ".join(outcome.kv), outcome.rollback,
        _together(outcome) if outcome.kv else "", outcome.splits or "", result,
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _together(outcome: Outcome) -> str:
    return "in blocks" if outcome.in_blocks else "yes" if outcome.batched else "no"


def _ranges(cuts: Sequence[int]) -> str:
    """Formats numbers: 1, 2, 3, 5 -> 1–3, 5."""
    runs: list[list[int]] = []
    for cut in cuts:
        if runs and runs[-1][-1] == cut - 1:
            runs[-1].append(cut)
        else:
            runs.append([cut])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _short(reason: str) -> str:
    """Shortens a text for a table cell, without names of temporary folders."""
    reason = re.sub(r"(/[\w.\-]+)+/tmp\w+|/tmp/\w+", "the model", reason)
    return reason.replace("|", "/")[:200]
