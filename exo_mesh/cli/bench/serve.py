"""Measure throughput and latency of a mesh under many requests at once.

Starts a mesh of real nodes on this machine, or uses a running one with --url. For each load it reports tokens per
second in total, time to first token, time between tokens, and the share of time that each stage was busy; the rest, in
which a stage waits for frames, is the bubble. If the nodes measure energy, it also reports joules per prompt and per
token (docs/reference/power.md). --against-one gives the same load to one node, too. --compare single,group,ring runs
the same model on one node, on N nodes as one tensor group, and on N nodes as stages. --scenario reads all of this from
a file; `exo-mesh bench compare` compares the JSON of two runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh import __version__
from exo_mesh.cli.bench.energy import SETTLE_S, EnergyCounters, energy_per_token, read_energy
from exo_mesh.cli.bench.engines import parse_size
from exo_mesh.cli.bench.load import LoadResult, Question, closed_loop, open_loop, timed_requests
from exo_mesh.cli.bench.result import BenchResult, merged
from exo_mesh.cli.bench.scenario import MODEL, Scenario, ServeLoad, scenario_of
from exo_mesh.cli.bench.serve_report import NAMES, breakdown_table, check_plot, compare, plot, table
from exo_mesh.cli.client.api_client import base_url
from exo_mesh.cli.client.child_node import ChildNode, ReadyNode
from exo_mesh.cli.client.local_mesh import local_mesh
from exo_mesh.cli.model_paths import is_gguf
from exo_mesh.domain.group_placement import REDUCES_PER_LAYER
from exo_mesh.domain.placement import POLICIES
from exo_mesh.settings.config import ConfigError
from exo_mesh.weights.gguf_table import without_shard
from exo_mesh.weights.random_checkpoint import model_of_size, write_checkpoint

LOAD_DEADLINE_S = 600.0
WARM_UP_TOKENS, WARM_UP_REQUESTS = 16, 4
REPORTS_S = 1.2
"""Longer than two reports of a stage, which come twice a second."""


class BenchModel(msgspec.Struct, frozen=True):
    """The model of a benchmark. name: its name at every peer. models_dir: additional directory for the peers, "" if
    they find the model anyway. path: the model's directory or GGUF file, if there is one on this machine."""

    name: str
    models_dir: str = ""
    path: Path | None = None


class System(msgspec.Struct, frozen=True):
    """A system to compare: its URLs, the question (without lengths), and its nodes, if they are ours and report how
    busy they are. num_reduces: all-reduces of a tensor group per step."""

    question: Question
    urls: Sequence[str]
    nodes: Sequence[ReadyNode] = ()
    num_reduces: int = 0


class Rival(msgspec.Struct, frozen=True):
    """A server of another project that gets the same load. key: of its runs in the result; name: for people.

    start: a context manager that runs the server with the model.
    """

    key: str
    name: str
    start: Callable[[BenchModel], AbstractContextManager[System]]


def add_parser(subparsers: Any) -> None:
    """Adds the verb `exo-mesh bench serve`."""
    parser = subparsers.add_parser("serve", help="throughput and latency of a mesh of real nodes", description=__doc__)
    add_flags(parser)
    parser.set_defaults(run=run)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the mesh, the load and the output. Those without a value leave what the scenario says."""
    parser.add_argument(
        "--scenario", metavar="FILE|NAME", help="a scenario file, or a shipped one; flags replace its fields"
    )
    parser.add_argument("--peers", type=int, metavar="N", help="nodes, one stage each (default 2)")
    parser.add_argument("--url", default="", metavar="URL", help="measure this mesh instead of starting one")
    parser.add_argument("--engine", metavar="NAME", help="engine of the stages")
    parser.add_argument("--engine-option", action="append", metavar="K=V", help="an option of the engine")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="MODEL", help=f"model, directory or GGUF file (default {MODEL})")
    what.add_argument("--random", metavar="SIZE", help="instead: a random Llama with this many weights, such as 100M")
    parser.add_argument("--streams", metavar="N,…", help="requests at once (default 1,2,4,8)")
    parser.add_argument("--rate", metavar="R,…", help="instead: R requests per second, without waiting for answers")
    parser.add_argument("--requests", type=int, metavar="N", help="requests of a run (default: 2 per stream, or 32)")
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens of a prompt (default 32)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of an answer (default 128)")
    parser.add_argument(
        "--grid", metavar="PxT,…", help="instead of both: prompt x answer tokens, such as 32x128,512x64"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="measure each load N times, in turns (default 1)")
    parser.add_argument("--repeat", action="store_true", help="send the prompts of a load once before it is measured")
    parser.add_argument("--breakdown", action="store_true", help="also measure what each part of a request takes")
    parser.add_argument("--policy", choices=POLICIES, help="placement (default throughput)")
    parser.add_argument("--pin", action="store_true", help="pin stage i to core i (Linux)")
    parser.add_argument("--compare", metavar="WHAT,…", help="systems to measure: single, group, ring (default: ring)")
    parser.add_argument("--against-one", action="store_true", help="also measure one node, and show the ratio")
    parser.add_argument("--plot", metavar="FILE", help="draw the results as .svg, .png or .pdf (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, *rivals: Rival) -> BenchResult:
    """Measures what the flags and the scenario describe, in turns with `rivals`, and draws the picture of --plot."""
    scenario = scenario_of(args)
    args.url = base_url(args.url) if args.url else ""
    _check(args, scenario, rivals)
    with _model(scenario, args.url) as model:
        result: dict[str, Any] = {
            "bench": "serve",
            "scenario": Path(args.scenario).stem if args.scenario else "",
            "version": __version__,
            "recorded": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "peers": scenario.peers,
            "engine": scenario.engine,
            "engine_options": scenario.engine_options,
            "model": scenario.random or model.name,
            "cores": os.cpu_count(),
            "rounds": scenario.rounds,
            "repeat": scenario.repeat,
        }
        result |= _measure(scenario, args.url, model, rivals)
    names = NAMES | {rival.key: rival.name for rival in rivals}
    compare(result, names)
    if args.plot:
        plot(result, Path(args.plot), names)
    return BenchResult(result, "\n\n".join(filter(None, [table(result, names), breakdown_table(result, names)])))


def _check(args: argparse.Namespace, scenario: Scenario, rivals: Sequence[Rival]) -> None:
    """Raises ConfigError for flags that cannot work, before anything is measured."""
    if args.url and (scenario.random or scenario.compare != ("ring",) or rivals):
        raise ConfigError(
            "--url measures a running mesh, while --random, --compare and --against-… start one here: use one of them"
        )
    if args.plot:
        check_plot(Path(args.plot))


def _compared(scenario: Scenario) -> dict[str, tuple[int, bool]]:
    """The systems to start: by key of the result (number of nodes, is a tensor group)."""
    peers = scenario.peers
    known = {"single": ("one", 1, False), "group": ("group", peers, True), "ring": ("runs", peers, False)}
    return {key: (peers, grouped) for name, (key, peers, grouped) in known.items() if name in scenario.compare}


@contextlib.contextmanager
def _model(scenario: Scenario, url: str) -> Iterator[BenchModel]:
    """The named model, or a random checkpoint that is deleted at the end."""
    if scenario.random:
        with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as scratch:
            made = write_checkpoint(Path(scratch) / "random", model_of_size(parse_size(scenario.random)), repeat=True)
            yield BenchModel(made.name, scratch, made)
    elif not url and is_gguf(file := Path(scenario.model_name).expanduser()):
        yield BenchModel(without_shard(file.name), str(file.absolute().parent), file.absolute())
    elif not url and (directory := Path(scenario.model_name).expanduser()).is_dir():
        # peers know the model by this directory's name, so it must not be "." or a link
        directory = directory.resolve()
        yield BenchModel(directory.name, str(directory.parent), directory)
    else:
        yield BenchModel(scenario.model_name)


def _measure(
    scenario: Scenario, url: str, model: BenchModel, rivals: Sequence[Rival]
) -> dict[str, list[dict[str, Any]]]:
    """Measures all systems with all loads; returns the runs by key.

    The systems take turns for each round of a load, so that a slowdown of the machine affects all; the others are idle
    meanwhile. Each round has prompts of its own, so that none has been computed before, unless the scenario repeats.
    """
    loads = list(scenario.loads())
    with contextlib.ExitStack() as stack:
        if url:
            running = ReadyNode({"api_url": url, "home": None, "tls_cert": None})
            systems = {"runs": System(Question(model.name, 0, 0), (url,), [running])}
        else:
            systems = {
                key: stack.enter_context(_ring(scenario, model, peers, grouped))
                for key, (peers, grouped) in _compared(scenario).items()
            }
        systems |= {rival.key: stack.enter_context(rival.start(model)) for rival in rivals}
        longest = max(load.prompt for load in loads)
        for system in systems.values():
            warm_up = replace(system.question, prompt=longest, tokens=WARM_UP_TOKENS)
            asyncio.run(closed_loop(system.urls, warm_up, 2, WARM_UP_REQUESTS))
        rounds: dict[str, list[list[dict[str, Any]]]] = {key: [[] for _ in loads] for key in systems}
        first = WARM_UP_REQUESTS
        for index, load in enumerate(loads):
            if scenario.repeat:
                for system in systems.values():
                    _run(system, load, first, with_parts=False)
            for _ in range(scenario.rounds):
                for key, system in systems.items():
                    with_parts = scenario.breakdown and bool(system.nodes)
                    rounds[key][index].append(_run(system, load, first, with_parts=with_parts))
                first += 0 if scenario.repeat else load.requests
            first += load.requests
        return {key: [merged(figures) for figures in of_loads] for key, of_loads in rounds.items()}


@contextlib.contextmanager
def _ring(scenario: Scenario, model: BenchModel, peers: int, grouped: bool) -> Iterator[System]:
    flags = ["--engine", scenario.engine, *(["--group-backend", "ring"] if grouped else [])]
    if model.models_dir:
        flags += ["--models-dir", model.models_dir]
    for name, value in scenario.engine_options.items():
        flags += ["--engine-option", f"{name}={value}"]
    with local_mesh(peers, flags, f"bench-{peers}", api_port=0) as mesh:
        mesh.wait_until_joined()
        wish = {"model": model.name, "min_peers": peers, "policy": scenario.policy}
        wish |= {"tensor_group": peers} if grouped else {}
        instance = mesh.client().post("/instance", wish, LOAD_DEADLINE_S)
        if scenario.pin:
            _pin(_ranks(mesh.children) if grouped else [stage["pid"] for stage in instance["stages"]])
        num_layers = sum(stop - start for start, stop in (stage["layers"] for stage in instance["stages"]))
        num_reduces = REDUCES_PER_LAYER * num_layers if grouped else 0
        yield System(Question(model.name, 0, 0), tuple(mesh.api_urls), mesh.children, num_reduces)


def _ranks(nodes: Sequence[ChildNode]) -> list[int]:
    """The pids of all runners, ordered by node. Needed because a plan names only the leader of a group."""
    return [process.pid for node in nodes for process in node.runners()]


def _pin(pids: Sequence[int]) -> None:
    """Pins every thread of stage i to one core, so that each stage computes with exactly one core."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--pin: this system cannot pin a process to a core; leave it out")
    cores = sorted(os.sched_getaffinity(0))
    for index, pid in enumerate(pids):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {cores[index % len(cores)]})


def _run(system: System, load: ServeLoad, first: int, *, with_parts: bool) -> dict[str, Any]:
    """One round of a load. first: number of its first prompt. with_parts: then send it again without streaming, to
    measure the parts of each request; tracing every request costs the driver time, so this does not change the other
    figures."""
    asked = replace(system.question, prompt=load.prompt, tokens=load.tokens)
    before = _readings(system.nodes)
    if load.is_rate:
        result: LoadResult = asyncio.run(open_loop(system.urls, asked, load.amount, load.requests, first))
    else:
        result = asyncio.run(closed_loop(system.urls, asked, int(load.amount), load.requests, first))
    after = _readings(system.nodes)
    shares = [(now - was) / result.wall_s for was, now in zip(before.busy_s, after.busy_s, strict=False)]
    busy = [round(min(1.0, share), 3) for share in shares]
    figures = {**load.describe(), **result.describe(), "busy": busy, "bubble": [round(1 - share, 3) for share in busy]}
    if (joules := energy_per_token(before.energy, after.energy)) is not None:
        figures["energy"] = joules
    if after.memory_bytes:
        figures["memory_bytes"] = after.memory_bytes
    if after.all_reduce_s and (itl_s := figures["itl_s"].get("p50")):
        figures["all_reduce_share"] = round(system.num_reduces * after.all_reduce_s[0] / itl_s, 3)
    if with_parts:
        streams = load.requests if load.is_rate else int(load.amount)
        figures["breakdown"] = asyncio.run(timed_requests(system.urls, asked, streams, load.requests))
    return figures


class _Readings(msgspec.Struct, frozen=True):
    """Counters of each stage or rank, in the order of the nodes.

    busy_s: seconds in its engine so far. memory_bytes: held now. all_reduce_s: of a few bytes, in a tensor group.
    energy: used by the rings so far.
    """

    busy_s: list[float]
    memory_bytes: list[int]
    all_reduce_s: list[float]
    energy: EnergyCounters


def _readings(nodes: Sequence[ReadyNode]) -> _Readings:
    """Reads the counters from the nodes' metrics. First waits for a report of each stage, since metrics show the last
    one; nothing is computed between two runs."""
    if nodes:
        time.sleep(REPORTS_S)
    clients = [node.api for node in nodes]
    texts = [client.text("/metrics") for client in clients]
    energy = read_energy(texts)
    if energy.is_measured:
        time.sleep(SETTLE_S)
        energy = read_energy([client.text("/metrics") for client in clients])
    busy_s, held, reduce_s = (
        [value for text in texts for value in _values(text, name)]
        for name in ("stage_busy_seconds_total", "stage_memory_bytes", "group_all_reduce_seconds")
    )
    return _Readings(busy_s, [int(value) for value in held], reduce_s, energy)


def _values(text: str, name: str) -> list[float]:
    """All values of an exo_mesh_ metric in the text of /metrics."""
    lines = [line for line in text.splitlines() if line.startswith(f"exo_mesh_{name}{{")]
    return [float(line.rsplit(" ", 1)[1]) for line in lines]
