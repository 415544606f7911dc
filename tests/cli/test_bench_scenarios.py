"""The scenario files of `exo-mesh bench serve`: what they may say, and what flags replace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.bench.result import merged
from exo_mesh.cli.bench.scenario import Scenario, make_scenario, parse_scenario, scenario_of, shipped
from exo_mesh.cli.bench.serve import add_flags
from exo_mesh.cli.bench.serve_report import breakdown_table
from exo_mesh.cli.main import main
from exo_mesh.cli.parser import Parser
from exo_mesh.settings.config import ConfigError


def of_flags(*argv: str) -> Scenario:
    parser = Parser()
    add_flags(parser)
    return scenario_of(parser.parse_args(argv))


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_scenarios_are_valid_and_say_what_they_are_about(name: str) -> None:
    scenario = parse_scenario(shipped()[name], ".toml", name)
    assert scenario.about.endswith(".") and list(scenario.loads())


def test_a_file_may_be_toml_or_json(tmp_path: Path) -> None:
    values = {"peers": 3, "engine_options": {"cost_ms": 5}, "streams": [2], "prompts": [8, 16], "tokens": [4]}
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.toml").write_text(
        "peers = 3\nstreams = [2]\nprompts = [8, 16]\ntokens = [4]\n[engine_options]\ncost_ms = 5"
    )
    first, second = (of_flags("--scenario", str(tmp_path / name)) for name in ("a.json", "a.toml"))
    assert first == second and first.grid() == [(8, 4), (16, 4)]
    assert [load.requests for load in first.loads()] == [4, 4]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"peers": 0}, "peers: Expected `int` >= 1"),
        ({"peers": "two"}, "peers: Expected `int`, got `str`"),
        ({"streams": [1, 0]}, "streams[1]: Expected `int` >= 1"),
        ({"strams": [1]}, "unknown field `strams`"),
        ({"cells": ["32"]}, "cells[0]: Expected `str` matching"),
        ({"arrival": "often"}, "arrival: Invalid enum value"),
        ({"arrival": "poisson"}, "rates: arrival"),
        ({"arrival": "poisson", "rates": [1], "streams": [1]}, "has rates instead"),
        ({"rates": [1]}, "they need arrival"),
        ({"arrival": "poisson", "rates": [0]}, "rates[0]: Expected `float` > 0"),
        ({"model": "a", "random": "1M"}, "exclude each other"),
        ({"policy": "best"}, "policy: must be one of"),
        ({"compare": ["group"], "peers": 1}, "a group needs at least 2 peers"),
        ({"compare": []}, "compare: must name"),
        ({"prompts": []}, "must not be empty"),
        ({"prompts": [1] * 9, "tokens": [1] * 9}, "81 cells"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_what_a_scenario_may_not_say_is_named(values: Any, said: str) -> None:
    with pytest.raises(ConfigError, match="the file") as caught:
        make_scenario(values, "the file")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("peers = ", "a.toml", "is not TOML"),
        ("{", "a.json", "is not JSON"),
        ("[" * 60_000, "a.json", "is not JSON"),
        ("#" * 70_000, "a.toml", "is larger than"),
        ("\xff", "a.toml", "is not TOML"),
    ],
)
def test_files_that_cannot_be_read_are_refused(
    text: str, name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    for named, expected in ((tmp_path / name, said), (tmp_path / "absent.toml", "cannot be read"), ("nope", "quick")):
        assert main(["bench", "serve", "--scenario", str(named)]) == exit_codes.USAGE
        assert expected in capsys.readouterr().err


def test_flags_replace_what_the_file_says() -> None:
    base = of_flags("--scenario", "ten-ms-stages")
    assert (base.peers, base.engine, base.tokens) == (4, "dummy", (512,))
    changed = of_flags("--scenario", "ten-ms-stages", "--peers", "2", "--tokens", "8", "--engine-option", "load_ms=1")
    assert (changed.peers, changed.grid(), changed.streams) == (2, [(32, 8)], base.streams)
    assert changed.engine_options == {"cost_ms": 10, "load_ms": "1"}
    assert of_flags("--scenario", "ten-ms-stages", "--rate", "0.5").rates == (0.5,)
    assert of_flags("--scenario", "arrivals", "--streams", "3").arrival == "closed"
    assert of_flags("--scenario", "two-cores", "--model", "m").random == ""
    assert of_flags("--scenario", "two-cores", "--prompt", "7").grid() == [(7, 128)]


def test_without_a_file_the_flags_have_the_usual_defaults() -> None:
    loads = list(of_flags().loads())
    assert [(load.amount, load.prompt, load.tokens, load.requests) for load in loads] == [
        (1, 32, 128, 2), (2, 32, 128, 4), (4, 32, 128, 8), (8, 32, 128, 16),
    ]  # fmt: skip


def test_rounds_become_medians_and_are_kept() -> None:
    parts = ({"a_s": 1.0, "b_s": 2.0}, {"a_s": 3.0, "b_s": 0.0}, {"a_s": 8.0, "b_s": 1.0})
    rounds = [
        {
            **{"streams": 2, "prompt": 8, "tokens": 4, "requests": 4, "failed": number, "errors": ["x"] * number},
            **{"tokens_per_s": speed, "ttft_s": {"p50": speed / 10}, "busy": [0.1 * number, 0.5]},
            "breakdown": {"total_s": sum(parts[number].values()), "parts": parts[number]},
        }
        for number, speed in enumerate((10.0, 40.0, 20.0))
    ]
    run = merged(rounds)
    assert (run["streams"], run["requests"], run["failed"], run["errors"]) == (2, 12, 3, ["x"])
    assert (run["tokens_per_s"], run["ttft_s"], run["busy"]) == (20.0, {"p50": 2.0}, [0.1, 0.5])
    assert [one["tokens_per_s"] for one in run["rounds"]] == [10.0, 40.0, 20.0]
    assert sum(run["breakdown"]["parts"].values()) == pytest.approx(run["breakdown"]["total_s"])
    assert merged(rounds[:1]) == rounds[0]
    shown = breakdown_table({"runs": [run]}).splitlines()
    assert shown[0].split()[-2:] == ["a", "b"] and shown[1].split()[-3:] == ["5000.0", "4000.0", "1000.0"]
    assert breakdown_table({"runs": []}) == ""


@pytest.mark.extended
def test_a_scenario_with_rounds_and_parts_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = {"peers": 1, "engine": "dummy", "engine_options": {"cost_ms": 2}, "streams": [2]}
    (tmp_path / "mine.json").write_text(json.dumps({**scenario, "tokens": [4], "rounds": 2, "breakdown": True}))
    assert main(["bench", "serve", "--scenario", str(tmp_path / "mine.json"), "--json"]) == exit_codes.OK
    result = json.loads(capsys.readouterr().out)
    (run,) = result["runs"]
    assert (result["scenario"], run["requests"], run["failed"], len(run["rounds"])) == ("mine", 8, 0, 2)
    found = run["breakdown"]
    assert found["requests"] == 4 and sum(found["parts"].values()) == pytest.approx(found["total_s"], abs=1e-4)
    assert found["parts"]["decode_s"] > 0 and found["prefill_laps"] + found["decode_laps"] >= 4
