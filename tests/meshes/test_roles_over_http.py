"""Nodes in other roles as processes of their own: what clients of the API and of the command line see of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.main import main
from tests.support.peers import chat_body, mesh, text_of

BATCH = Path(__file__).resolve().parents[2] / "examples" / "batch.jsonl"


@pytest.mark.extended
def test_an_api_peer_that_places_nothing_serves_what_was_placed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mesh(tmp_path, [["--role", "api", "--no-auto-place"], ["--no-batch"]], engine="numpy") as (entry, full):
        refused = entry.api.exchange("/v1/chat/completions", chat_body("What is 7 plus 5?"), 30)
        error = refused.body["error"]
        assert (refused.status, error["code"], error["param"]) == (404, "no_instance", "model")
        assert error["message"].startswith("No instance found for model exo-mesh-demo")
        assert [stage["peer"] for stage in entry.place()["stages"]] == [full.id]
        assert "12" in text_of(entry.chat("What is 7 plus 5?"))
        results = tmp_path / "results.jsonl"
        flags = ["--api-url", entry.url, "--home", str(tmp_path / "peer-0")]
        assert main(["batch", str(BATCH), "--output", str(results), *flags]) == exit_codes.OK
        bodies = {
            one["custom_id"]: one["response"]["body"] for one in map(json.loads, results.read_text().splitlines())
        }
        assert "12" in text_of(bodies["add"]) and bodies.keys() == {"count", "add", "spell"}
        assert {body["service_tier"] for body in bodies.values()} == {"flex"}
        assert main(["status", *flags]) == exit_codes.OK
        shown = capsys.readouterr().out
        rows = [line.split() for line in shown.splitlines() if entry.id[:8] in line or full.id[:8] in line]
        assert sorted(row[-1] for row in rows) == ["api", "full"], shown
        live = entry.state()["view"]["peers"]
        assert {peer["id"]: peer["role"] for peer in live} == {entry.id: "api", full.id: "full"}
