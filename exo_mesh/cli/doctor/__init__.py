"""Check this machine: what a node needs, what peers need to reach it, and what the node that runs here sees.

Takes the flags of a node, and checks what a node with these settings would use. Changes nothing. Exit code 1 if
something fails; warnings alone do not count. `exo-mesh doctor rdma` looks at RDMA over Thunderbolt alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_mesh import PROTOCOL_VERSION, __version__
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client import ApiClient, NoNodeError
from exo_mesh.cli.doctor import checks
from exo_mesh.cli.doctor.checks import Finding, Level
from exo_mesh.cli.parser import add_api_flags, add_node_flags, node_flags
from exo_mesh.cli.places import models_dirs
from exo_mesh.cli.tables import print_json
from exo_mesh.cli.version import library_versions
from exo_mesh.errors import MeshError
from exo_mesh.settings.config import LoadedSettings, load_settings

NEEDED = ("aiohttp", "grpcio", "jinja2", "msgspec", "numpy", "protobuf", "psutil", "tokenizers", "zeroconf")
"""Packages without which no node starts."""

CHECK_DEADLINE_S = 10.0
"""Most do not take a second; a check that hangs, say on a dead network drive, must not hold up the others."""

RDMA_DEADLINE_S = 60.0
"""Six tools of macOS one after the other, and MLX imported in a process of its own."""

MLX_S = 30.0

Check = Callable[[], list[Finding]]


@dataclass(frozen=True, slots=True)
class LocalNode:
    """The node that runs here. state: its /state, None if it did not tell; why_not: then why, "" if none runs."""

    url: str
    state: Mapping[str, Any] | None = None
    why_not: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`rdma`, `--json`, `--api-url`, and the settings of a node."""
    parser.add_argument(
        "about", nargs="?", choices=("rdma",), help="look at this alone: cables, ports, what is missing"
    )
    add_api_flags(parser)
    add_node_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Do all checks at once and print what each found."""
    loaded = load_settings(node_flags(args), os.environ)
    node = ask_node(ApiClient(args.api_url or os.environ.get("EXO_MESH_API_URL") or own_url(loaded)))
    try:
        work = rdma_checks(loaded, node) if args.about == "rdma" else checks_for(loaded, node)
        findings = diagnose(work, RDMA_DEADLINE_S if args.about == "rdma" else CHECK_DEADLINE_S)
    except ImportError as exc:  # then even the tools of the other checks are not there
        findings = [*_versions(), Finding("versions", Level.FAIL, str(exc), "pip install exo-mesh")]
    failed = any(finding.level is Level.FAIL for finding in findings)
    if args.json:
        print_json({"ok": not failed, "findings": [_as_json(finding) for finding in findings]})
    else:
        print(report(findings))
    return exit_codes.FAILED if failed else exit_codes.OK


def own_url(loaded: LoadedSettings) -> str:
    """Where a node with these settings would answer on this machine."""
    host = loaded.settings.host
    here = "127.0.0.1" if host in ("0.0.0.0", "::", "[::]") else host
    here = f"[{here}]" if ":" in here and not here.startswith("[") else here
    return f"http://{here}:{loaded.settings.api_port or 52415}"


def ask_node(client: ApiClient) -> LocalNode:
    """What the node at this address sees."""
    try:
        return LocalNode(client.url, client.get("/state", 3.0))
    except NoNodeError:
        return LocalNode(client.url)
    except MeshError as exc:
        return LocalNode(client.url, None, str(exc))


def diagnose(work: Mapping[str, Check], deadline_s: float) -> list[Finding]:
    """The findings of all checks, in their order. One that does not end, or cannot be done, is a warning."""
    from exo_mesh.cli.doctor.readings import in_time

    findings: list[Finding] = []
    for name, answer in in_time(work, deadline_s).items():
        if isinstance(answer, Exception):
            what = str(answer) if isinstance(answer, MeshError | OSError) else f"{type(answer).__name__}: {answer}"
            findings.append(Finding(name, Level.WARN, f"could not be checked: {what}"))
        else:
            findings += answer
    return findings


def checks_for(loaded: LoadedSettings, node: LocalNode) -> dict[str, Check]:
    """Every check by name, in the order in which they are told."""
    from exo_mesh.cli.doctor import readings
    from exo_mesh.cli.engines import describe_engines
    from exo_mesh.machine.memory import read_memory, usable_bytes

    settings = loaded.settings
    everywhere: Sequence[Path] = models_dirs(settings, os.environ)
    held = ports_of(node, settings.listen_port)
    alone = not settings.bootstrap_peers and len(settings.discovery) == 1
    tcp = [port for port in (settings.api_port if settings.api else 0, settings.grpc_port) if port]
    udp = [settings.listen_port] if "udp" in settings.discovery else []

    def memory() -> list[Finding]:
        reading = read_memory()
        reserved = reserved_by(node)
        usable = usable_bytes(reading, settings.max_memory_bytes, reserved, 0)
        limit = settings.max_memory_bytes
        return checks.check_memory(reading.total_bytes, reading.available_bytes, usable, reserved, limit)

    def clock() -> list[Finding]:
        return checks.check_clock(*(readings.read_clocks(node.state) if node.state else ([], 0)))

    return {
        "versions": _versions,
        "config": lambda: [_config_finding(loaded)],
        "engines": lambda: checks.check_engines(describe_engines(), settings.engine),
        "ports": lambda: [
            *checks.check_ports(readings.read_ports(loaded, held)),
            *checks.check_data_ports(
                settings.data_ports, readings.taken_ports(settings.host, settings.data_ports), node.state is not None
            ),
        ],
        "broadcast": lambda: checks.check_echo(
            "broadcast", readings.read_broadcast(settings.host), "udp" in settings.discovery, alone
        ),
        "multicast": lambda: checks.check_echo(
            "multicast", readings.read_multicast(settings.host), "mdns" in settings.discovery, alone
        ),
        "firewall": lambda: checks.check_firewall(readings.read_firewall(), tcp, udp, settings.data_ports is None),
        "clock": clock,
        "memory": memory,
        "disk": lambda: checks.check_directories(readings.read_directories(loaded, everywhere)),
        "models": lambda: checks.check_models(readings.read_models(everywhere)),
        "peers": lambda: checks.check_peers(node.state, node.url, node.why_not),
        "health": lambda: checks.check_health(node.state),
        "services": lambda: checks.check_services(readings.read_services()),
    }


def rdma_checks(loaded: LoadedSettings, node: LocalNode) -> dict[str, Check]:
    """The one check of `doctor rdma`."""
    from exo_mesh.cli.doctor.rdma import check_rdma
    from exo_mesh.domain.fast_synch import resolve
    from exo_mesh.machine.thunderbolt_readings import read_thunderbolt

    def rdma() -> list[Finding]:
        fast_synch = resolve(loaded.settings.fast_synch, os.environ)
        return check_rdma(read_thunderbolt(), node.state, fast_synch, has_jaccl())

    return {"rdma": rdma}


def has_jaccl() -> bool | None:
    """Has the MLX here the RDMA backend? Asked in a process of its own; None if it does not answer."""
    question = "import mlx.core as mx; print(mx.distributed.is_available('jaccl'))"
    try:
        done = subprocess.run([sys.executable, "-c", question], capture_output=True, timeout=MLX_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {b"True": True, b"False": False}.get(done.stdout.strip())


def ports_of(node: LocalNode, listen_port: int) -> dict[str, int]:
    """The ports that the node which runs here has open, by kind."""
    if node.state is None:
        return {}
    own = next((peer for peer in node.state["view"]["peers"] if peer["id"] == node.state["node_id"]), None)
    addresses = [node.url, *(own["addresses"][:1] if own else ())]
    ports = [int(address.rpartition(":")[2]) if address.rpartition(":")[2].isdigit() else 0 for address in addresses]
    return {**dict(zip(("api", "grpc"), ports, strict=False)), "udp": listen_port}


def reserved_by(node: LocalNode) -> int:
    """Bytes that models loaded by the node which runs here hold."""
    if node.state is None:
        return 0
    return int(node.state["telemetry"].get(node.state["node_id"], {}).get("reserved_bytes", 0))


def _versions() -> list[Finding]:
    return checks.check_versions(sys.version_info[:3], __version__, PROTOCOL_VERSION, library_versions(NEEDED))


def _config_finding(loaded: LoadedSettings) -> Finding:
    num_set = sum(loaded.was_set(name) for name in loaded.origins)
    there = "" if loaded.config_file.is_file() else " (there is none)"
    text = f"{num_set} settings differ from their defaults; config.toml is {loaded.config_file}{there}"
    return Finding(
        "config", Level.OK, text, "exo-mesh config show --origin tells where each came from" if num_set else ""
    )


def report(findings: Sequence[Finding]) -> str:
    """For people: a line per finding, its remedy below it, and a count."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:4}  {finding.check:9}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':15}  -> {finding.remedy}")
    failed, warned = (sum(f.level is level for f in findings) for level in (Level.FAIL, Level.WARN))
    return "\n".join([*lines, "", f"{failed} failed, {warned} warnings"])


def _as_json(finding: Finding) -> dict[str, str]:
    return {"check": finding.check, "level": finding.level, "finding": finding.text, "remedy": finding.remedy}
