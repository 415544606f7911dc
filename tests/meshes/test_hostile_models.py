"""A node that is given a folder of hostile models starts, serves the others, and says of each what is wrong with it."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from exo_mesh.base.telemetry.log_folding import MAX_VARIANTS
from exo_mesh.cli import exit_codes
from exo_mesh.errors import MeshError
from exo_mesh.models.catalogue import MAX_LOGGED
from exo_mesh.wire.proto import control_pb2 as pb
from tests.support.hostile_models import GOOD, SECRET, write_hostile_models
from tests.support.peers import Peer, mesh, text_of
from tests.support.processes import eventually, run

pytestmark = pytest.mark.extended

NAMES = ["../secret", "../../etc", "/etc", "..", ".", "~", "", "good/../../secret", "a\0b", "x" * 100_000]


@dataclass(frozen=True)
class Besieged:
    """A node that has the folder; words: by model, a word of the reason that it must give."""

    peer: Peer
    words: dict[str, str]
    root: Path

    def listed(self) -> list[dict[str, str]]:
        """The models that it cannot use, as it says."""
        return list(self.peer.api.get("/v1/models?status=unusable")["data"])

    def refusal(self, model: str) -> tuple[str, str]:
        """(code, message) of the answer to a chat with a model."""
        with pytest.raises(MeshError) as caught:
            self.peer.chat("Hello.", model=model, max_tokens=1)
        return caught.value.code, str(caught.value)


def peak_bytes(pid: int) -> int:
    """The most memory that a process ever had, where the system tells it; else what it has now."""
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else int(psutil.Process(pid).memory_info().rss)


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    root = tmp_path_factory.mktemp("hostile")
    words = write_hostile_models(root)
    with mesh(root, [["--models-dir", str(root / "models")]], engine="dummy") as (peer,):
        found = Besieged(peer, words, root)
        assert eventually(lambda: len(found.listed()) == len(words), 30), found.listed()
        yield found


def test_it_serves_the_good_models_and_lists_the_others_with_a_reason(besieged: Besieged) -> None:
    peer = besieged.peer
    for model in ("exo-mesh-demo", GOOD):
        assert text_of(peer.chat("Hello.", model=model, max_tokens=2))
    assert {entry["id"] for entry in peer.api.get("/v1/models")["data"]} == {"exo-mesh-demo", GOOD}
    listed = {entry["id"]: entry for entry in besieged.listed()}
    assert listed.keys() == besieged.words.keys()
    for name, word in besieged.words.items():
        assert listed[name]["status"] == "unusable" and word in listed[name]["reason"], listed[name]
    assert str(besieged.root) not in json.dumps(listed)
    shown = run(["models", "--api-url", peer.url], besieged.root / "home")
    assert shown.returncode == exit_codes.OK, shown.stderr
    for name, word in besieged.words.items():
        assert any(
            line.startswith(name) and "unusable: " in line and word in line for line in shown.stdout.splitlines()
        )


def test_it_has_said_each_once_and_lives_in_bounded_memory(besieged: Besieged) -> None:
    """It needs about 85 MB without them."""
    log = besieged.peer.log
    summed_up = sum(map(int, re.findall(r"(\d+) more models cannot be used", log)))
    said = re.findall(r"\bmodel (.+?) in .+ cannot be used: ", log)
    assert len(set(said)) == len(said) >= MAX_LOGGED, log[:3000]
    if len(said) < MAX_VARIANTS:
        assert len(said) + summed_up == len(besieged.words)
    else:  # a look of more than LOOK_S is logged in parts, and the log folds what goes beyond its limit
        assert len(said) == MAX_VARIANTS and len(said) + summed_up <= len(besieged.words)
    assert peak_bytes(besieged.peer.child.pid) < 140 * 2**20


def test_asking_for_one_by_name_is_answered_with_its_reason_and_no_path(besieged: Besieged) -> None:
    for name, word in besieged.words.items():
        code, message = besieged.refusal(name)
        if name.startswith("odd name"):  # as it is listed it is no directory's name
            assert code in ("model_unusable", "model_not_found")
            continue
        assert code == "model_unusable" and word in message, message
        assert str(besieged.root) not in message


@pytest.mark.parametrize("name", [name for name in NAMES if name], ids=range(len(NAMES) - 1))
def test_no_name_leads_out_over_http(besieged: Besieged, name: str) -> None:
    """An empty name is no name: the default model answers."""
    code, message = besieged.refusal(name)
    assert code in ("model_not_found", "invalid_request") and str(besieged.root) not in message, message
    quoted = urllib.parse.quote(name, safe="")[:4000]
    for path in (f"/instance/previews?model={quoted}", f"/v1/models/{quoted}"):
        with pytest.raises(MeshError) as caught:
            besieged.peer.api.get(path)
        assert caught.value.code in ("model_not_found", "invalid_request", "not_found"), caught.value
        assert str(besieged.root) not in str(caught.value)


def test_no_name_and_no_link_gives_a_peer_a_file_outside_a_model(besieged: Besieged) -> None:
    read = pb.DESCRIPTOR.services_by_name["Control"].full_name
    with grpc.insecure_channel(besieged.peer.grpc_address) as channel:
        call = channel.unary_stream(
            f"/{read}/ReadTextFiles",
            request_serializer=pb.ReadTextFilesRequest.SerializeToString,
            response_deserializer=pb.TextFile.FromString,
        )
        good = {item.name for item in call(pb.ReadTextFilesRequest(model=GOOD), timeout=10)}
        assert good == {"tokenizer.json", "tokenizer_config.json", "config.json"}
        for name in (*NAMES, *besieged.words, str(besieged.root / "models" / GOOD)):
            with pytest.raises(grpc.RpcError) as caught:
                sent = list(call(pb.ReadTextFilesRequest(model=name), timeout=10))
                assert not sent, (name, sent)
            code: grpc.StatusCode = caught.value.code()  # type: ignore[attr-defined]
            assert code is grpc.StatusCode.FAILED_PRECONDITION, (name, code)
            assert SECRET.strip() not in str(caught.value)


def test_a_path_stands_for_the_listed_model_in_it_and_for_nothing_else(besieged: Besieged) -> None:
    directory = besieged.root / "models" / GOOD
    assert besieged.peer.chat("Hello.", model=str(directory), max_tokens=1)["model"] == GOOD
    for path in (besieged.root / "models", besieged.root / "secret", Path("/etc")):
        code, message = besieged.refusal(str(path))
        assert code == "model_not_found" and "is not below a models directory" in message, message
