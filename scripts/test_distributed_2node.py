#!/usr/bin/env python3
"""Checks that a model runs as a tensor group of two ranks: places it, asks it, prints PASS or FAIL with the times.

    python scripts/test_distributed_2node.py                          two nodes on this machine, over TCP
    python scripts/test_distributed_2node.py --api-url http://mac1:52415 --model NAME      a mesh that runs already
    python scripts/test_distributed_2node.py --all                    also several requests, a cancelled one, the stop

Needs exo-mesh with the engine mlx in the Python that runs it. The exit code is 0 if every check passed. On a mesh that
runs already it needs the rights to place models, deletes the instance that it placed, and stops nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.local_mesh import local_mesh
from exo_mesh.errors import MeshError

DEMO = "exo-mesh-demo"
PLACE_S, ANSWER_S, FREE_S = 600.0, 300.0, 10.0
QUESTION = "Count from 7 to 20."
TOKENS = 24
AT_ONCE = 4


class CheckError(Exception):
    """A check failed; the message says what was expected and what was there."""


@dataclass
class Group:
    """The nodes of a tensor group, and the instance on them. clients: of all nodes of the mesh, by peer id."""

    client: ApiClient
    model: str
    clients: dict[str, ApiClient] = field(default_factory=dict)
    instance: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> list[str]:
        """The peer ids of the ranks, the leader first."""
        return list(self.instance["stages"][0]["group"]["peers"])

    def busy_s(self) -> list[float]:
        """Seconds that each rank has computed since it started."""
        beats = (self.clients[peer].get("/state")["stages_here"].get(self.instance["id"]) for peer in self.ranks)
        return [0.0 if beat is None else beat["busy_s"] for beat in beats]

    def ask(self, question: str, **fields: Any) -> str:
        """The greedy answer to a question."""
        body = {"model": self.model, "messages": [{"role": "user", "content": question}], "temperature": 0, **fields}
        reply = self.client.post("/v1/chat/completions", {"max_tokens": TOKENS, **body}, ANSWER_S)
        return str(reply["choices"][0]["message"]["content"])


def place(group: Group) -> str:
    """The model is split over two ranks."""
    group.instance = group.client.post("/instance", {"model": group.model, "tensor_group": 2}, PLACE_S)
    stages = group.instance["stages"]
    if len(stages) != 1 or len(stages[0].get("group", {}).get("peers", ())) != 2:
        raise CheckError(f"expected one stage of two ranks, got {stages}: {group.instance.get('reason', '')}")
    backend = stages[0]["group"]["backend"]
    return f"layers {stages[0]['layers'][0]} to {stages[0]['layers'][1]}, both ranks hold half of each, over {backend}"


def one_request(group: Group) -> str:
    """One request is answered, and both ranks compute it."""
    before = group.busy_s()
    text = group.ask(QUESTION)
    if not text:
        raise CheckError("the answer is empty")
    _until(lambda: all(now > then for now, then in zip(group.busy_s(), before, strict=True)), "both ranks to compute")
    return f"{len(text)} characters; both ranks computed"


def several_requests(group: Group) -> str:
    """Several requests at once get the answers that each gets alone."""
    questions = [f"Count from {number} to {number + 9}." for number in range(AT_ONCE)]
    alone = [group.ask(question) for question in questions]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = list(pool.map(group.ask, questions))
    if together != alone:
        raise CheckError(f"alone {alone}, together {together}")
    return f"{AT_ONCE} answers as each alone"


def cancelled_request(group: Group) -> str:
    """A client that hangs up frees the request on every rank."""
    body = {
        "model": group.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 500,
        "stream": True,
    }
    events = group.client.stream("/v1/chat/completions", body)
    next(events)
    events.close()  # type: ignore[attr-defined]

    def is_free() -> bool:
        beats = [group.clients[peer].get("/state")["stages_here"][group.instance["id"]] for peer in group.ranks]
        return all(beat["sequences"] == 0 for beat in beats)

    _until(is_free, "every rank to free the request")
    return "no rank holds the request"


def stop(group: Group) -> str:
    """The instance ends on both nodes."""
    group.client.delete(f"/instance/{group.instance['id']}", ANSWER_S)

    def is_gone() -> bool:
        return all(group.instance["id"] not in group.clients[peer].get("/state")["stages_here"] for peer in group.ranks)

    _until(is_gone, "both ranks to end")
    return "no rank is left"


CHECKS: tuple[tuple[str, Callable[[Group], str]], ...] = (
    ("the model is split over two ranks", place),
    ("one request", one_request),
)
MORE_CHECKS: tuple[tuple[str, Callable[[Group], str]], ...] = (
    ("several requests at once", several_requests),
    ("a request whose client hangs up", cancelled_request),
)


def _until(condition: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + FREE_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise CheckError(f"waited {FREE_S:g} s for {what}")
        time.sleep(0.1)


@contextmanager
def nodes(args: argparse.Namespace) -> Iterator[Group]:
    """The mesh to check: the named one, or two nodes that are started here and stopped afterwards."""
    if args.api_url:
        first = ApiClient(args.api_url, args.home)
        yield Group(first, args.model, _clients(first))
        return
    flags = ["--engine", "mlx", "--group-backend", "ring", "--context-limit", "2048"]
    if args.models_dir:
        flags += ["--models-dir", args.models_dir]
    with local_mesh(2, flags, "two-ranks", api_port=0) as mesh:
        mesh.wait_until_joined()
        yield Group(mesh.client(), args.model, _clients(mesh.client()))


def _clients(first: ApiClient) -> dict[str, ApiClient]:
    """A client of each node of the mesh, by peer id."""
    peers = first.get("/state")["view"]["peers"]
    return {peer["id"]: first.at(peer["api_url"], with_key=True) for peer in peers if peer["api_url"]}


def run(group: Group, *, everything: bool) -> bool:
    """Runs the checks in order and prints a line for each; True if all passed. The instance is gone afterwards."""
    passed = True
    try:
        for name, check in (*CHECKS, *(MORE_CHECKS if everything else ())):
            passed = passed and report(name, check, group)
    finally:
        if group.instance:
            passed = report("the instance ends", stop, group) and passed
    return passed


def report(name: str, check: Callable[[Group], str], group: Group) -> bool:
    """Runs one check and prints how it went, and how long it took."""
    began = time.monotonic()
    try:
        outcome = f"PASS  {name}: {check(group)}"
    except (CheckError, MeshError, StopIteration) as exc:
        outcome = f"FAIL  {name}: {exc or type(exc).__name__}"
    print(f"{outcome} ({time.monotonic() - began:.1f} s)", flush=True)
    return outcome.startswith("PASS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api-url", metavar="URL", help="a node of a mesh that runs already")
    parser.add_argument(
        "--home", metavar="DIR", help="the home of that node, if it is on this machine and not the usual"
    )
    parser.add_argument("--model", default=DEMO, metavar="NAME", help=f"the model to place ({DEMO})")
    parser.add_argument("--models-dir", metavar="DIR", help="where the nodes that are started here look for it")
    parser.add_argument("--all", action="store_true", help="all checks, not only one request")
    args = parser.parse_args()
    began = time.monotonic()
    try:
        with nodes(args) as group:
            passed = run(group, everything=args.all)
    except MeshError as exc:
        print(f"FAIL  {exc}")
        passed = False
    print(f"{'PASS' if passed else 'FAIL'} in {time.monotonic() - began:.1f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
