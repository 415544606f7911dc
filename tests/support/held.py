"""A driver with grammars over one stage whose logits are noise: what comes out is what the grammar let through."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from tokenizers import Tokenizer

from exo_mesh.domain.frame import Frame, Row
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.request import GenerateRequest
from exo_mesh.engine.contract import ANY_POSITION, Capabilities, StageInput, StageOutput
from exo_mesh.rings.runner.drafting.sources import SourceMaker
from exo_mesh.rings.runner.driver import Driver
from exo_mesh.rings.runner.grammars import Grammars
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.stage import Stage
from exo_mesh.weights.store import ModelStore
from tests.support.serving import Answers

BALLOT = Ballot(1, "test")
MODEL_DIR = ModelStore(()).find("exo-mesh-demo")
TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
PADDED = TOKENIZER.get_vocab_size() + 17
"""Logits of many models are wider than their vocabulary."""

PATIENCE_S = 60.0

WOKEN: SimpleQueue[Callable[[], None]] = SimpleQueue()
GRAMMARS = Grammars(MODEL_DIR, WOKEN.put)
"""Of all rings: the tokenizer is read once. What another ring was waiting for changes nothing in this one."""


class NoiseEngine:
    """Logits depend on all tokens so far and on nothing else, as a model's do."""

    capabilities = Capabilities(ragged=True, rollback=ANY_POSITION, dtypes=("float32",), row_exact=True)

    def __init__(self) -> None:
        self.kv: dict[int, list[int]] = {}
        self.cuts_at_rows = False
        self._starts: dict[int, list[int]] = {}
        """By sequence, where it can be cut back to if it can be cut back to rows only."""
        self.favourites: dict[int, float] = {}
        """By id, what is added to its logit."""

    def insert(self, sequence: int, max_tokens: int) -> None:
        self.kv.setdefault(sequence, [])

    def forward(self, stage_input: StageInput) -> StageOutput:
        start, logits = 0, []
        for row in stage_input.rows:
            held = self.kv[row.sequence]
            assert row.pos0 <= len(held), "no position is left out"
            self._cut(row, len(held))
            held[row.pos0 :] = stage_input.token_ids[start : start + row.n]
            start += row.n
            logits += [self.logits(held[: len(held) - left]) for left in reversed(range(row.num_logits))]
        return StageOutput(logits=np.array(logits, np.float32).reshape(-1, PADDED))

    def _cut(self, row: Row, length: int) -> None:
        """Checks that the sequence can be cut back to the beginning of the row, as Capabilities says."""
        if not self.cuts_at_rows:
            return
        starts = self._starts.setdefault(row.sequence, [])
        assert row.pos0 in (length, 0, *starts), f"cut {length} back to {row.pos0}: rows began at {starts}"
        starts[:] = [start for start in starts if start < row.pos0] if row.may_be_refused else []
        starts += [row.pos0] if row.may_be_refused else []

    def logits(self, held: Sequence[int]) -> np.ndarray:
        digest = hashlib.sha256(np.array(held, np.int64).tobytes()).digest()
        drawn = np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(PADDED, np.float32)
        for token_id, more in self.favourites.items():
            drawn[token_id] += more
        return drawn

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        self.kv[sequence] = self.kv[source][:upto]

    def remove(self, sequence: int) -> None:
        self.kv.pop(sequence, None)

    def sequences(self) -> Sequence[int]:
        return list(self.kv)


class HeldRing:
    """A ring of one, driven by hand. laps: frames that came round. num_stages: as the driver sees it; all of them are
    this one stage, which computes a frame when it comes round."""

    def __init__(
        self,
        model_dir: Path | None = None,
        engine: NoiseEngine | None = None,
        grammars: Grammars | None = None,
        make_source: SourceMaker | None = None,
        prefix: PrefixCache | None = None,
        num_stages: int = 1,
        **limits: float,
    ) -> None:
        self.engine = engine or NoiseEngine()
        self.stage = Stage(self.engine, 0)  # type: ignore[arg-type]
        self.sent: deque[Frame] = deque()
        self.limits = SchedulerLimits(num_stages, **limits)  # type: ignore[arg-type]
        grammars = grammars or (GRAMMARS if model_dir is None else Grammars(model_dir, WOKEN.put))
        self.driver = Driver(BALLOT, self.limits, self.sent.append, grammars, prefix, make_source=make_source)
        self.laps = 0
        self.rows: list[int] = []
        """Tokens of each row with logits."""

    def submit(self, request: GenerateRequest) -> Answers:
        answers = Answers(len(request.resume_ids))
        self.driver.submit(request, answers)
        return answers

    def step(self) -> None:
        """One frame, or what another thread has done if there is none."""
        while not WOKEN.empty() or not self.sent:
            WOKEN.get(timeout=PATIENCE_S)()
        frame = self.sent.popleft()
        result = self.stage.process(frame)
        self.laps += bool(frame.rows)
        self.rows += [row.n for row in frame.rows if row.num_logits]
        self.driver.returned(result.frame, result.logits)
        self.driver.callers.deliver()

    def run(self, *waited_for: Answers) -> None:
        self.driver.callers.deliver()
        while not all(answers.ended for answers in waited_for):
            self.step()
        while self.sent and not self.driver.num_running:  # stages hear of the ends
            self.step()

    def ask(self, request: GenerateRequest) -> Answers:
        answers = self.submit(request)
        self.run(answers)
        return answers


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


def text_of(answers: Answers) -> str:
    ids = [event.token_id for event in answers.events if event.HasField("token_id")]
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))
