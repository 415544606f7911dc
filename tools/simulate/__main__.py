"""python -m tools.simulate [--peers 3 16 200] [--seed 1]: how fast a mesh agrees, and what it costs per peer."""

from __future__ import annotations

import argparse
import time

from tools.simulate.mesh import report

HEAD = (
    "peers  seed  join_s  msg/s   B/s  busiest B/s  change_s  kill_s  heal_s  "
    "false (5% loss)  false (stalls)  disagree  wall_s"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.simulate", description=__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[3, 16, 50, 200])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(HEAD)
    for count in options.peers:
        began = time.perf_counter()
        row = report(count, options.seed)
        print(
            f"{row.peers:5d} {row.seed:5d} {row.join_s:7.2f} {row.steady_messages:6.1f} {row.steady_bytes:5.0f} "
            f"{row.busiest_bytes:12.0f} {row.change_s:9.2f} {row.kill_s:7.2f} {row.heal_s:7.2f} {row.loss_false:16d} "
            f"{row.stalled_false:15d} {row.disagreements:9d} {time.perf_counter() - began:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
