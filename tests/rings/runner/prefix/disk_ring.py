"""A ring driven by hand whose stages keep prompts on disk, and that can be restarted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from exo_mesh.domain.frame import StageReport
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import SavedSequence
from exo_mesh.errors import EngineError
from exo_mesh.rings.prefix_disk.folder import FileLimits, StageFolder
from exo_mesh.rings.runner.disk_store import DiskStore
from exo_mesh.rings.runner.driver import Driver
from exo_mesh.rings.runner.prefix.disk_index import DiskIndex
from exo_mesh.rings.runner.scheduling.sequence import Work
from exo_mesh.rings.runner.stage import Stage
from tests.rings.runner.prefix.random_ring import CachingRing
from tests.rings.runner.prefix.test_prefix_ring import KeepingEngine, RecurrentEngine
from tests.rings.runner.test_stage_and_driver import BALLOT

DEADLINE_S = 20.0
PART = 100


def until(condition: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    deadline, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        pause.wait(0.002)


class SavingEngine(KeepingEngine):
    """Its KV can be copied out in parts of PART positions, and in again. saved: how many it has copied out."""

    saved = 0

    def save(self, sequence: int) -> SavedSequence:
        raise AssertionError("it is saved in parts")

    def save_parts(self, sequence: int) -> Iterator[SavedSequence]:
        if sequence not in self.kv:
            raise EngineError(f"sequence {sequence} is not known here")
        length = len(self.kv[sequence])
        for start in range(0, length, PART):
            part = self.kv[sequence][start : start + PART]
            self.saved += 1
            yield SavedSequence(length, {f"kv.{start}": Tensor.from_numpy(np.array(part, np.int64))})

    def restore(self, sequence: int, max_tokens: int, saved: SavedSequence) -> None:
        if saved.length > max_tokens or set(saved.tensors) != {f"kv.{start}" for start in range(0, saved.length, PART)}:
            raise EngineError("it does not fit")
        self.kv[sequence] = [token for tensor in saved.tensors.values() for token in tensor.numpy().tolist()]


class SavingRecurrentEngine(SavingEngine, RecurrentEngine):
    """KV that can be saved, but not cut back."""

    cuts_back = False


class DiskRing(CachingRing):
    """All stages write below `root`. has_disk: of each stage; the others have none."""

    def __init__(
        self,
        root: Path,
        num_stages: int = 2,
        *,
        cuts_back: bool = True,
        has_disk: tuple[bool, ...] = (),
        secret: bytes | None = None,
        **limits: float,
    ) -> None:
        self.make_engine = SavingEngine if cuts_back else SavingRecurrentEngine
        super().__init__(
            num_stages, lambda index, num: self.make_engine(index == 0, index == num - 1), cuts_back=cuts_back, **limits
        )
        self.free = 10**15
        self.stores = [self._store(root, index, secret) for index in range(num_stages)]
        self.uses_disk = has_disk or (True,) * num_stages
        for store, uses in zip(self.stores, self.uses_disk, strict=True):
            if uses:
                store.start()
        self.disk = DiskIndex(num_stages, b"ring", self.stores[-1].known, secret or b"")
        self._wire()
        self.driver = Driver(BALLOT, self.limits, self.sent.append, prefix=self.cache, disk=self.disk)

    def _store(self, root: Path, index: int, secret: bytes | None, maker: str = "") -> DiskStore:
        def free(_: Path) -> tuple[int, int]:
            return 10**15, self.free

        limits = FileLimits(10**9, 1)
        return DiskStore(
            StageFolder(root, f"stage-{index}", maker or f"stage {index}", limits, secret, free_bytes=free)
        )

    def _wire(self) -> None:
        pairs = zip(self.engines, self.stores, self.uses_disk, strict=True)
        self.stages = [
            Stage(engine, index, disk=store if uses else None) for index, (engine, store, uses) in enumerate(pairs)
        ]

    def lap(self) -> None:
        frame, logits, hidden = self.sent.popleft(), None, None
        reports = []
        for index, stage in enumerate(self.stages):
            result = stage.process(frame)
            frame, logits, hidden = result.frame, result.logits, result.hidden
            news = self.stores[index].take_news() if self.uses_disk[index] else None
            reports.append(StageReport(0.0, 0.0, cuts_anywhere=self.cache.cuts_back, disk=news))
        self.driver.returned(frame.changed(reports=tuple(reports)), logits, hidden)
        self.driver.callers.deliver()

    def replace_stage(self, lost: int) -> None:
        """A stage is lost; the new one has its files, and no KV."""
        self.sent.clear()
        self.engines[lost] = self.make_engine(lost == 0, lost == len(self.stages) - 1)
        self._wire()
        for engine in self.engines[: lost + 1]:
            engine.kv.clear()
        self.ballot += 1
        self.driver.change(Ballot(self.ballot, "test"), self.limits, lost + 1)

    def write_all(self) -> int:
        """Let the stages write everything that they keep; returns how many files there are then. SETTLED_S must be
        0."""
        while True:
            self.driver.look()
            if not self.sent:
                return len(self.disk._files)
            self.run()
            until(lambda: not self.disk.is_writing or any(store._has_news for store in self.stores))

    def end_writes(self) -> None:
        """Wait until the driver knows of the end of all writes that have begun."""
        while self.disk.is_writing:
            self.driver._start(Work((), ()))  # an idle stage copies all that is left
            self.run()
            until(lambda: not self.disk.is_writing or any(store._has_news for store in self.stores))

    def num_saved(self) -> list[int]:
        """How many parts each stage has copied out."""
        return [engine.saved for engine in self.engines]  # type: ignore[attr-defined]

    def close(self) -> None:
        for store in self.stores:
            store.close(DEADLINE_S)
