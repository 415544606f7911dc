"""A model with a hostile chat template, asked for on a node that fetched only its text files."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import psutil
import pytest

from exo_mesh.errors import InputError
from tests.support.peers import Peer, mesh, text_of
from tests.support.processes import eventually, gone
from tests.support.questions import shipped

BOMB = (
    "{% set a = 'a' * 4000000 %}"
    "{% set b %}{% for i in range(messages[0].content | int) %}{{ a }}{% endfor %}{% endset %}"
    "{{ a if messages[0].content == '0' else 'ok' }}"
)
"""As many times 4 MB as the user says, in a block that the sandbox does not count; for 0 a prompt of 4 MB."""

QUESTION = "Count from 7 to 12."


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A directory with one model: the demo model with another template."""
    directory = Path(shutil.copytree(shipped(), tmp_path / "models" / "evil"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": BOMB}))
    return directory.parent


def most_resident(peer: Peer) -> int:
    """VmHWM: the most bytes of memory that the node has ever occupied."""
    status = Path(f"/proc/{peer.child.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def renderers(peer: Peer) -> list[psutil.Process]:
    children = psutil.Process(peer.child.pid).children()
    return [child for child in children if "exo_mesh.text.template_child" in child.cmdline()]


@pytest.mark.extended
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM from /proc")
def test_a_node_stays_small_and_answers_while_a_hostile_template_is_rendered(tmp_path: Path, evil: Path) -> None:
    with mesh(tmp_path, [[], ["--models-dir", str(evil)]], engine="dummy") as (asked, owner):
        usual = text_of(asked.chat(QUESTION))
        before = most_resident(asked)
        assert eventually(lambda: "evil" in json.dumps(asked.api.get("/v1/models")))
        answers: list[str] = []
        hostile = threading.Thread(target=lambda: answers.extend(refusal(asked, times) for times in ("400", "0")))
        hostile.start()
        num_alive = 0
        while hostile.is_alive():
            asked.api.get("/healthz", deadline_s=1.0)
            num_alive += 1
        hostile.join()
        assert "too much memory" in answers[0]
        assert "4000000 characters and more than" in answers[1]
        assert num_alive > 3
        assert most_resident(asked) < 1.5 * before
        assert text_of(asked.chat(QUESTION)) == usual
        assert {peer["id"] for peer in owner.state()["view"]["peers"] if peer["alive"]} == {asked.id, owner.id}
        left = renderers(asked)
        assert left
    assert eventually(lambda: gone(left), 3)


def refusal(peer: Peer, times: str) -> str:
    with pytest.raises(InputError) as caught:
        peer.chat(times, model="evil")
    return str(caught.value)


@pytest.mark.extended
def test_a_killed_node_leaves_no_renderer(tmp_path: Path) -> None:
    with mesh(tmp_path, [[]], engine="dummy") as (peer,):
        peer.chat(QUESTION)
        left = renderers(peer)
        assert left
        psutil.Process(peer.child.pid).kill()
        assert eventually(lambda: gone(left), 5)
