"""Random faults under clients that never stop asking. `python -m tools.faults soak --minutes 30` for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.faults.record import keep
from tools.faults.soak import soak


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_minutes_of_random_faults(tmp_path: Path) -> None:
    result = soak(tmp_path, 120.0, seed=1)
    keep({"name": "soak", **result.describe()})
    assert result.answers > 10 and sum(result.faults.values()) > 3
