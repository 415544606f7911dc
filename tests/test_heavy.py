"""What decides whether a heavy test runs, with how large a model, and what the preflight check says of a machine."""

from __future__ import annotations

import pytest

from tests.support import heavy
from tests.support.checkpoints import num_parameters
from tests.support.heavy import MODEL_GB, SIZES, checkpoint_bytes, choose, eight_layers
from tools.preflight import FORCE, Holder, Reading, main, refusal

GB = 10**9
ROOMY, SMALL, FULL = Reading(16 * GB, 8 * GB), Reading(16 * GB, 3 * GB), Reading(16 * GB, GB // 10)


def test_the_largest_checkpoint_for_which_there_is_memory_is_taken() -> None:
    assert choose(2.0, SIZES, ROOMY, {}) == (SIZES[0], "")
    assert choose(2.0, SIZES, SMALL, {}) == (SIZES[1], "")
    size, reason = choose(2.0, SIZES, FULL, {})
    assert not size
    assert reason == "a checkpoint of 1.00 GB: 2.0 GB of memory are needed, and 0.1 GB of 16.0 GB are free"


def test_a_variable_names_the_size_and_the_memory_must_still_be_there() -> None:
    assert choose(2.0, SIZES, ROOMY, {MODEL_GB: "3.5"}) == (3_500_000_000, "")
    assert "9.0 GB of memory are needed" in choose(2.0, SIZES, ROOMY, {MODEL_GB: "4.5"})[1]
    assert choose(2.0, SIZES, FULL, {MODEL_GB: "4.5", FORCE: "1"}) == (4_500_000_000, "")
    assert choose(2.0, SIZES, FULL, {FORCE: "1"}) == (SIZES[0], "")
    for nonsense in ("0", "-1", "large"):
        with pytest.raises(ValueError):
            choose(2.0, SIZES, ROOMY, {MODEL_GB: nonsense})


def test_a_test_without_memory_is_skipped_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODEL_GB, raising=False)
    monkeypatch.delenv(FORCE, raising=False)
    monkeypatch.setattr(heavy, "read", lambda: FULL)
    with pytest.raises(pytest.skip.Exception, match=r"0\.1 GB of 16\.0 GB are free"):
        checkpoint_bytes(2.0)
    monkeypatch.setattr(heavy, "read", lambda: ROOMY)
    assert checkpoint_bytes(2.0) == SIZES[0]


@pytest.mark.parametrize("size", [*SIZES, 4_000_000_000])
def test_the_model_of_eight_layers_is_about_as_large_as_asked(size: int) -> None:
    model = eight_layers(size)
    assert model.layers == 8
    assert 0.98 * size < 2 * num_parameters(model) <= size


def test_a_size_that_attention_alone_exceeds_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        eight_layers(100_000_000)


def test_a_refusal_names_the_processes_that_hold_memory() -> None:
    crowded = Reading(16 * GB, GB, holders=(Holder(11, GB), Holder(12, 2 * GB)))
    assert refusal(crowded, GB) == ""
    assert refusal(crowded, 5 * GB) == (
        "5.0 GB of memory are needed, and 1.0 GB of 16.0 GB are free; exo-mesh processes hold 3.0 GB, "
        "maybe left over from an earlier run: 11, 12"
    )


def test_wired_memory_that_no_process_of_ours_can_hold_is_a_leak() -> None:
    assert "9.0 GB are wired" in refusal(Reading(64 * GB, 30 * GB, wired_bytes=9 * GB), GB)
    assert not refusal(Reading(64 * GB, 30 * GB, wired_bytes=9 * GB, holders=(Holder(11, 8 * GB),)), GB)
    assert not refusal(Reading(64 * GB, 30 * GB, wired_bytes=3 * GB), GB)


def test_the_preflight_says_ok_or_refuses_and_can_be_overruled(capsys: pytest.CaptureFixture[str]) -> None:
    too_much = "1000000"
    assert main(["--need-gb", "0.001"], {}) == 0
    assert capsys.readouterr().out.startswith("OK: ")
    assert main(["--need-gb", too_much], {}) == 1
    refused = capsys.readouterr().err
    assert refused.startswith("refused: 1000000.0 GB of memory are needed, and ") and "--force" in refused
    assert main(["--need-gb", too_much, "--force"], {}) == 0
    assert capsys.readouterr().out.startswith("continuing as requested, although 1000000.0 GB")
    assert main(["--need-gb", too_much], {FORCE: "1"}) == 0
    assert main(["--need-gb", too_much], {FORCE: "0"}) == 1
