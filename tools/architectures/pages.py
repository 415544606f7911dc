"""The parts of docs/reference about each engine."""

from __future__ import annotations

from typing import Any

from tools.architectures.drafting import SEEDS
from tools.architectures.llamacpp_configs import LAYERS
from tools.architectures.outcome import Outcome
from tools.architectures.sizes import WINDOW
from tools.architectures.table import Page
from tools.architectures.torch_families import NUM_LAYERS
from tools.architectures.trials import CHUNKS, DECODE_STEPS, MARGIN, MAX_THREE_WAY


def _mlx_cells(outcome: Outcome) -> list[Any]:
    traits = outcome.traits
    crossing = "<br>".join(f"`{tensor}`" for tensor in traits.get("crossing", ()))
    more = [", ".join(traits.get("kv", ())), traits.get("rollback", ""), traits.get("together", "")]
    return [outcome.layers or "", crossing, *more, outcome.splits or ""]


def _torch_cells(outcome: Outcome) -> list[Any]:
    worst = [f"{value:.1e}" if value else "0" for value in outcome.worst.values()] or ["", ""]
    return [outcome.splits or "", *worst, ", ".join(outcome.traits.get("kv", ())), outcome.traits.get("rollback", "")]


MLX = Page(
    "architectures.md",
    "# Architectures\n",
    f"""
Which model architectures of mlx-lm the MLX engine can split over machines, found by trying. Do not edit: this part is
written by `python -m tools.architectures mlx --all --write` (about ten minutes). Versions: {{versions}}.

{{summary}}

For each architecture a tiny model (random weights with noise on every parameter, float32, windows and chunks of
{WINDOW} positions) is written to disk as safetensors and loaded by real stages. Every legal cut in two and up to
{MAX_THREE_WAY} cuts in three are run: {len(CHUNKS)} prompts, the longest of {sum(CHUNKS[0])} tokens, prefilled in two
chunks each, then {DECODE_STEPS} decode steps, alone, sharing frames, and after every stage's KV was saved half-way and
restored into another sequence. *Exact* means: every bit of every logit is that of mlx-lm's own unsplit model, computed
alone.

- **Cuts**: layers before which a stage may begin. Fewer than layers - 1 where layers share KV or pass on what grows
  with the context.
- **Crosses a cut**: the tensors of a frame, per token.
- **KV**: what the layers keep. **Rollback**: how many of a sequence's last positions can be cut back; *at rows*: only
  to where a row with drafts began. Checked with rows of drafts, chains of such rows, refused drafts and repeated rows,
  {SEEDS} times each on the whole model and on one split, against decoding token by token.
- **Together**: *yes*: rows of several sequences go through the model in one forward; *no*: one after the other. *In
  blocks*: they also attend in one call, in at least some layers, with logits within {MARGIN:g} of the model's own,
  relative to their root mean square. `batch_attention=off` turns this off, and all other columns are without it.
- **Not tried**: mlx-lm itself cannot run the model here, and the engine refuses it.

| architecture | cuts | layers | crosses a cut | KV | rollback | together | splits | result |
|---|---|---|---|---|---|---|---|---|
""",
    ("mlx", "mlx-lm"),
    _mlx_cells,
)

TORCH = Page(
    "architectures.md",
    "\n## Families of transformers\n",
    f"""
Which causal language models of transformers the torch engine runs and splits, found by trying as well. Do not edit:
this part is written by `python -m tools.architectures torch --all --few --write` (half an hour of one core).
Versions: {{versions}}.

{{summary}}

{NUM_LAYERS} layers each, float32, against transformers' own model on the same random checkpoint: prefill in two
chunks and {DECODE_STEPS} decode steps, windows of {WINDOW}. 3 splits are the whole, one cut and one pair of cuts; 29
are all of them (`python -m tools.architectures torch NAME`). *Worst difference* is of any logit, 0 for equal bits.
*Rows together* is of {len(CHUNKS)} rows of different lengths in common frames, against each alone. *Rollback* is how
many of a sequence's last positions can be cut back, checked with refused drafts. *Not tried* is what transformers
itself does not run here with a tiny config that is made from the names of its settings.

| family | cuts | splits tried | worst difference | rows together | KV | rollback | result |
|---|---|---|---|---|---|---|---|
""",
    ("torch", "transformers"),
    _torch_cells,
)

LLAMACPP = Page(
    "architectures-llamacpp.md",
    "# Architectures of llama.cpp\n",
    f"""
Which architectures of GGUF files the [llama.cpp engine](engines/llamacpp.md) runs and splits, found by trying. Do not
edit: this page is written by `python -m tools.architectures llamacpp --all --write` (about five minutes).
Versions: {{versions}}.

{{summary}}

A random model of {LAYERS} layers in float32 is written as a GGUF file. The library runs the file as it is, from token
ids; the engine runs its layers as stages: all in one, every legal cut in two, and one cut in three. Prompts of several
sequences in two chunks, together and alone, decode steps, a rollback, and sequences that are saved and restored, and
copied. *Exact* means that every bit of every logit is equal. Architectures with experts have four of them.

- **Cuts**: layers before which a stage may begin. Fewer than {LAYERS - 1} where layers of several kinds repeat, or
  where every stage must have a layer of a kind.
- **Refused** architectures, and those that could not be tried, are not loaded from GGUF files. The page of the
  [engine](engines/llamacpp.md#limits) says which models of the other architectures are refused.

| architecture | cuts | KV | result |
|---|---|---|---|
""",
    ("xllamacpp",),
    lambda outcome: [outcome.traits.get("kv", "")],
)

PAGES = {"mlx": MLX, "torch": TORCH, "llamacpp": LLAMACPP}
