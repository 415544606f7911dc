"""Option `threads` of the NumPy engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from exo_mesh_numpy import provider, threads
from exo_mesh_numpy.threads import MAX_THREADS, set_threads

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest
from exo_mesh.errors import InputError
from tests.support.checkpoints import TinyModel, write_checkpoint


@pytest.fixture(autouse=True)
def same_threads_after() -> Iterator[None]:
    before = set_threads("auto")
    yield
    if before is not None:
        set_threads(str(before))


def load(directory: Path, **options: str) -> None:
    stage = provider.create()
    stage.load(LoadRequest(Shard("m", 0, 1, 1), directory, 64, options), lambda done, total: None)
    stage.close()


@pytest.mark.skipif(set_threads("auto") is None, reason="this NumPy has no OpenBLAS of its own")
def test_a_stage_sets_the_threads_of_blas(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, TinyModel(layers=1))
    for wanted in ("2", "1"):
        load(directory, threads=wanted)
        assert set_threads("auto") == int(wanted)
    load(directory)
    assert set_threads("auto") == 1, "auto changes nothing"


@pytest.mark.parametrize("wanted", ["0", "-1", "two", "", "1.5", "²", str(MAX_THREADS + 1)])
def test_threads_is_a_number(wanted: str) -> None:
    with pytest.raises(InputError, match="is not auto or a number from 1 to 1024"):
        set_threads(wanted)


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_openblas", lambda: None)
    assert set_threads("auto") is None
    with pytest.raises(InputError, match="is not OpenBLAS"):
        set_threads("2")
