"""A mesh in memory: the real code on a fake clock. docs/how-it-works/scale.md explains the figures.

python -m tools.simulate mesh --peers 3 16 200 --seed 1       how fast a mesh agrees, and what it costs each peer
python -m tools.simulate ballots --schedules 10000 --jobs 4   plans through deaths, partitions and standing still
python -m tools.simulate router --histories 1000 --jobs 2     requests, replicas and losses: the choice of instances
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

from tools.simulate import ballots, router
from tools.simulate.mesh import quiet, report

HEAD = (
    "peers  seed  join_s  msg/s   B/s  busiest B/s  change_s  kill_s  silent_s  heal_s  "
    "dropped (heal)  false (5% loss)  false (stalls)  disagree  wall_s"
)


def show_meshes(peers: list[int], seed: int, brief: bool) -> int:
    """Prints one row per size; returns the number of disagreements."""
    print(HEAD)
    disagreements = 0
    for count in peers:
        began = time.perf_counter()
        row = report(count, seed, brief=brief)
        disagreements += row.disagreements
        cells = (
            f"{row.peers:5d} {row.seed:5d} {row.join_s:7.2f} {row.steady_messages:6.1f} {row.steady_bytes:5.0f}",
            f"{row.busiest_bytes:12.0f} {row.change_s:9.2f} {row.kill_s:7.2f} {row.silent_s:9.2f} {row.heal_s:7.2f}",
            f"{row.heal_false:15d} {row.loss_false:16d} {row.stalled_false:15d} {row.disagreements:9d}",
            f"{time.perf_counter() - began:7.1f}",
        )
        print(*cells, flush=True)
    return disagreements


def show_ballots(first_seed: int, schedules: int, jobs: int) -> int:
    """Prints every schedule with a problem, and the sums; returns the number of problems."""
    num_rings = num_stages = num_bad = done = 0
    longest_s = 0.0
    seeds = range(first_seed, first_seed + schedules)
    with multiprocessing.get_context("spawn").Pool(jobs, quiet) as pool:
        for outcome in pool.imap_unordered(ballots.play, seeds, chunksize=10):
            done += 1
            num_rings += outcome.rings
            num_stages += outcome.stages
            longest_s = max(longest_s, outcome.settled_s)
            num_bad += bool(outcome.problems)
            for problem in outcome.problems:
                print(f"seed {outcome.seed} ({outcome.peers} peers): {problem}", flush=True)
            if done % 100 == 0 or done == schedules:
                print(
                    f"{done} schedules, {num_rings} rings begun, {num_stages} stages started, {num_bad} schedules with "
                    f"a problem; the last misfortune was forgotten after at most {longest_s:.1f} s",
                    flush=True,
                )
    return num_bad


def show_router(first_seed: int, histories: int, jobs: int) -> int:
    """Prints every history with a problem, and the sums; returns the number of problems."""
    num_bad = requests = placed = given_back = losses = reversals = most_reversals = 0
    seeds = range(first_seed, first_seed + histories)
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for history in pool.imap(router.play, seeds, chunksize=10):
            num_bad += bool(history.problems)
            for problem in history.problems[:3]:
                print(f"seed {history.seed}: {problem}", flush=True)
            requests, losses = requests + len(history.ttft_s), losses + history.losses
            placed, given_back = placed + history.placed, given_back + history.given_back
            reversals += history.reversals
            most_reversals = max(most_reversals, history.reversals)
    print(
        f"{histories} histories, {requests} requests, {losses} lost instances, {placed} instances placed and "
        f"{given_back} given back; placed again under the same load {reversals} times, at most {most_reversals} times "
        f"in one history; {num_bad} histories with a problem"
    )
    return num_bad


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    mesh = verbs.add_parser("mesh")
    mesh.add_argument("--peers", type=int, nargs="+", default=[3, 16, 50, 200])
    mesh.add_argument("--seed", type=int, default=1)
    mesh.add_argument("--brief", action="store_true", help="no partition, loss or stalls: for a thousand peers")
    plans = verbs.add_parser("ballots")
    plans.add_argument("--schedules", type=int, default=10_000)
    plans.add_argument("--first-seed", type=int, default=0)
    plans.add_argument("--jobs", type=int, default=2)
    routes = verbs.add_parser("router")
    routes.add_argument("--histories", type=int, default=1000)
    routes.add_argument("--first-seed", type=int, default=0)
    routes.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    quiet()
    if options.verb == "router":
        sys.exit(min(1, show_router(options.first_seed, options.histories, options.jobs)))
    if options.verb == "mesh":
        sys.exit(min(1, show_meshes(options.peers, options.seed, options.brief)))
    sys.exit(min(1, show_ballots(options.first_seed, options.schedules, options.jobs)))


if __name__ == "__main__":
    main()
