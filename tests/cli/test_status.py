"""`status`, `ps` and `list` for people: plain, stable text in a pipe and colours on a terminal."""

from __future__ import annotations

import re
from typing import Any

import pytest

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.main import main
from exo_mesh.cli.tables import peer_names
from exo_mesh.domain.reports import StateReport
from tests.support.reports import reply_of

GB = 10**9
URL = "http://127.0.0.1:9"
ESCAPE = "\x1b["


def a_state() -> dict[str, Any]:
    def peer(name: str) -> dict[str, Any]:
        return {"id": f"{name}-0123456789", "name": name, "role": "full", "alive": True,
                "devices": [{"engine": "mlx"}],
                "tags": ["mlx", "act:v1", "dtype:bf16"]}  # fmt: skip

    def reading(free: int, held: int) -> dict[str, Any]:
        return {"usable_bytes": free, "reserved_bytes": held, "total_bytes": 16 * GB, "load": 0.5}

    slow = {"code": "slow_link", "level": "degraded", "message": "the link to beta has 3 MB/s", "remedy": "use a cable"}
    gone = {"code": "asleep", "level": "ok", "message": "its machine went to sleep", "remedy": ""}
    failed = {"code": "crash_loop", "level": "failed", "message": "it crashed 3 times", "remedy": "see the log"}
    stages = [
        {"peer": "alpha-0123456789", "engine": "mlx", "layers": [0, 6]},
        {"peer": "beta-0123456789", "engine": "mlx", "layers": [6, 8]},
    ]
    return reply_of(
        StateReport,
        node_id="alpha-0123456789",
        view={
            "peers": [peer("alpha"), peer("beta")],
            "instances": [{"id": "m-1", "model": "org/m[1]", "state": "ready", "stages": stages}],
        },
        telemetry={"alpha-0123456789": reading(8 * GB, 3 * GB)},
        health={
            "status": "waiting_for_peers",
            "reasons": [slow],
            "peer_health": [
                {"id": "alpha-0123456789", "name": "alpha", "level": "degraded", "reasons": [slow]},
                {"id": "beta-0123456789", "name": "beta", "level": "failed", "reasons": [failed]},
                {"id": "gamma-0123456789", "name": "gamma", "level": "ok", "reasons": [gone]},
            ],
            "instance_health": [{"id": "m-1", "level": "ok", "reasons": []}],
        },
    )


STATUS = """\
http://127.0.0.1:9: waiting for peers
  degraded: the link to beta has 3 MB/s
    -> use a cable
PEER          HEALTH    ENGINE  FREE     USED BY MODELS  ID
alpha (here)  degraded  mlx     8.0 GB   3.0 GB          alpha-01
beta          failed    mlx     unknown  unknown         beta-012
gamma         asleep                                     gamma-01
beta:
  failed: it crashed 3 times
    -> see the log
gamma:
  note: its machine went to sleep
MODEL     STATE  PEERS AND LAYERS      INSTANCE
org/m[1]  ready  alpha 0-5 → beta 6-7  m-1
"""
PS = """\
INSTANCE  MODEL     STATE  PEERS AND LAYERS
m-1       org/m[1]  ready  alpha 0-5 → beta 6-7
"""


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that answers with the state above; no variable asks for colours or against them."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    model = {"id": "org/m[1]", "num_bytes": 5 * GB, "peers": ["beta-0123456789"]}
    bad = {"id": "org/bad", "reason": "no config.json"}
    found: dict[str, Any] = {
        "/state": a_state(),
        "/v1/topology": {"peers": a_state()["view"]["peers"], "refused": ["10.0.0.9: another namespace"]},
        "/v1/models": {"data": [model]},
        "/v1/models?status=unusable": {"data": [bad]},
        "/v1/download/progress": {"data": []},
        "/store/storage": {"models": []},
    }
    monkeypatch.setattr(ApiClient, "get", lambda self, path, *rest: found[path])


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv, "--api-url", URL]) == 0
    return capsys.readouterr().out


def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a terminal that is wide enough."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)


def colour_of(word: str, shown: str) -> str:
    """The colour in which a word is shown, or nothing."""
    names = {"31": "red", "32": "green", "33": "yellow", "2": "dim"}
    codes = re.findall(rf"\x1b\[([\d;]+)m{re.escape(word)}", shown)
    return names.get(codes[0], codes[0]) if codes else ""


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "status") == STATUS
    assert said(capsys, "ps") == PS


def test_roles_are_shown_once_some_peer_has_another_than_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = a_state()
    state["view"]["peers"][1]["role"] = "api"
    monkeypatch.setattr(ApiClient, "get", lambda self, path: state)
    rows = [line.split() for line in said(capsys, "status").splitlines()[3:7]]
    assert [row[-1] for row in rows] == ["ROLE", "full", "api", "gamma-01"]


def test_no_color_gives_the_same_text_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    colours(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    assert said(capsys, "status") == STATUS


def test_a_terminal_gets_a_colour_for_each_state(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    colours(monkeypatch)
    shown = said(capsys, "status")
    seen = {word: colour_of(word, shown) for word in ("degraded", "failed", "asleep", "ready", "waiting for peers")}
    assert seen == {
        "degraded": "yellow", "failed": "red", "asleep": "dim", "ready": "green", "waiting for peers": "yellow",
    }  # fmt: skip
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert [line.split() for line in plain.splitlines()] == [line.split() for line in STATUS.splitlines()]


@pytest.mark.parametrize("verb", ["status", "topology"])
def test_people_see_no_capability_tags_and_programs_do(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, verb)
    assert "alpha" in shown and "act:v1" not in shown and ESCAPE not in shown
    assert "act:v1" in said(capsys, verb, "--json")


def test_the_list_of_models_says_in_colour_what_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = said(capsys, "list")
    assert ESCAPE not in plain and "loaded" in plain and "unusable: no config.json" in plain
    colours(monkeypatch)
    shown = said(capsys, "list")
    assert (colour_of("loaded", shown), colour_of("unusable", shown)) == ("green", "red")


@pytest.mark.parametrize("verb", ["ps", "status"])
def test_a_peer_that_is_gone_is_named_where_a_model_still_names_it(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = a_state()
    state["view"]["instances"][0]["stages"][1]["peer"] = "gamma-0123456789"
    monkeypatch.setattr(ApiClient, "get", lambda *_: state)
    assert main([verb, "--api-url", URL]) == 0
    assert "alpha 0-5 → gamma 6-7" in capsys.readouterr().out
    state["view"]["peers"][1]["name"] = "gamma"
    assert peer_names(state) == {
        "alpha-0123456789": "alpha", "beta-0123456789": "gamma", "gamma-0123456789": "gamma (gamma-01)",
    }, "a living peer keeps its name"  # fmt: skip
    assert peer_names({"view": {"peers": []}}) == {}


def test_json_has_no_colours_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    colours(monkeypatch)
    assert ESCAPE not in said(capsys, "status", "--json") + said(capsys, "ps", "--json")
