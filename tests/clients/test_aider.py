"""aider's one-shot edit, with aider unmodified, against a mesh of two peers.

AIDER names the program `aider` (docs/tasks/clients.md says how to install it). The demo model cannot edit, so a tiny
one is trained first, in minutes, on what this very aider sends; for that the tests' own Python needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.aider.recording import record
from tests.clients.aider.running import MODEL, Edit, run_aider
from tests.support import peers
from tests.support.peers import Peer, mesh, text_of

PROGRAM = os.environ.get("AIDER")
TRAINING_S = 900
COUNTING = "Count from 7 to 12."
EDITS = [
    Edit("Morning", "Winter", "Summer", changes_second=True),
    Edit("Hello", "World", "Python", changes_second=False),
    Edit("River", "Ocean", "Mountain", changes_second=False),
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PROGRAM is None, reason="AIDER is not set: the program aider is needed"),
]


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model that makes edits."""
    pytest.importorskip("torch", reason="the model that edits is trained with torch")
    from tests.clients.aider.training import train

    folder = tmp_path_factory.mktemp("editor")
    loss, num_steps = train(record(str(PROGRAM), folder / "recorded"), folder / "models" / MODEL, TRAINING_S)
    print(f"trained in {num_steps} steps to a loss of {loss:.4f}")
    return folder / "models"


@pytest.fixture(scope="module")
def editor(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """One of two peers, each of which holds half of the model that makes edits."""
    flags = ["--models-dir", str(models_dir), "--min-peers", "2"]
    with mesh(tmp_path_factory.mktemp("mesh"), [flags, flags]) as both:
        instance = both[0].place(model=MODEL)
        assert len(instance["stages"]) == 2
        yield both[0]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.new)
@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
def test_aider_edits_a_file_and_commits_it(editor: Peer, tmp_path: Path, edit: Edit, streams: bool) -> None:
    done = run_aider(str(PROGRAM), tmp_path, editor.url, edit, model=MODEL, streams=streams)
    assert done.content == edit.after, done.printed
    assert done.titles == [edit.commit_title, "Add a greeting"]


def test_aider_gets_an_answer_of_the_demo_model_and_leaves_the_file_alone(entry: Peer, tmp_path: Path) -> None:
    """Its prompt of 2,700 tokens is answered; that no edit is in the answer is for aider to see."""
    edit = EDITS[0]
    done = run_aider(str(PROGRAM), tmp_path, entry.url, edit, model=peers.MODEL, streams=True)
    assert (done.content, done.titles) == (edit.before, ["Add a greeting"])
    latest = entry.api.get("/requests/recent")["requests"][0]
    assert latest["status"] == "ok" and latest["prompt_tokens"] > 2000, latest
    assert text_of(entry.chat(COUNTING)) == "7, 8, 9, 10, 11, 12"
