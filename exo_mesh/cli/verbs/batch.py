"""Run the requests of a JSONL file in OpenAI's batch format, and write the results to a file.

The requests have the service tier "flex" unless they name another: they run while no other request waits. After an
interruption the same command goes on with the requests that have no result yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient, HttpAnswer
from exo_mesh.cli.client.batch_file import BatchRequest, ResultFile, check_requests, requests_of
from exo_mesh.cli.parser import add_api_flags, seconds
from exo_mesh.cli.tables import print_json
from exo_mesh.errors import DeadlineError, InputError, MeshError, TransportError

MAX_CONCURRENCY = 256
DEADLINE_S = 3600.0
"""Longest wait for an answer; the node ends a request much earlier, but a model may have to be downloaded first."""

PATIENCE_S = 600.0
"""How long a request is repeated while the node is overloaded or away; then it is left to the next run."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
AGAIN = frozenset({408, 429, 502, 503, 504})
"""HTTP statuses after which a request is sent again."""

REFUSED = frozenset({401, 403})
"""HTTP statuses that every further request would get, too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds FILE, `--output`, `--concurrency`, `--patience` and the flags of the API."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the requests, one JSON object per line")
    parser.add_argument("--output", metavar="FILE", type=Path, help="results; by default FILE with .results.jsonl")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="requests at once (8)")
    parser.add_argument(
        "--patience", type=seconds, default=PATIENCE_S, metavar="SECONDS",
        help="how long a request is repeated while the node is overloaded or away (600)",
    )  # fmt: skip
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the batch. Exit code 1 if requests are left without a result, or have an error as result."""
    if not 1 <= args.concurrency <= MAX_CONCURRENCY:
        raise InputError(f"--concurrency must be from 1 to {MAX_CONCURRENCY}", param="concurrency")
    output: Path = args.output or args.file.with_suffix(".results.jsonl")
    if output.absolute() == args.file.absolute():
        raise InputError("--output names the file of the requests", param="output")
    ids = check_requests(args.file)
    client = ApiClient(args.api_url, args.home)
    client.get("/healthz")
    with ResultFile(output, ids) as results:
        batch = BatchRun(client, results, args.patience, str(output.absolute()))
        had = len(results.done)
        if had:
            print(f"{had} of {len(ids)} requests have a result already", file=sys.stderr)
        batch.run((one for one in requests_of(args.file) if one.custom_id not in results.done), args.concurrency)
    left = len(ids) - len(results.done)
    counts = {"requests": len(ids), "had_results": had, "failed": batch.failed, "left": left, "output": str(output)}
    if args.json:
        print_json(counts)
    else:
        print(f"{len(results.done)} of {len(ids)} results in {output}, {batch.failed} of this run are errors")
    if batch.last_problem and left:
        print(f"exo-mesh: {left} requests have no result: {batch.last_problem}; run it again", file=sys.stderr)
    return exit_codes.FAILED if left or batch.failed else exit_codes.OK


class BatchRun(msgspec.Struct):
    """Sends requests from several threads. failed: how many got an error as result. salt: part of the keys by which the
    node recognises a request that was sent before."""

    client: ApiClient
    results: ResultFile
    patience_s: float
    salt: str
    failed: int = 0
    last_problem: str = ""
    _error: BaseException | None = None
    _working: int = 0
    _turn: threading.Lock = msgspec.field(default_factory=threading.Lock)
    _stopped: threading.Event = msgspec.field(default_factory=threading.Event)

    def run(self, requests: Iterator[BatchRequest], concurrency: int) -> None:
        """Sends all requests, at most `concurrency` at once. Raises the first error that concerns all of them."""
        # daemons: Ctrl-C does not wait for answers, and the node cancels the requests when the connections close
        self._working = concurrency
        for _ in range(concurrency):
            threading.Thread(target=self._work, args=(requests,), daemon=True).start()
        try:
            self._stopped.wait()
        finally:
            self._stopped.set()
            self._turn.acquire()  # no thread is in the middle of a line, and none begins another
        if self._error is not None:
            raise self._error

    def _work(self, requests: Iterator[BatchRequest]) -> None:
        try:
            while not self._stopped.is_set():
                with self._turn:
                    request = next(requests, None)
                if request is None:
                    return
                self._finish(request)
        except Exception as exc:  # noqa: BLE001 - `run` raises it
            self._error = self._error or exc
            self._stopped.set()
        finally:
            with self._turn:
                self._working -= 1
                if not self._working:
                    self._stopped.set()

    def _finish(self, request: BatchRequest) -> None:
        """Sends a request until it has a result, or until its time is up."""
        give_up_at, pause_s, breakdowns = time.monotonic() + self.patience_s, FIRST_PAUSE_S, 0
        body = {"service_tier": "flex", **request.body}
        if "priority" in request.body and "service_tier" not in request.body:
            del body["service_tier"]
        while not self._stopped.is_set():
            wait_s: float | None = None
            try:
                answer = self.client.exchange(request.url, body, DEADLINE_S, {"Idempotency-Key": self._key(request)})
            except (TransportError, DeadlineError) as exc:
                problem = str(exc)
            else:
                breakdowns += answer.status == 500
                if answer.status not in AGAIN and (answer.status != 500 or breakdowns > 2):
                    self._note(request, answer)
                    return
                problem, wait_s = f"HTTP status {answer.status}", answer.retry_after_s
            self.last_problem = problem
            if time.monotonic() >= give_up_at:
                return
            self._stopped.wait(min(LONGEST_PAUSE_S, max(pause_s, wait_s or 0.0)))
            pause_s *= 2

    def _key(self, request: BatchRequest) -> str:
        said = json.dumps([self.salt, request.custom_id, request.url, request.body]).encode()
        return f"batch-{hashlib.sha256(said).hexdigest()[:48]}"

    def _note(self, request: BatchRequest, answer: HttpAnswer) -> None:
        if answer.status in REFUSED:
            raise MeshError(f"the node refuses the requests: {_message(answer.body)}")
        with self._turn:
            if self._stopped.is_set():
                return
            self.failed += answer.status != 200
            self.results.add(request.custom_id, answer.status, answer.body)


def _message(body: Any) -> str:
    try:
        return str(body["error"]["message"])
    except (KeyError, TypeError):
        return "it says no reason"
