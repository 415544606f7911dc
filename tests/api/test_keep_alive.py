"""How long a model stays loaded, in the words of Ollama's and LM Studio's clients."""

from __future__ import annotations

import pytest

from exo_mesh.api.core.keeping import FOR_EVER, keep_alive_s
from exo_mesh.errors import InputError


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *[
            (None, None),
            ("", None),
            (300, 300.0),
            ("300", 300.0),
            ("5m", 300.0),
            ("1h30m", 5400.0),
            ("250ms", 0.25),
            (0, 0.0),
        ],
        *[(-1, FOR_EVER), ("-1", FOR_EVER), ("-1m", FOR_EVER)],
    ],
)
def test_numbers_and_times_are_seconds(given: float | str | None, seconds: float | None) -> None:
    assert keep_alive_s(given, "keep_alive") == seconds


@pytest.mark.parametrize(
    "given", ["m", "5 m", "5m3", "soon", "1e3", float("nan"), 1e12, "9999999h", "1s" * 10**6, "1" * 10**7]
)
def test_anything_else_is_refused_by_name(given: float | str) -> None:
    with pytest.raises(InputError, match="keep_alive must be a number of seconds or a time") as refused:
        keep_alive_s(given, "keep_alive")
    assert refused.value.param == "keep_alive"
