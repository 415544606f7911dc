"""Measures the peak memory of loading a stage against its share of the model, for `bench engines --memory`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from exo_mesh.base.telemetry.tables import columns
from exo_mesh.cli.bench.measuring import ask_once, engine_command
from exo_mesh.engine.contract import EngineProvider
from exo_mesh.engine.registry import load_registry
from exo_mesh.errors import MeshError
from exo_mesh.weights.card import read_card
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint

SLACK = 1.15
"""Allowed peak: 15 % more than the stage's tensors as the engine holds them."""
BIG = TinyModel(
    layers=8, hidden=2048, heads=16, kv_heads=8, intermediate=11008, vocab=32000, dtype="bfloat16", shards=4
)
"""A model of 1.5 GB in four files."""
TINY = TinyModel("llama", layers=2, dtype="bfloat16")
DEADLINE_S = 300.0

_PEAK = ("--what", "peak", "--layers")


class MemoryRow(msgspec.Struct, frozen=True):
    """The measurement of a stage in its own process. share_bytes: size of its tensors as the engine reports.

    peak_bytes: peak resident memory. bare_bytes: the peak with a model of a few KB, which is the library alone.
    """

    engine: str
    layers: str
    reason: str = ""
    share_bytes: int = 0
    peak_bytes: int = 0
    bare_bytes: int = 0

    @property
    def over_share(self) -> float:
        """The excess of the peak, without the library, over the share, as a fraction; 0.15 is allowed."""
        return (self.peak_bytes - self.bare_bytes) / self.share_bytes - 1


class MemoryTable(msgspec.Struct, frozen=True):
    """The rows of the measurement, and the checkpoint in words."""

    checkpoint: str
    rows: Sequence[MemoryRow]

    def text(self) -> str:
        """The table as text."""
        cells = [
            [row.engine, row.layers, "", "", "", row.reason]
            if row.reason
            else [
                row.engine,
                row.layers,
                *(f"{value / 1e6:.0f} MB" for value in (row.share_bytes, row.peak_bytes, row.bare_bytes)),
                f"{100 * row.over_share:+.1f} %",
            ]
            for row in self.rows
        ]
        return "\n".join([self.checkpoint, columns(("ENGINE", "LAYERS", "SHARE", "PEAK", "BARE", "OVER"), cells)])


def memory_table(names: Sequence[str], scratch: Path, model: TinyModel = BIG) -> MemoryTable:
    """Writes a checkpoint under `scratch`, and measures each engine with each half of its layers."""
    model_dir = write_checkpoint(scratch / "big", model, repeat=True)
    tiny_dir = write_checkpoint(scratch / "tiny", TINY)
    card = read_card(model_dir, "big")
    registry = load_registry()
    rows: list[MemoryRow] = []
    for name in names:
        provider = registry.provider(name)
        look = provider.availability()
        for start, stop in ((0, card.num_layers // 2), (card.num_layers // 2, card.num_layers)):
            layers = f"{start}:{stop}"
            reason = look.reason if not look.available else "takes whole models" if provider.kind != "stage" else ""
            rows.append(MemoryRow(name, layers, reason) if reason else _row(provider, model_dir, tiny_dir, layers))
    return MemoryTable(f"random Llama of {card.total_bytes / 1e6:.0f} MB in bfloat16, two stages", rows)


def _row(provider: EngineProvider, model_dir: Path, tiny_dir: Path, layers: str) -> MemoryRow:
    try:
        found, bare = (
            ask_once([*engine_command(provider.name, directory, {}, DEADLINE_S), *_PEAK, part], DEADLINE_S)
            for directory, part in ((model_dir, layers), (tiny_dir, f"0:{TINY.layers}"))
        )
    except MeshError as exc:
        return MemoryRow(provider.name, layers, str(exc))
    if not found["held_bytes"]:
        return MemoryRow(provider.name, layers, "the engine holds no weights")
    return MemoryRow(provider.name, layers, "", found["share_bytes"], found["peak_bytes"], bare["peak_bytes"])
