"""Runs the stages of one model in one process, one after the other, as on a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from exo_mesh.domain.frame import Fault, Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.conformance.subject import Subject
from exo_mesh.engine.contract import LoadProgress, LoadRequest, StageEngine, StageInput, StageOutput, Surveyor
from exo_mesh.weights.card import read_card

CONTEXT = 256


def nobody(done: int, total: int) -> None:
    """Ignore the progress."""


class CutModel:
    """A model directory, the places where this engine may cut it, and random token ids to feed it.

    tokens: int32 `[CONTEXT]`; a row at a position gets the token at that index, unless a test gives others.
    """

    def __init__(self, subject: Subject, directory: Path) -> None:
        card = read_card(directory, "subject")
        provider = subject.load_provider()
        cuts = (
            provider.survey(directory, subject.options).legal_cuts
            if isinstance(provider, Surveyor)
            else range(1, card.num_layers)
        )
        self.subject = subject
        self.directory = directory
        self.num_layers = card.num_layers
        self.vocab_size = card.vocab_size
        self.cuts = tuple(cuts)
        self.tokens = np.random.default_rng(5).integers(0, card.vocab_size - 1, CONTEXT).astype(np.int32)

    def request(self, start: int, stop: int, activation_dtype: str = "") -> LoadRequest:
        shard = Shard("subject", start, stop, self.num_layers)
        return LoadRequest(shard, self.directory, CONTEXT, self.subject.options, activation_dtype)

    def stage(
        self, start: int, stop: int, *, activation_dtype: str = "", progress: LoadProgress = nobody
    ) -> StageEngine:
        """Load and return one stage."""
        engine = self.subject.load_provider().create()
        engine.load(self.request(start, stop, activation_dtype), progress)
        return engine

    @property
    def middle(self) -> tuple[int, ...]:
        """A cut into two stages, or none if the model runs in one piece only."""
        return self.cuts[len(self.cuts) // 2 :][:1]

    @contextmanager
    def cut(self, cuts: Sequence[int], activation_dtype: str = "") -> Iterator[Stages]:
        """All stages of a split, closed at the end."""
        bounds = zip([0, *cuts], [*cuts, self.num_layers], strict=True)
        stages = Stages(self, [self.stage(*bound, activation_dtype=activation_dtype) for bound in bounds])
        try:
            yield stages
        finally:
            for engine in stages.engines:
                engine.close()


class Stages:
    """A split of a model. Token ids default to `model.tokens` at each row's positions."""

    def __init__(self, model: CutModel, engines: Sequence[StageEngine]) -> None:
        self.model = model
        self.engines = list(engines)

    @property
    def first(self) -> StageEngine:
        return self.engines[0]

    @property
    def last(self) -> StageEngine:
        return self.engines[-1]

    def insert(self, *sequences: int, max_tokens: int = 64) -> None:
        for engine in self.engines:
            for sequence in sequences:
                engine.insert(sequence, max_tokens)

    def remove(self, *sequences: int) -> None:
        for engine in self.engines:
            for sequence in sequences:
                engine.remove(sequence)

    def clear(self) -> None:
        """Remove all sequences from all stages."""
        for engine in self.engines:
            for sequence in list(engine.sequences()):
                engine.remove(sequence)

    def forward(self, rows: Sequence[Row], ids: Sequence[int] | np.ndarray | None = None) -> StageOutput:
        """Run rows through all stages; returns the faults of all of them. Rows of a faulted sequence run through the
        later stages as well."""
        chosen = self.ids(rows) if ids is None else tuple(int(i) for i in ids)
        output = StageOutput()
        faults: list[Fault] = []
        for engine in self.engines:
            output = engine.forward(StageInput(tuple(rows), chosen, output.tensors))
            faults += output.faults
        return StageOutput(output.tensors, output.logits, tuple(faults))

    def logits(self, rows: Sequence[Row], ids: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Float32 `[sum(num_logits), vocab]`; fails on any fault."""
        output = self.forward(rows, ids)
        assert not output.faults, output.faults
        assert output.logits is not None
        return output.logits

    def ids(self, rows: Sequence[Row]) -> tuple[int, ...]:
        """The token ids at the rows' positions."""
        return tuple(int(i) for row in rows for i in self.model.tokens[row.pos0 : row.pos0 + row.n])


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Check that the shapes are equal, and no element differs by more than `tolerance` times the rms of `want`; 0:
    equal bits."""
    assert got.shape == want.shape
    if tolerance == 0:
        np.testing.assert_array_equal(got, want)
        return
    scale = float(np.sqrt(np.mean(np.square(want, dtype=np.float64)))) or 1.0
    worst = float(np.max(np.abs(got.astype(np.float64) - want), initial=0.0)) / scale
    assert worst <= tolerance, f"differs by {worst:.2e} of the rms, {tolerance:.2e} is allowed"
