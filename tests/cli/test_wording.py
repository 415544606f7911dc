"""Errors of placements in the words of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from exo_mesh.cli.verbs.preview import _WISHES
from exo_mesh.cli.wording import _FLAGS, in_words_of_flags, names_for, reworded
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.peer_names import peer_named
from exo_mesh.domain.placement import refuse_too_few
from exo_mesh.domain.ring_candidates import Candidate
from exo_mesh.errors import InputError, MeshError, TransportError

IDS = ("0a1b2c3d" + "0" * 24, "4e5f6071" + "0" * 24)
CARD = ModelCard("m", "llama", 4, 8, 99, 64, (1,) * 4, 1, 1, False, 1, "float32", (), (), "d")


class Client:
    """Knows two peers of one name; or nobody answers."""

    def __init__(self, *, answers: bool = True) -> None:
        self.answers, self.calls = answers, 0

    def get(self, path: str) -> dict[str, Any]:
        self.calls += 1
        if not self.answers:
            raise TransportError("nobody listens")
        return {"view": {"peers": [{"id": IDS[0], "name": "alpha"}, {"id": IDS[1], "name": "beta"}]}}


def said(client: Client, error: MeshError) -> str:
    with pytest.raises(type(error)) as raised, in_words_of_flags(client):  # type: ignore[arg-type]
        raise error
    return str(raised.value)


def refusal(peers: Sequence[str], min_peers: int) -> MeshError:
    with pytest.raises(MeshError) as raised:
        refuse_too_few(CARD, [Candidate(one, 2 * 10**9, "mlx") for one in peers], min_peers)
    return raised.value


def test_a_refusal_names_peers_and_flags() -> None:
    assert said(Client(), refusal(IDS, 9)) == (
        "m was asked to run on at least 9 peers, but 2 can take part: alpha (2.00 GB), beta (2.00 GB); start more "
        "peers with the model on disk, or lower --peers"
    )


def test_an_id_in_brackets_behind_its_name_stays() -> None:
    with pytest.raises(InputError) as raised:
        peer_named("gamma", [PeerInfo(IDS[0], 1, "alpha", "1", 1, "n", ())])
    assert said(Client(), raised.value) == 'no peer is called "gamma"; known peers: "alpha" (0a1b2c3d)'


def test_an_error_stays_what_it_is_if_there_is_nothing_to_reword_or_nobody_answers() -> None:
    client = Client()
    assert said(client, InputError("a prompt is missing", param="x")) == "a prompt is missing" and not client.calls
    assert said(Client(answers=False), refusal(IDS, 9)).startswith("m was asked to run on at least 9 peers, but 2")
    assert said(client, InputError("ffffffff is pinned", param="pins")) == "ffffffff is pinned", "nobody's id"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("turn groups off (tensor_group: 1)", "turn groups off (--tensor-group 1)"),
        ('mixed_rings is "never", so', '--mixed-rings is "never", so'),
        ("lower context_limit, or free memory", "lower --context-limit, or free memory"),
        ("that `GET /instance/previews` lists", "that `exo-mesh preview` lists"),
        ("my_min_peers_model", "my_min_peers_model"),
        ("0a1b2c3d+4e5f6071 and 0a1b2c3d4", "alpha+beta and 0a1b2c3d4"),
    ],
)
def test_words_of_the_api_become_those_of_a_terminal(text: str, shown: str) -> None:
    assert reworded(text, dict(zip(IDS, ("alpha", "beta"), strict=True))) == shown


def test_no_call_is_made_without_an_id() -> None:
    client = Client()
    assert names_for(client, "lower min_peers") == {} and not client.calls  # type: ignore[arg-type]
    assert names_for(client, "x", "0a1b2c3d is short") and client.calls == 1  # type: ignore[arg-type]


def test_every_wish_with_a_name_of_the_api_has_its_flag() -> None:
    apart = {name: flag for name, flag in _WISHES.items() if "_" in name}
    assert apart.items() <= _FLAGS.items()
