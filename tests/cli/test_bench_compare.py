"""`exo-mesh bench compare`: ratios of recorded runs, bars that fail the command, and the published figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.bench.compare import figures_of, published
from exo_mesh.cli.bench.scenario import shipped
from exo_mesh.cli.main import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-it-works" / "benchmarks.md"


def serve_result(speed: float, rounds: tuple[float, ...] = (), scenario: str = "", streams: int = 4) -> dict[str, Any]:
    run: dict[str, Any] = {"streams": streams, "prompt": 32, "tokens": 512, "tokens_per_s": speed}
    run |= {"ttft_s": {"p50": 1 / speed}, "itl_s": {}}
    if rounds:
        run["rounds"] = [{"tokens_per_s": one} for one in rounds]
    return {"bench": "serve", "scenario": scenario, "peers": 2, "runs": [run]}


def written(folder: Path, **results: Any) -> list[str]:
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    return [str(folder / f"{name}.json") for name in results]


def test_ratios_have_the_range_of_their_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = written(tmp_path, a=serve_result(100, (90, 100, 110)), b=serve_result(120, (108, 120, 132)))
    assert main(["bench", "compare", *names, "--json"]) == exit_codes.OK
    result = json.loads(capsys.readouterr().out)
    speed, ttft = result["figures"]
    assert speed["name"] == "ring, 4 at once, 32 x 512: tokens_per_s"
    assert (speed["ratio"], speed["low"], speed["high"]) == (1.2, round(108 / 110, 4), round(132 / 90, 4))
    assert ttft["ratio"] == pytest.approx(100 / 120, abs=1e-4) and not result["differing"]


@pytest.mark.parametrize(
    ("bars", "code", "said"),
    [
        (["tokens_per_s>=0.79"], exit_codes.OK, ""),
        (["tokens_per_s>=0.81"], exit_codes.FAILED, "is 0.800 of before, not tokens_per_s>=0.81"),
        (["tokens_per_s>=0.5", "ttft_s.p50 <= 1.2"], exit_codes.FAILED, "not ttft_s.p50<=1.2"),
        (["watts<=1"], exit_codes.USAGE, "no figure watts in common; they have tokens_per_s, ttft_s.p50"),
        (["tokens_per_s>0.9"], exit_codes.USAGE, "must be FIGURE>=RATIO"),
    ],
)
def test_a_missed_bar_fails_the_command(
    bars: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = written(tmp_path, a=serve_result(100), b=serve_result(80))
    assert main(["bench", "compare", *names, *(word for bar in bars for word in ("--bar", bar))]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({}, serve_result(1), "is no result of a benchmark"),
        ([], serve_result(1), "is no result of a benchmark"),
        ({"bench": "ring"}, serve_result(1), "differ in bench"),
        (serve_result(1, scenario="quick"), serve_result(1), "differ in scenario"),
        (serve_result(1), serve_result(1, streams=8), "no figure in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    a: Any, b: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", *written(tmp_path, a=a, b=b)]) == exit_codes.USAGE
    assert said in capsys.readouterr().err


def test_files_that_are_missing_or_no_json_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.json").write_text("hello")
    (good,) = written(tmp_path, good=serve_result(1))
    for bad, said in (("absent.json", "cannot be read"), ("text.json", "is not JSON")):
        assert main(["bench", "compare", str(tmp_path / bad), good]) == exit_codes.USAGE
        assert said in capsys.readouterr().err
    assert main(["bench", "compare", good, good, good]) == exit_codes.USAGE
    assert "two files are compared" in capsys.readouterr().err


def test_other_benchmarks_are_compared_by_the_paths_of_their_figures() -> None:
    ring = {"bench": "ring", "peers": 2, "ratio": 3.5, "ring": {"hop_us_p50": 100.0, "frames_counted": 9}}
    assert {name: one.value for name, one in figures_of(ring).items()} == {"ratio": 3.5, "ring.hop_us_p50": 100.0}
    engines = {"bench": "engines", "engines": [{"name": "mlx", "ratio": 1.0}, {"name": "torch float32", "ratio": 1.1}]}
    assert list(figures_of(engines)) == ["engines.mlx.ratio", "engines.torch float32.ratio"]


def test_own_figures_stand_beside_the_published_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = serve_result(11.4, scenario="ten-ms-stages", streams=1)
    ring = {"bench": "ring", "ratio": 3.9, "ring": {"hop_us_p50": 231.0}}
    assert main(["bench", "compare", "published", *written(tmp_path, mine=mine, ring=ring), "--json"]) == exit_codes.OK
    rows = {(row["what"], row["figure"]): row for row in json.loads(capsys.readouterr().out)["figures"]}
    hop = rows["a hop, 8 KiB per token, median", "ring.hop_us_p50"]
    assert hop["yours"] == 231.0 and hop["ratio"] == pytest.approx(231.0 / hop["value"], abs=1e-3)
    assert rows["one stream over 4 stages of 10 ms", "ring, 1 at once, 32 x 512: tokens_per_s"]["yours"] == 11.4
    assert rows["16 MiB frames", "bulk.16_mib.tcp_ratio"]["yours"] is None


def test_the_published_figures_are_those_of_the_page() -> None:
    """A changed row of docs/how-it-works/benchmarks.md needs the same change in exo_mesh/cli/bench/published.json."""
    table = PAGE.read_text().partition("## Current figures")[2].partition("\n\nAims")[0]
    rows = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in table.splitlines() if row
    }
    for one in published():
        figure, _, _, recorded, _ = rows[one.what]
        assert one.text in figure.replace("*", ""), one.what
        assert one.recorded == recorded, one.what
        assert float(re.sub(r"[^0-9.].*", "", one.text.replace(",", ""))) == one.value, one.what
        assert not one.scenario or (one.scenario in shipped() and f"--scenario {one.scenario}" in one.command)
