"""pull, list, show, rm, search and the cards, against a server over a scripted mesh."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.cli import exit_codes
from exo_mesh.cli.main import main
from exo_mesh.cli.verbs.models import facts, listing, pull, show, waiting
from exo_mesh.cli.verbs.models.bars import Bars, figures, label, phase_row
from exo_mesh.domain.download import DownloadEntry, DownloadInfo, DownloadState, entry_of
from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from tests.api.scripted_mesh import ScriptedMesh, ScriptedModels, served
from tests.text.text_models import write_text_model

HUB_ID = "org/at-hub"
ALPHA = entry_of("peer1", "alpha", DownloadInfo(HUB_ID, DownloadState.ONGOING, 0, 1000, 250.0, 4.0, (0, 14)))


@dataclass
class FetchingMesh(ScriptedMesh):
    """Downloads go on by a quarter each time somebody looks. failing: peers whose downloads end half-way."""

    failing: tuple[str, ...] = ()
    cancelled: list[tuple[str, str]] = field(default_factory=list)
    looks: int = 0
    shown: threading.Event = field(default_factory=threading.Event)
    """Somebody looks for the second time, and has shown by then what the first look found."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.services = replace(self.services, models=FetchingModels(self))  # type: ignore[arg-type]

    def look(self) -> None:
        self.looks += 1
        if self.looks > 1:
            self.shown.set()
        self.progress = [self._next(entry) for entry in self.progress]

    def _next(self, entry: DownloadEntry) -> DownloadEntry:
        done = min(entry.total_bytes, entry.done_bytes + entry.total_bytes // 4)
        if entry.peer_id in self.failing and done > entry.total_bytes // 2:
            return replace(entry, state=DownloadState.FAILED, reason="the disk is full", remedy="make room")
        state = DownloadState.COMPLETED if done == entry.total_bytes else DownloadState.ONGOING
        return replace(entry, state=state, done_bytes=done, from_hub_bytes=done)


class FetchingModels(ScriptedModels):
    def downloads(self) -> list[DownloadEntry]:
        self._mesh.look()  # type: ignore[attr-defined]
        return super().downloads()

    async def cancel_download(self, peer: str, model: str) -> bool:
        self._mesh.cancelled.append((peer, model))  # type: ignore[attr-defined]
        return await super().cancel_download(peer, model)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text-model"))


@pytest.fixture
def mesh(model_dir: Path) -> FetchingMesh:
    return FetchingMesh(model_dir)


@pytest.fixture
def say(mesh: FetchingMesh, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Say]:
    """Run a verb against a server in a thread: (exit code, standard output, standard error)."""
    monkeypatch.setattr(pull, "_POLL_S", 0.01)
    monkeypatch.setattr(pull, "_SETTLE_S", 0.1)
    monkeypatch.setattr(waiting, "_POLL_S", 0.01)
    monkeypatch.delenv("COLUMNS", raising=False)
    url: list[str] = []
    ready, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        options = ApiOptions(keep_alive_s=0.05, access=AccessPolicy(open_admin=True))
        async with served(mesh, options) as server:
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


Say = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("verb", [["pull"], ["models", "pull"]])
def test_pull_fetches_and_tells_of_each_tenth(say: Say, mesh: FetchingMesh, verb: list[str]) -> None:
    code, shown, complaints = say(*verb, HUB_ID, "--peers", "alpha,beta", "--whole")
    assert (code, complaints) == (exit_codes.OK, "")
    lines = [line for line in shown.splitlines() if line.startswith("name of alpha")]
    assert [line.partition("at-hub: ")[2][:5] for line in lines] == ["25 % ", "50 % ", "75 % ", "100 B"]
    assert lines[-1].endswith("done (100 B from the hub, 0 B from peers)")
    assert [entry.is_whole for entry in mesh.progress] == [True, True]


def test_run_of_a_directory_that_is_not_there_says_so(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for name, complaint in (("./nope", "does not exist"), ("./file", "is neither a directory nor a GGUF file")):
        code, shown, complaints = say("run", name, "Hi")
        assert (code, shown) == (exit_codes.FAILED, "")
        assert complaints == f"exo-mesh: {name} {complaint} ({tmp_path / name})\n"


def test_pull_of_gguf_says_where_the_files_go(say: Say, mesh: FetchingMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(model: str, *, peers: Sequence[str] = (), whole: bool = False) -> list[DownloadEntry]:
        info = DownloadInfo("org/big-GGUF-Q4_K_M", DownloadState.PENDING, 0, 100, is_whole=True)
        mesh.progress = [entry_of("peer1", "alpha", info)]
        return mesh.progress

    monkeypatch.setattr(mesh.services.models, "start_download", start)
    code, shown, complaints = say("pull", "org/big-GGUF:q4_k_m")
    assert (code, complaints) == (exit_codes.OK, "")
    first, *_, last = shown.splitlines()
    assert first.startswith("GGUF: all its files are downloaded to alpha (--peers chooses others)")
    assert last.startswith("alpha: org/big-GGUF-Q4_K_M: 100 B, done")


def test_pull_with_json_prints_how_each_download_ended(say: Say) -> None:
    code, shown, _ = say("pull", HUB_ID, "--json")
    assert code == exit_codes.OK
    assert [(entry["model"], entry["state"]) for entry in json.loads(shown)] == [(HUB_ID, "completed")]


def test_a_pull_that_fails_says_where_and_what_helps(say: Say, mesh: FetchingMesh) -> None:
    mesh.failing = ("beta",)
    code, shown, complaints = say("pull", HUB_ID, "--peers", "alpha,beta")
    assert code == exit_codes.FAILED
    assert complaints == f"exo-mesh: name of beta could not download {HUB_ID}: the disk is full; make room\n"
    assert "name of alpha: org/at-hub: 100 B, done" in shown


def test_ctrl_c_ends_the_downloads_and_says_how_to_go_on(
    say: Say, mesh: FetchingMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull.time, "sleep", interrupt)
    code, _, complaints = say("pull", HUB_ID, "--peers", "alpha")
    assert code == exit_codes.INTERRUPTED
    assert "the downloaded part is kept, and `exo-mesh pull org/at-hub --peers alpha --api-url" in complaints
    assert mesh.cancelled == [("alpha", HUB_ID)]


@pytest.mark.parametrize(
    ("shown", "complaint"),
    [([], f"no peer has started to download {HUB_ID}"), ([ALPHA], "cancelled, or the peer has gone")],
)
def test_a_pull_does_not_wait_for_a_peer_that_is_gone(
    say: Say, monkeypatch: pytest.MonkeyPatch, shown: list[DownloadEntry], complaint: str
) -> None:
    answers = [[], [], shown]  # before, when it begins, and at the first look
    monkeypatch.setattr(pull, "_GONE_S", 0.1)
    monkeypatch.setattr(FetchingModels, "downloads", lambda self: answers.pop() if answers else [])
    answers.reverse()
    code, _, complaints = say("pull", HUB_ID)
    assert code == exit_codes.FAILED and complaint in complaints


def test_the_end_of_an_earlier_download_is_not_that_of_this_one() -> None:
    failed = {**ALPHA.describe(), "state": "failed", "reason": "no network"}
    other = {**failed, "peer_id": "peer2"}
    follower = pull._Follower(HUB_ID, before=[failed, other], started=[failed])
    follower._take([failed, other, {**failed, "model": "other"}], follower._began)
    assert follower.seen == {}, "the view is not up to date yet"
    follower._take([{**failed, "state": "ongoing"}], follower._began)
    assert follower.seen["peer1"]["state"] == "ongoing"
    follower._take([failed, other], follower._began + pull._SETTLE_S)
    assert follower.seen["peer1"]["reason"] == "no network", "it has failed again"
    assert "peer2" not in follower.seen, "nobody asked it this time"


@pytest.mark.parametrize("verb", [["list"], ["ls"], ["models"], ["models", "list"]])
def test_list_has_a_row_for_each_model(say: Say, mesh: FetchingMesh, verb: list[str]) -> None:
    mesh.unusable["broken"] = "it has no tokenizer.json"
    code, shown, _ = say(*verb)
    assert code == exit_codes.OK
    assert shown.splitlines()[0].split() == [
        "MODEL",
        "SIZE",
        "QUANT",
        "CONTEXT",
        "PEERS",
        "LAYERS",
        "LAST",
        "USED",
        "FITS",
    ]
    assert "exo-mesh-demo" in shown and "peer1" in shown and "unusable: it has no tokenizer.json" in shown


@pytest.mark.parametrize("verb", [["list", "--all"], ["models", "--all"], ["models", "--all", "list"]])
def test_list_all_has_models_of_cards_too(say: Say, mesh: FetchingMesh, verb: list[str]) -> None:
    _, shown, _ = say(*verb)
    row = next(line for line in shown.splitlines() if line.startswith(HUB_ID))
    assert row.split() == [HUB_ID, "?", "?", "?", "-", "0/4", "-", "?"]


@pytest.mark.parametrize("argv", [["models", "--json", "list"], ["models", "list", "--json"], ["models", "--json"]])
def test_a_flag_counts_before_and_after_the_second_word(say: Say, argv: list[str]) -> None:
    assert json.loads(say(*argv)[1])[0]["id"] == "exo-mesh-demo"


def test_show_looks_a_model_up_at_the_hub(say: Say, mesh: FetchingMesh) -> None:
    code, shown, _ = say("show", HUB_ID)
    assert code == exit_codes.OK and shown.startswith(f"{HUB_ID}\n  size ")
    assert json.loads(say("show", HUB_ID, "--json")[1])["id"] == HUB_ID
    assert say("show", "org/none")[::2] == (exit_codes.FAILED, "exo-mesh: no peer has org/none\n")


def test_search_shows_what_the_hub_has(say: Say, mesh: FetchingMesh) -> None:
    code, shown, _ = say("search", "at-hub")
    assert code == exit_codes.OK
    assert re.split(r"\s{2,}", shown.splitlines()[1]) == [HUB_ID, "1.0 GB", "0", "0", "open",
                                                           "no: 1.0 GB of weights, 0 B usable"]  # fmt: skip
    mesh.offline = True
    code, _, complaints = say("search", "x")
    assert code == exit_codes.FAILED and "this node is offline" in complaints


def test_rm_deletes_files_and_models_delete_a_card(say: Say, mesh: FetchingMesh) -> None:
    assert say("rm", "exo-mesh-demo", "--peers", "alpha")[:2] == (0, "deleted exo-mesh-demo from peer1; 1.5 MB freed\n")
    assert mesh.deleted == [("exo-mesh-demo", ("alpha",))]
    code, _, complaints = say("rm", "org/none")
    assert code == exit_codes.FAILED and "org/none" in complaints
    assert say("models", "add", "org/new@v1")[0] == exit_codes.OK
    assert say("models", "delete", "org/new@v1")[:2] == (0, "deleted the card of org/new@v1\n")
    assert say("models", "delete", "org/new@v1")[0] == exit_codes.FAILED


def test_run_shows_downloads_until_the_answer_begins(say: Say, mesh: FetchingMesh) -> None:
    async def once_seen(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield Progress("fetching", 0, 1000)
        await asyncio.to_thread(mesh.shown.wait, 10)
        async for event in mesh.echo(request):
            yield event

    mesh.script = once_seen
    mesh.progress = [ALPHA]
    code, shown, complaints = say("run", "exo-mesh-demo", "Hi")
    assert (code, shown) == (exit_codes.OK, "Hello, world!\n")
    assert complaints.startswith("alpha: org/at-hub, layers 0-13: 25 % of 1.0 KB, 250 B/s, 4 s left\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_per_peer_and_a_line_for_what_is_waited_for() -> None:
    screen = Terminal()
    bars = Bars(screen, keeps=True)
    first = replace(ALPHA, done_bytes=400).describe()
    bars.show([first, {**first, "peer_id": "peer2", "peer_name": "beta\x1b[2J", "layers": (14, 28)}])
    bars.show([], "loading 3/8")
    bars.show([{**first, "done_bytes": 1000, "state": "completed"}])
    bars.close()
    shown = screen.getvalue()
    assert "alpha: org/at-hub, layers 0-13" in shown and "done (0 B from the hub" in shown
    assert "\x1b[2J" not in shown, "what peers are called moves no cursor"


@pytest.mark.parametrize(
    ("comment", "row"),
    [("loading 3/8", ("loading", 3, 8)), ("prefill 40 %", ("prefill", 40, 100)), ("queued 2", ("queued 2", 0, 0))],
)
def test_what_a_stream_says_becomes_a_bar(comment: str, row: tuple[str, int, int]) -> None:
    assert phase_row(comment) == row


def test_figures_of_a_download() -> None:
    assert label(ALPHA.describe()) == "alpha: org/at-hub, layers 0-13"
    assert figures(replace(ALPHA, done_bytes=250).describe()) == "25 % of 1.0 KB, 250 B/s, 4 s left"
    assert figures(replace(ALPHA, state=DownloadState.FAILED, reason="no disk").describe()) == "failed: no disk"
    assert figures(replace(ALPHA, state=DownloadState.PENDING, total_bytes=0).describe()) == "waiting"
    assert figures(replace(ALPHA, state=DownloadState.COMPLETED, total_bytes=0).describe()) == "complete already"


def test_facts_of_a_model() -> None:
    state: dict[str, Any] = {
        "view": {"peers": [{"id": "a"}, {"id": "b"}]},
        "telemetry": {"a": {"usable_bytes": 6}, "b": {"usable_bytes": 5}},
    }
    fits = [facts.fit_text(size, state) for size in (0, 6, 11, 12)]
    assert fits == ["?", "yes, 1 peer", "yes, 2 peers", "no: 12 B of weights, 11 B usable"]
    first, second = state["view"]["peers"]
    first["model_engines"] = {"m": [], "n": ["numpy"]}
    fits = [facts.fit_text(size, state, name="m") for size in (0, 5, 6)]
    assert fits == ["?", "yes, 1 peer", "no: 6 B of weights, 5 B usable"], "only the second peer may run it"
    second["model_engines"] = {"m": []}
    assert [facts.fit_text(5, state, name=name) for name in "mn"] == [
        "no: no engine of the peers runs it", "yes, 1 peer",
    ]  # fmt: skip
    model = {"id": "m", "peers": ["a", "b"]}
    peers = [{"id": "a", "name": "alpha"}, {"id": "b", "name": "beta", "partial_models": ["m"]}]
    half = {"peer_id": "b", "model": "m", "layers": [0, 14], "state": "completed"}
    assert facts.held_layers(model, {"view": {"peers": peers}}, [half]) == "alpha all, beta 0-13"
    failed = half | {"state": "failed"}
    assert facts.held_layers(model, {"view": {"peers": peers}}, [failed]) == "alpha all, beta a part"
    assert facts.held_layers(model, {"view": {"peers": peers}}, []) == "alpha all, beta a part"
    assert facts.held_layers(model, {"view": {"peers": peers[:1]}}, []) == "all"
    refused = {"width": 1, "refused": {"message": "too large"}}
    assert facts.previewed_fit([refused]) == "no: too large"
    assert facts.previewed_fit([refused, {"width": 2, "context_limit": 64}]) == "yes: 2 peers, context 64 tokens"
    assert [facts.ago(then, 200_000) for then in (None, 199_999, 0)] == ["-", "1 s ago", "2 d ago"]


def test_a_model_of_a_server_has_no_size_and_no_layers_here() -> None:
    writer = {
        "id": "writer", "num_bytes": 0, "num_layers": 0, "served_by": [{"engine": "openai", "server": "a:1"}],
        "peers": ["p"], "used_at": None, "fits": "served", "context_length": 4096,
    }  # fmt: skip
    state = {"view": {"peers": [{"id": "p", "name": "alice"}], "instances": []}, "telemetry": {}}
    row = list(map(str, listing._row(writer, state, [])))
    assert dict(zip(listing.HEADER, row, strict=True)) == {
        "MODEL": "writer", "SIZE": "-", "QUANT": "?", "CONTEXT": "4096", "PEERS": "alice", "LAYERS": "-",
        "LAST USED": "-", "FITS": "served",
    }  # fmt: skip
    assert show._size(writer) == "nothing of it is in the mesh: a model server has it"
    assert not facts.is_served({**writer, "num_bytes": 5}), "peers have its files, too"


def test_show_names_the_peers_that_have_not_checked_their_parts() -> None:
    state = {"view": {"peers": [{"id": "1", "unverified": ["org/m"]}, {"id": "2", "unverified": []}, {"id": "3"}]}}
    (text,) = facts.unverified({"id": "org/m"}, state, {"1": "alice"})
    assert text == "on alice: not yet compared with the digests of the files"
    assert facts.unverified({"id": "other"}, state, {}) == []
