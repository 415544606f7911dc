"""`load` and `preview`: from plans with numbers to a model on the peers that a person names."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.cli import exit_codes
from exo_mesh.cli.main import main
from exo_mesh.cli.verbs.models.loading import loaded_text, stages_of
from exo_mesh.cli.verbs.preview import load_command
from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.reports import InstanceReport, PeerReport, StateReport
from exo_mesh.domain.request import PrefixReport
from exo_mesh.errors import InputError
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.serving.explanations import explain
from exo_mesh.rings.serving.history import RequestOutcome
from tests.api.scripted_mesh import ScriptedInstances, ScriptedMesh, ScriptedObservation, served
from tests.support.peers import MODEL, mesh
from tests.support.processes import run as run_process
from tests.support.reports import report_of
from tests.text.text_models import write_text_model

Say = Callable[..., tuple[int, str, str]]
GB = 10**9


def stage(peer: str, start: int, stop: int) -> dict[str, Any]:
    figures = dict.fromkeys(("weights_bytes", "kv_bytes", "overhead_bytes", "usable_bytes", "headroom_bytes"), GB)
    return {"peer": f"id-{peer}", "name": peer, "engine": "mlx", "layers": [start, stop], **figures}


@dataclass
class PlacingMesh(ScriptedMesh):
    """Three peers, of which two can hold the model in two ways, and one cannot hold it alone."""

    peers: tuple[str, ...] = ("alpha", "beta", "gamma")
    wanted: list[InstanceSpec] = field(default_factory=list)
    plans: list[list[dict[str, Any]]] = field(
        default_factory=lambda: [
            [stage("alpha", 0, 4), stage("beta", 4, 8)],
            [stage("beta", 0, 4), stage("gamma", 4, 8)],
        ]
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        services: dict[str, Any] = {"instances": PlacingInstances(self), "observation": PlacingObservation(self)}
        self.services = replace(self.services, **services)


@dataclass
class PlacingObservation(ScriptedObservation):
    _mesh: PlacingMesh

    def state(self) -> StateReport:
        shown = super().state()
        shown.view.peers = [report_of(PeerReport, id=f"id-{name}", name=name) for name in self._mesh.peers]
        return shown


@dataclass
class PlacingInstances(ScriptedInstances):
    _mesh: PlacingMesh

    async def previews(self, spec: InstanceSpec) -> list[dict[str, Any]]:
        self._mesh.specs.append(spec)
        return [
            {"width": 1, "policies": ["memory"], "refused": {"message": "too large"}},
            *(
                {
                    "width": 2, "policies": ["memory"], "context_limit": 64, "kv_pool_tokens": 64, "stages": stages,
                    "request": {"model": spec.model, "context_limit": 64, "stages": stages},
                }
                for stages in self._mesh.plans
            ),
        ]  # fmt: skip

    async def create(self, spec: InstanceSpec) -> InstanceReport:
        self._mesh.wanted.append(spec)
        stages = [
            {"peer": "id-alpha", "layers": [0, 4], "engine": "mlx"},
            {"peer": "id-beta", "layers": [4, 8], "engine": "mlx", "group": {"peers": ["id-beta", "id-gamma"]}},
        ]
        made = report_of(InstanceReport, id="m-1", model=spec.model, context_limit=64, state="ready", stages=stages)
        self._mesh.instances.append(made)
        return made


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text-model"))


@pytest.fixture
def placing(model_dir: Path) -> PlacingMesh:
    return PlacingMesh(model_dir)


@pytest.fixture
def say(placing: PlacingMesh, capsys: pytest.CaptureFixture[str]) -> Iterator[Say]:
    """Run a verb against a server in a thread: (exit code, standard output, standard error)."""
    url: list[str] = []
    ready, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with served(placing, ApiOptions(access=AccessPolicy(open_admin=True))) as server:
            url.append(server.url)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)

    def run_here(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return main([*argv, "--api-url", url[0]]), *capsys.readouterr()

    yield run_here
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def test_preview_numbers_its_plans_and_ends_with_the_command_that_loads_one(say: Say, placing: PlacingMesh) -> None:
    code, shown, _ = say("preview", MODEL, "--context-limit", "64", "--exclude", "delta,epsilon")
    assert code == exit_codes.OK
    heads = [line for line in shown.splitlines() if "peer" in line and not line.startswith(" ")]
    assert [head.partition(" (")[0] for head in heads[:3]] == [
        "1 peer: not possible. too large", "plan 1: 2 peers", "plan 2: 2 peers",
    ]  # fmt: skip
    command = shown.splitlines()[-1].removeprefix("To load plan 2 as it is shown: exo-mesh ").split()
    assert command[:6] == ["load", MODEL, "--layers", "beta=0-3:mlx,gamma=4-7:mlx", "--context-limit", "64"]
    assert command[6:-1] == ["--api-url"]
    placing.plans.clear()  # other memory is free by now
    code, shown, _ = say(*command[:-2])
    assert code == exit_codes.OK, shown
    assert placing.wanted == [
        InstanceSpec(MODEL, context_limit=64, engine="mlx", pins=(Pin("beta", 0, 4, "mlx"), Pin("gamma", 4, 8, "mlx")))
    ]


def test_a_plan_is_loaded_by_the_number_that_it_has_now(say: Say, placing: PlacingMesh) -> None:
    for _ in range(2):
        code, _, said = say("load", MODEL, "--plan", "2", "--context-limit", "64", "--exclude", "delta,epsilon")
        assert code == exit_codes.OK and "plan 2: " in said, "it shows which plan that is"
        assert placing.specs[-1] == InstanceSpec(MODEL, context_limit=64, exclude_peers=("delta", "epsilon"))
        placing.plans.reverse()
    assert [one.pins[0].peer_id for one in placing.wanted] == ["id-beta", "id-alpha"]


def test_plans_of_few_peers_can_be_left_out_and_the_others_keep_their_numbers(say: Say) -> None:
    code, shown, _ = say("preview", MODEL, "--min-peers", "2")
    assert code == exit_codes.OK and "too large" not in shown
    assert "plan 1: " in shown and shown.splitlines()[-1].startswith("To load plan 2 as it is shown: ")
    assert say("preview", MODEL, "--peers", "3")[:2] == (
        exit_codes.FAILED,
        "no plan has 3 peers or more; ask for fewer with --peers\n",
    )


def test_load_prints_the_stages(say: Say) -> None:
    code, shown, said = say("load", MODEL)
    lines = shown.splitlines()
    assert code == exit_codes.OK and said == f"loading {MODEL} …\n"
    assert lines[0].startswith(f"{MODEL} is ready on 3 peers after ")
    assert lines[0].endswith(": context 64 tokens, instance m-1")
    assert [line.split() for line in lines[1:]] == [
        ["PEER", "LAYERS", "ENGINE"], ["alpha", "0-3", "mlx"], ["beta", "+", "gamma", "4-7", "mlx"],
    ]  # fmt: skip
    code, shown, said = say("load", MODEL, "--json")
    assert (code, json.loads(shown)["id"], said) == (exit_codes.OK, "m-1", "")


@pytest.mark.parametrize(
    ("flags", "spec"),
    [
        ([], InstanceSpec(MODEL)),
        (["--peers", "3"], InstanceSpec(MODEL, min_peers=3)),
        (["--min-peers", "3", "--policy", "latency"], InstanceSpec(MODEL, min_peers=3, policy="latency")),
        (["--on", "alpha, id-gamma"], InstanceSpec(MODEL, min_peers=2, exclude_peers=("id-beta",))),
        (["--on", "id-g"], InstanceSpec(MODEL, min_peers=1, exclude_peers=("id-alpha", "id-beta"))),
        (["--layers", "alpha=0-3, beta=4"], InstanceSpec(MODEL, pins=(Pin("alpha", 0, 4), Pin("beta", 4, 5)))),
        (
            ["--layers", "alpha+beta=0-3:mlx,gamma=4", "--group-backend", "ring"],
            InstanceSpec(MODEL, pins=(Pin("alpha", 0, 4, "mlx", None, ("alpha", "beta"), "ring"), Pin("gamma", 4, 5))),
        ),
        (
            ["--exclude", "alpha,beta", "--engine", "mlx", "--context-limit", "99"],
            InstanceSpec(MODEL, context_limit=99, engine="mlx", exclude_peers=("alpha", "beta")),
        ),
        (
            ["--group", "alpha,beta", "--group-backend", "ring", "--mixed-rings", "never"],
            InstanceSpec(MODEL, groups=(("alpha", "beta"),), group_backend="ring", mixed_rings="never"),
        ),
        (["--tensor-group", "2"], InstanceSpec(MODEL, tensor_group=2)),
    ],
)
def test_each_wish_reaches_the_placement(say: Say, placing: PlacingMesh, flags: list[str], spec: InstanceSpec) -> None:
    code, _, said = say("load", MODEL, *flags)
    assert code == exit_codes.OK, said
    assert placing.wanted == [spec]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--plan", "3"], "--plan 3: there are 2 plans now; `exo-mesh preview"),
        (["--plan", "0"], "--plan 0: a whole number of at least 1"),
        (["--peers", "0"], "--peers 0: a whole number of at least 1"),
        (["--peers", "alpha,beta"], "is not a number of peers; `exo-mesh load --on` names peers"),
        (["--plan", "1", "--peers", "2"], "--plan and --peers contradict each other"),
        (["--layers", "alpha=0-7", "--on", "alpha"], "--layers and --on contradict each other"),
        (["--plan", "1", "--policy", "memory"], "--plan and --policy contradict each other"),
        (["--on", "alpha", "--exclude", "beta"], "--on and --exclude contradict each other"),
        (["--on", "alpha,beta", "--peers", "1"], "--on and --peers contradict each other"),
        (["--on", "delta"], 'no peer is called "delta"; known peers: "alpha" ('),
        (["--on", ","], "--on names no peer"),
        (["--layers", "alpha"], '--layers "alpha": write PEER=FIRST-LAST'),
        (["--layers", "alpha=0-3", "--group-backend", "ring"], "--group-backend: --layers names no tensor group"),
        (["--policy", "speed"], "invalid choice: 'speed'"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_before_anything_is_placed(
    say: Say, placing: PlacingMesh, flags: list[str], complaint: str
) -> None:
    code, shown, said = say("load", MODEL, *flags)
    assert code != exit_codes.OK and complaint in said and not shown
    assert not placing.wanted


def test_preview_refuses_no_peers_as_load_does(say: Say, placing: PlacingMesh) -> None:
    code, shown, said = say("preview", MODEL, "--peers", "0")
    assert code != exit_codes.OK and "--peers 0: a whole number of at least 1" in said and not shown
    assert not placing.specs


def test_two_peers_of_one_name_are_told_apart_by_their_ids(say: Say, placing: PlacingMesh) -> None:
    placing.peers = ("alpha", "alpha")
    code, _, said = say("load", MODEL, "--on", "alpha")
    assert code != exit_codes.OK and '2 peers are called "alpha": use an id' in said


def test_explain_takes_the_last_request(say: Say, placing: PlacingMesh) -> None:
    code, _, said = say("explain")
    assert code != exit_codes.OK and "no request has ended at this node yet" in said
    assert say("run", MODEL, "Hi")[0] == exit_codes.OK
    ended = RequestOutcome("r", MODEL, "stop", 3, 12, None, 1.0, accepted_drafts=8, rejected_drafts=2)
    placing.explanations.add(explain(placing.requests[-1], MODEL, PrefixReport(0), ended), ())
    code, shown, said = say("explain")
    assert code == exit_codes.OK, said
    assert f"{len(placing.requests[-1].prompt_ids)} were computed" in shown
    assert "3.0 tokens per lap: 8 of 10 drafted tokens were right" in shown


def test_chat_is_another_name_of_run(say: Say) -> None:
    assert say("chat", MODEL, "Hi") == say("run", MODEL, "Hi")
    assert say("chat", MODEL, "Hi")[0] == exit_codes.OK


def test_layers_are_half_open_ranges_by_peer() -> None:
    def stages(text: str, *names: str) -> list[dict[str, Any]]:
        return stages_of(text, None, names.__contains__)

    assert stages("alpha=0-3,beta=4:llamacpp,a=b=5-9,") == [
        {"peer": "alpha", "layers": [0, 4]}, {"peer": "beta", "layers": [4, 5], "engine": "llamacpp"},
        {"peer": "a=b", "layers": [5, 10]},
    ]  # fmt: skip
    assert stages("a+b=0-1", "a+b") == [{"peer": "a+b", "layers": [0, 2]}]
    assert stages("a+b=0-1", "a") == [
        {"peer": "a", "layers": [0, 2], "group": {"peers": ["a", "b"], "backend": "auto"}}
    ]
    for text in (
        "", "=0-3", "alpha=3-0", "alpha=x", "alpha=-1", "alpha=0-3,alpha=4-7", "alpha=999999", "alpha=0-3:",
        "a+=0-3", "a+a=0-3", "a+b=0-3,b=4-7",
    ):  # fmt: skip
        with pytest.raises(InputError, match="--layers"):
            stages(text)


def test_the_reason_of_a_placement_is_shown_with_its_stages() -> None:
    made = {"id": "m-1", "model": "m", "context_limit": 64, "reason": "as the cables are", "stages": [stage("a", 0, 1)]}
    assert loaded_text(made, {}, 2.04).splitlines() == [
        "m is ready on 1 peer after 2.0 s: context 64 tokens, instance m-1",
        "  PEER  LAYERS  ENGINE",
        "  id-a  0       mlx",
        "  as the cables are",
    ]


def test_the_command_for_a_plan_says_all_of_it() -> None:
    given = {"context_limit": 64, "mixed_rings": "auto", "api_url": None, "home": "h 1"}
    ids = {"id-a": "a", "id-b": "b+c", "id-c": "my mac", "id-d": "d"}
    grouped = {**stage("a", 0, 4), "group": {"peers": ["id-a", "id-b"], "backend": "jaccl"}}
    entry = {"stages": [grouped, {**stage("c", 4, 5), "engine": "torch"}, stage("d", 5, 8)]}
    assert load_command(argparse.Namespace(model="org/m", **given), entry, ids) == (
        "exo-mesh load org/m --layers a+id-b=0-3:mlx,id-c=4:torch,d=5-7:mlx --context-limit 64 --mixed-rings auto "
        "--group-backend jaccl --home 'h 1'"
    )


@pytest.mark.extended
def test_a_person_places_a_model_over_three_machines_without_a_restart(tmp_path: Path) -> None:
    with mesh(tmp_path, [[], [], []], engine="dummy") as peers:
        own = tmp_path / "peer-0"
        shown = run_process(["preview", MODEL], own).stdout
        last = shown.splitlines()[-1].partition(": exo-mesh ")[2].split()
        done = run_process(last, own)
        assert done.returncode == exit_codes.OK, done.stderr
        assert f"{MODEL} is ready on 3 peers" in done.stdout
        done = run_process(["load", MODEL, "--peers", "9"], own)
        assert done.returncode != exit_codes.OK
        assert all(f"peer-{index} (" in done.stderr for index in range(3)) and "lower --peers" in done.stderr
        done = run_process(["load", MODEL, "--layers", "peer-2=0-2,peer-0=3-7"], own)
        assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [["peer-2", "0-2"], ["peer-0", "3-7"]]
        done = run_process(["load", MODEL, "--on", "peer-1,peer-2", "--json"], own)
        assert {one["peer"] for one in json.loads(done.stdout)["stages"]} == {peer.id for peer in peers[1:]}
