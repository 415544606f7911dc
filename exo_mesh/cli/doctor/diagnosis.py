"""Lists the checks of `exo-mesh doctor`, each with its reading, and runs them in parallel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh import PROTOCOL_VERSION, __version__
from exo_mesh.base.versions import library_versions
from exo_mesh.cli.client.api_client import ApiClient, NoNodeError
from exo_mesh.cli.doctor import checks
from exo_mesh.cli.doctor.checks import Finding, Severity
from exo_mesh.domain.device import why_no_layers
from exo_mesh.engine.floors import too_old
from exo_mesh.errors import MeshError
from exo_mesh.settings.config import LoadedSettings
from exo_mesh.settings.default_paths import models_dirs

NEEDED = ("aiohttp", "grpcio", "jinja2", "msgspec", "numpy", "protobuf", "psutil", "tokenizers", "zeroconf")
"""Packages that every node needs."""

MLX_S = 30.0

Check = Callable[[], list[Finding]]


class LocalNode(msgspec.Struct, frozen=True):
    """The node on this machine. state: its GET /state, None without an answer; why_not: the error, "" if none runs."""

    url: str
    state: Mapping[str, Any] | None = None
    why_not: str = ""


def ask_node(client: ApiClient) -> LocalNode:
    """Reads the state of the node at this address."""
    try:
        return LocalNode(client.url, client.get("/state", 3.0))
    except NoNodeError:
        return LocalNode(client.url)
    except MeshError as exc:
        return LocalNode(client.url, None, str(exc))


def diagnose(work: Mapping[str, Check], deadline_s: float) -> list[Finding]:
    """The findings of all checks, in order. A check that does not end in time or fails becomes a warning."""
    from exo_mesh.cli.doctor.readings import in_time

    findings: list[Finding] = []
    for name, answer in in_time(work, deadline_s).items():
        if isinstance(answer, Exception):
            what = str(answer) if isinstance(answer, MeshError | OSError) else f"{type(answer).__name__}: {answer}"
            findings.append(Finding(name, Severity.WARN, f"this check failed: {what}"))
        else:
            findings += answer
    return findings


def checks_for(loaded: LoadedSettings, node: LocalNode) -> dict[str, Check]:
    """Every check by name, in the order of the report."""
    from exo_mesh.cli.doctor import readings
    from exo_mesh.cli.doctor.power import check_power, read_power_sources
    from exo_mesh.engine.listing import describe_engines
    from exo_mesh.machine.memory import read_memory, usable_bytes

    settings = loaded.settings
    everywhere: Sequence[Path] = models_dirs(settings, os.environ)
    held = ports_of(node, settings.listen_port)
    alone = not settings.bootstrap_peers and len(settings.discovery) == 1
    of_api = (settings.api_port, settings.ollama_port) if settings.api else ()
    tcp = [port for port in (*of_api, settings.grpc_port) if port]
    udp = [settings.listen_port] if "udp" in settings.discovery else []
    udp += [settings.grpc_port] if settings.grpc_port and settings.probe_datagrams else []

    def memory() -> list[Finding]:
        if why := why_no_layers(settings.role, settings.max_memory_bytes):
            return [Finding("memory", Severity.OK, f"a node with these settings holds no layers: {why}")]
        reading = read_memory()
        reserved = reserved_by(node)
        usable = usable_bytes(reading, settings.max_memory_bytes, reserved, 0)
        limit = settings.max_memory_bytes
        return checks.check_memory(reading.total_bytes, reading.available_bytes, usable, reserved, limit)

    def clock() -> list[Finding]:
        return checks.check_clock(*(readings.read_clocks(node.state) if node.state else ([], 0)))

    return {
        "versions": version_findings,
        "config": lambda: [_config_finding(loaded)],
        "engines": lambda: checks.check_engines(
            describe_engines(settings.engine, settings.engine_options), settings.engine
        ),
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
        "power": lambda: check_power(read_power_sources(settings.sysfs, settings.power_tool)),
        "services": lambda: checks.check_services(readings.read_services()),
    }


def rdma_checks(loaded: LoadedSettings, node: LocalNode) -> dict[str, Check]:
    """The check of `doctor rdma`, by name."""
    from exo_mesh.cli.doctor.rdma import check_rdma
    from exo_mesh.domain.fast_synch import resolve
    from exo_mesh.machine.thunderbolt_readings import read_thunderbolt

    def rdma() -> list[Finding]:
        fast_synch = resolve(loaded.settings.fast_synch, os.environ)
        return check_rdma(read_thunderbolt(), node.state, fast_synch, has_jaccl())

    return {"rdma": rdma}


def has_jaccl() -> bool | None:
    """Whether the installed MLX has the RDMA backend, tested in a separate process; None if that fails."""
    question = "import mlx.core as mx; print(mx.distributed.is_available('jaccl'))"
    try:
        done = subprocess.run([sys.executable, "-c", question], capture_output=True, timeout=MLX_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {b"True": True, b"False": False}.get(done.stdout.strip())


def ports_of(node: LocalNode, listen_port: int) -> dict[str, int]:
    """The ports that the node on this machine has open, by kind."""
    if node.state is None:
        return {}
    own = next((peer for peer in node.state["view"]["peers"] if peer["id"] == node.state["node_id"]), None)
    addresses = [node.url, *(own["addresses"][:1] if own else ())]
    ports = [int(address.rpartition(":")[2]) if address.rpartition(":")[2].isdigit() else 0 for address in addresses]
    return {**dict(zip(("api", "grpc"), ports, strict=False)), "udp": listen_port}


def reserved_by(node: LocalNode) -> int:
    """Bytes that loaded models reserve at the node on this machine."""
    if node.state is None:
        return 0
    return int(node.state["telemetry"].get(node.state["node_id"], {}).get("reserved_bytes", 0))


def version_findings() -> list[Finding]:
    """Findings about Python, the protocol and the packages that a node needs."""
    return checks.check_versions(
        sys.version_info[:3], __version__, PROTOCOL_VERSION, library_versions(NEEDED), too_old()
    )


def _config_finding(loaded: LoadedSettings) -> Finding:
    num_set = sum(loaded.was_set(name) for name in loaded.origins)
    there = "" if loaded.config_file.is_file() else " (there is none)"
    text = f"settings that differ from their defaults: {num_set}; config.toml is {loaded.config_file}{there}"
    return Finding(
        "config", Severity.OK, text, "exo-mesh config show --origin shows where each comes from" if num_set else ""
    )
