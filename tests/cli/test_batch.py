"""`exo-mesh batch`: checks a file before it sends anything, keeps every result, and goes on after an interruption."""

from __future__ import annotations

import errno
import http.server
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.batch_file import BatchFileError, ResultFile, check_requests
from exo_mesh.cli.main import main
from exo_mesh.cli.verbs import batch
from tests.cli.closed_port import closed_port


class FakeNode(http.server.ThreadingHTTPServer):
    """Answers each request with its prompt. statuses: what it answers first, by custom id in the prompt."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.statuses: dict[str, list[int]] = {}
        self.most = 0
        self.running = 0
        self.together: threading.Barrier | None = None


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeNode

    def do_GET(self) -> None:
        self._reply(200, {})

    def do_POST(self) -> None:
        node = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        assert self.headers["Idempotency-Key"].startswith("batch-")
        node.asked[prompt] += 1
        node.bodies.append(body)
        node.running += 1
        node.most = max(node.most, node.running)
        if node.together is not None:
            node.together.wait(10)
        node.running -= 1
        status = node.statuses[prompt].pop(0) if node.statuses.get(prompt) else 200
        self._reply(status, {"id": f"cmpl-{prompt}", "text": prompt} if status == 200 else {"error": {"message": "no"}})

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "FIRST_PAUSE_S", 0.001)


def line(custom_id: str, **fields: Any) -> str:
    body = {"prompt": custom_id}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **fields})


def written(path: Path, *ids: str) -> Path:
    path.write_text("\n".join(map(line, ids)) + "\n")
    return path


def run(node: FakeNode, file: Path, *more: str) -> int:
    url = f"http://127.0.0.1:{node.server_address[1]}"
    return main(["batch", str(file), "--api-url", url, "--home", str(file.parent), *more])


def results(file: Path) -> dict[str, int]:
    lines = [json.loads(text) for text in file.with_suffix(".results.jsonl").read_text().splitlines()]
    assert len({one["custom_id"] for one in lines}) == len(lines), "one result for each request"
    return {one["custom_id"]: one["response"]["status_code"] for one in lines}


def test_every_request_gets_one_result_at_low_priority(
    node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [f"r{number}" for number in range(12)]
    file = written(tmp_path / "b.jsonl", *ids)
    node.together = threading.Barrier(3)
    assert run(node, file, "--concurrency", "3") == exit_codes.OK
    assert results(file) == dict.fromkeys(ids, 200) and node.most == 3
    assert {body["service_tier"] for body in node.bodies} == {"flex"}
    assert capsys.readouterr().out.startswith("12 of 12 results in ")


def test_what_has_a_result_is_not_sent_again(node: FakeNode, tmp_path: Path) -> None:
    file = written(tmp_path / "b.jsonl", "a", "b", "c")
    with ResultFile(tmp_path / "b.results.jsonl", {"a", "b", "c"}) as before:
        before.add("b", 200, {})
    with (tmp_path / "b.results.jsonl").open("a") as stream:
        stream.write('{"id": "batch_req_2", "custom_id": "c", "resp')  # killed in the middle of a line
    assert run(node, file) == exit_codes.OK
    assert node.asked == {"a": 1, "c": 1} and results(file) == dict.fromkeys("abc", 200)


def test_an_overloaded_node_is_asked_again_and_a_refusal_is_a_result(
    node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.statuses = {"a": [429, 503], "b": [400], "c": [500, 500, 500], "d": [503] * 1000}
    file = written(tmp_path / "b.jsonl", "a", "b", "c", "d")
    assert run(node, file, "--patience", "2", "--json") == exit_codes.FAILED
    assert results(file) == {"a": 200, "b": 400, "c": 500}
    said = capsys.readouterr()
    assert {"failed": 2, "left": 1}.items() <= json.loads(said.out).items()
    assert "1 requests have no result: HTTP status 503; run it again" in said.err
    node.statuses = {}
    assert run(node, file) == exit_codes.OK and results(file)["d"] == 200


def test_a_key_that_the_node_refuses_ends_the_run(
    node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.statuses = {name: [401] for name in "abc"}
    assert run(node, written(tmp_path / "b.jsonl", "a", "b", "c"), "--concurrency", "1") == exit_codes.FAILED
    assert "refuses the requests" in capsys.readouterr().err and node.asked == {"a": 1}


def test_a_full_disk_ends_the_run_with_whole_lines_only(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "b.jsonl", "a", "b", "c", "d")
    written_bytes, real = 0, os.write

    def on_a_small_disk(fd: int, data: bytes) -> int:
        nonlocal written_bytes
        if written_bytes >= 250:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = real(fd, data[: 250 - written_bytes])
        written_bytes += size
        return size

    with monkeypatch.context() as full:
        full.setattr("exo_mesh.cli.client.batch_file.os.write", on_a_small_disk)
        assert run(node, file, "--concurrency", "1") == exit_codes.FAILED
    assert "No space left on device; 1 results are in it" in capsys.readouterr().err
    assert results(file) == {"a": 200}
    assert run(node, file) == exit_codes.OK and results(file) == dict.fromkeys("abcd", 200)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("garbage", "line 1: it is not JSON"),
        ("[" * 100_000, "line 1: it is not JSON"),
        ("[]", "line 1: it is not a JSON object"),
        (f"{line('a')}\n\n{line('a')}", 'line 3: custom_id "a" is used twice'),
        (line("", body={}), "line 1: custom_id must be a text"),
        (line("a", method="GET"), 'line 1: method must be "POST"'),
        (line("a", url="/v1/embeddings"), "line 1: url must be /v1/chat/completions or /v1/completions"),
        (line("a", body=[]), "line 1: body must be a JSON object"),
        (line("a", body={"stream": True}), "line 1: body.stream must be false"),
        ("\n\n", "has no requests"),
        ("\n".join(["x"] * 50), "line 10: it is not JSON"),
    ],
)
def test_wrong_lines_are_listed_and_nothing_is_sent(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(text)
    with pytest.raises(BatchFileError) as caught:
        check_requests(tmp_path / "b.jsonl")
    assert what in str(caught.value) and "line 11" not in str(caught.value)


def test_a_line_without_an_end_is_refused_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.cli.client.batch_file.MAX_LINE_BYTES", 100)
    (tmp_path / "b.jsonl").write_text("x" * 5000)
    with pytest.raises(BatchFileError, match="line 1: it is longer than 100 bytes"):
        check_requests(tmp_path / "b.jsonl")


def test_the_results_of_another_batch_stay_as_they_are(tmp_path: Path) -> None:
    for text in ('{"custom_id": "z", "response": {}}\n', "my notes\n"):
        (tmp_path / "r").write_text(text)
        with pytest.raises(BatchFileError, match="line 1 is not a result of this batch"):
            ResultFile(tmp_path / "r", {"a"})
        assert (tmp_path / "r").read_text() == text
    with ResultFile(tmp_path / "new", {"a"}), pytest.raises(BatchFileError, match="written by another"):
        ResultFile(tmp_path / "new", {"a"})


@pytest.mark.parametrize(
    "argv", [["--concurrency", "0"], ["--concurrency", "257"], ["--output", "b.jsonl"]], ids=" ".join
)
def test_what_cannot_work_is_refused(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "b.jsonl", "a")
    assert main(["batch", "b.jsonl", *argv]) == exit_codes.FAILED
    assert argv[0] in capsys.readouterr().err


def test_without_a_node_nothing_waits(tmp_path: Path) -> None:
    file = written(tmp_path / "b.jsonl", "a")
    assert main(["batch", str(file), "--api-url", f"http://127.0.0.1:{closed_port()}"]) == exit_codes.NO_NODE
    assert not (tmp_path / "b.results.jsonl").exists()


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"gone\.jsonl: cannot be read: No such file"):
        check_requests(tmp_path / "gone.jsonl")
    with pytest.raises(BatchFileError, match=r"out\.jsonl: cannot be written: No such file"):
        ResultFile(tmp_path / "gone" / "out.jsonl", {"a"})
