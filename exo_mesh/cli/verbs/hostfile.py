"""Check a hostfile of mlx.launch and show its ranks; with --json print it in the form that MLX reads.

The simple form, a list of {"host", "port"}, is converted. No file is changed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from exo_mesh.base.printable import counted
from exo_mesh.cli import exit_codes
from exo_mesh.cli.tables import fitted, line_width, print_json
from exo_mesh.mesh.discovery.static_group import StaticGroup, read_hostfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds FILE, `--json`."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the hostfile")
    parser.add_argument("--json", action="store_true", help="print it in the form that MLX reads")


def run(args: argparse.Namespace) -> int:
    """Prints the hostfile. Raises InputError that names the field if the file breaks a rule."""
    group = read_hostfile(args.file, min_hosts=1)
    if args.json:
        print_json(group.as_mlx())
    else:
        print(table(group))
    return exit_codes.OK


def table(group: StaticGroup) -> str:
    """The group as a table with a row for each rank."""
    rows = [
        [str(rank), host.name, " ".join(host.ips) or "-", " ".join(device or "-" for device in host.rdma) or "-"]
        for rank, host in enumerate(group.hosts)
    ]
    fences = f", fast fences {group.fast_synch}" if group.fast_synch else ""
    head = f"{counted(len(rows), 'rank')}, backend {group.backend}{fences}"
    if len(rows) == 1:
        head = "1 host: usable for --peers-file; a tensor group needs 2 hosts"
    return f"{head}\n{fitted(('RANK', 'HOST', 'ADDRESSES', 'RDMA BY RANK'), rows, line_width())}"
