"""Turns readings of this machine into the findings of `exo-mesh doctor`. Pure: no clock, no socket."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from exo_mesh import OLDEST_PYTHON
from exo_mesh.base.printable import counted
from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.engine.floors import upgrade

MAX_SKEW_S = 5.0
"""Largest difference between clocks without a warning: more than seconds make logs of several peers misleading."""
LITTLE_MEMORY_BYTES = 10**9
LITTLE_DISK_BYTES = 10**9
MAX_NAMED = 8
"""Most models, peers or interfaces that one line names."""


class Severity(StrEnum):
    """The level of a finding.

    fail: a node with these settings cannot work. warn: it works, but worse than it could, or not for long. note:
    something does not work that this node does not need.
    """

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One result of a check, and what to do about it."""

    check: str
    level: Severity
    text: str
    remedy: str = ""


class PortReading(msgspec.Struct, frozen=True):
    """A port that a node would open. kind: api, grpc, probes or udp. holder: the program that has it, "" if none."""

    kind: str
    port: int
    holder: str = ""
    ours: bool = False
    asked_for: bool = False


class EchoReading(msgspec.Struct, frozen=True):
    """The result of sending a datagram to this machine itself over an interface. error: why it could not be sent."""

    interface: str
    target: str
    heard: bool
    error: str = ""


class FirewallReading(msgspec.Struct, frozen=True):
    """The packet filters of this machine. nft: absent, unreadable, open or drops (its input chain drops by default)."""

    system: str
    ufw_active: bool = False
    firewalld_runs: bool = False
    nft: str = "absent"


class ClockReading(msgspec.Struct, frozen=True):
    """The clock of a peer minus ours, in seconds, ± error_s."""

    peer: str
    offset_s: float
    error_s: float


class DirectoryReading(msgspec.Struct, frozen=True):
    """A directory that a node uses. error: why it cannot be used (home: written, models: read); "" if it can."""

    purpose: str
    path: str
    exists: bool
    must_exist: bool = False
    error: str = ""
    free_bytes: int | None = None


class ServiceReading(msgspec.Struct, frozen=True):
    """unit: the output of `systemctl is-active exo-mesh`, "" without systemd. nginx: its path, or ""."""

    unit: str = ""
    nginx: str = ""


def check_versions(
    python: tuple[int, ...], exo_mesh: str, protocol: int, libraries: Mapping[str, str | None], old: str = ""
) -> list[Finding]:
    """Checks Python and the libraries.

    libraries: installed version by package that a node needs, None if absent. old: says which are too old, "" if none.
    """
    said = ".".join(map(str, python))
    if python[:2] < OLDEST_PYTHON:
        remedy = f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
        return [Finding("versions", Severity.FAIL, f"Python {said} is too old", remedy)]
    missing = [name for name, version in libraries.items() if version is None]
    if missing:
        return [Finding("versions", Severity.FAIL, f"not installed: {', '.join(missing)}", "pip install exo-mesh")]
    if old:
        return [Finding("versions", Severity.FAIL, old, upgrade())]
    versions = ", ".join(f"{name} {version}" for name, version in libraries.items())
    return [Finding("versions", Severity.OK, f"exo-mesh {exo_mesh}, protocol {protocol}, Python {said}, {versions}")]


def check_engines(engines: Sequence[Mapping[str, Any]], preference: str) -> list[Finding]:
    """Checks that the chosen engine can run. engines: as in `exo-mesh engines --json`."""
    wanted = next((e for e in engines if (e["chosen"] if preference == "auto" else e["name"] == preference)), None)
    if wanted is not None and wanted["available"]:
        first = Finding("engines", Severity.OK, f"{wanted['name']} {wanted['version']} ({wanted['reason']})")
    elif preference == "auto":
        first = Finding(
            "engines",
            Severity.WARN,
            "no engine can run here: this node can accept requests but hold no layers",
            "pip install 'exo-mesh[mlx]'",
        )
    else:
        why = wanted["reason"] if wanted else "not installed"
        remedy = (wanted and wanted["remedy"]) or "choose another engine with --engine; see exo-mesh engines"
        first = Finding("engines", Severity.FAIL, f"--engine {preference}: {why}", remedy)
    others = [f"{e['name']} ({e['reason']}; {e['remedy']})" for e in engines if not e["available"] and e is not wanted]
    if not others:
        return [first]
    text = f"not needed, and cannot run here: {', '.join(others)}"
    return [first, Finding("engines", Severity.NOTE, text, "exo-mesh engines lists all of them")]


def check_ports(readings: Sequence[PortReading]) -> list[Finding]:
    """Checks that the ports of the API, of gRPC, of probes and of announcements can be opened."""
    return [_port_finding(reading) for reading in readings]


def _port_finding(reading: PortReading) -> Finding:
    names = {"api": "API port", "grpc": "gRPC port", "probes": "UDP port of probes", "udp": "UDP port of announcements"}
    what = f"{names[reading.kind]} {reading.port}"
    if not reading.port:
        return Finding("ports", Severity.OK, f"{names[reading.kind]}: any free one")
    if not reading.holder:
        state = "can be opened" if reading.kind == "udp" else "is free"
        return Finding("ports", Severity.OK, f"{what} {state}")
    if reading.ours:
        return Finding("ports", Severity.OK, f"{what} is held by the node that runs here")
    taken = f"{what} is taken by {reading.holder}"
    if reading.kind == "udp":
        remedy = "stop that program, or set another --listen-port and --broadcast-port on all peers"
        return Finding("ports", Severity.FAIL, taken, remedy)
    if reading.kind == "probes":
        remedy = "stop that program, choose another --grpc-port, or set --no-probe-datagrams"
        return Finding("ports", Severity.WARN, f"{taken}; peers would call instead, which costs some CPU", remedy)
    if reading.kind == "api" and reading.asked_for:
        return Finding("ports", Severity.FAIL, taken, "choose another port with --api-port, or stop that program")
    remedy = f"choose another port with --{reading.kind}-port"
    return Finding("ports", Severity.WARN, f"{taken}; a node would use the next free one", remedy)


def check_data_ports(wanted: tuple[int, int] | None, taken: Sequence[int], node_runs: bool) -> list[Finding]:
    """Checks the ports of the runners' streams. wanted: first and last port; None = any. taken: ports in use."""
    if wanted is None:
        return [Finding("ports", Severity.OK, "data ports: any free ones")]
    text = f"data ports {wanted[0]}-{wanted[1]}"
    free = wanted[1] - wanted[0] + 1 - len(taken)
    if free > 0 and (not taken or node_runs):
        return [Finding("ports", Severity.OK, f"{text}: {free} free")]
    level = Severity.WARN if free > 0 or node_runs else Severity.FAIL
    return [Finding("ports", level, f"{text}: {free} free", "set --data-ports to a range that nothing else uses")]


def check_echo(way: str, readings: Sequence[EchoReading], used: bool, alone: bool) -> list[Finding]:
    """Checks that datagrams come back. way: broadcast or multicast. used: --discovery uses it. alone: there is no other
    way to find peers, and no named peer."""
    heard = [reading for reading in readings if reading.heard]
    deaf = [reading for reading in readings if not reading.heard]
    unused = "" if used else " (not used by --discovery)"
    if readings and not deaf:
        return [Finding(way, Severity.OK, f"works on {_names([r.interface for r in heard])}{unused}")]
    where = "; ".join(f"{r.interface} to {r.target}: {r.error or 'sent, but not received'}" for r in deaf[:MAX_NAMED])
    text = where or "there is no network interface"
    if not used:
        return [Finding(way, Severity.OK, f"{text}{unused}")]
    remedy = "check the firewall, or name a peer with --bootstrap-peers HOST:PORT"
    return [Finding(way, Severity.FAIL if alone and not heard else Severity.WARN, text, remedy)]


def nft_drops(ruleset: str) -> bool:
    """Whether the ruleset, as printed by `nft list ruleset`, drops incoming packets unless a rule accepts them."""
    return re.search(r"hook input [^}]*?policy drop", ruleset) is not None


def check_firewall(reading: FirewallReading, tcp: Sequence[int], udp: Sequence[int], any_port: bool) -> list[Finding]:
    """Checks the firewall. tcp, udp: ports that peers and clients must reach. any_port: runners use any free ports."""
    then = "; set --data-ports A-B and allow those ports, too" if any_port else ""
    ports = ", ".join([*(f"{port}/tcp" for port in tcp), *(f"{port}/udp" for port in udp)])
    if reading.system == "Darwin":
        return [
            Finding(
                "firewall",
                Severity.OK,
                "macOS asks once whether Python may accept connections, and whether it may find devices on the network",
                "System Settings > Network > Firewall, and Privacy & Security > Local Network: allow your terminal. "
                "A background service shows no such question: set --bootstrap-peers for it",
            )
        ]
    findings = []
    if reading.ufw_active:
        allow = " && ".join(f"ufw allow {port}" for port in ports.split(", "))
        findings.append(Finding("firewall", Severity.WARN, "ufw is active", f"{allow}{then}"))
    if reading.firewalld_runs:
        add = " ".join(f"--add-port={port}" for port in ports.split(", "))
        remedy = f"firewall-cmd --permanent {add} && firewall-cmd --reload{then}"
        findings.append(Finding("firewall", Severity.WARN, "firewalld runs", remedy))
    if reading.nft == "drops" and not findings:
        findings.append(
            Finding(
                "firewall",
                Severity.WARN,
                "nftables drops packets that no rule accepts",
                f"add rules that accept {ports}{then}",
            )
        )
    if findings:
        return findings
    if reading.nft == "unreadable":
        return [
            Finding("firewall", Severity.OK, "only root may read the nftables rules", "run exo-mesh doctor as root")
        ]
    return [Finding("firewall", Severity.OK, "no firewall found")]


def check_clock(readings: Sequence[ClockReading], num_peers: int) -> list[Finding]:
    """Checks the clocks of peers. num_peers: other peers whose API is known, whether or not they answered."""
    off = [r for r in readings if abs(r.offset_s) - r.error_s > MAX_SKEW_S]
    if off:
        who = "; ".join(f"{r.peer} is {r.offset_s:+.0f} s off" for r in off[:MAX_NAMED])
        return [Finding("clock", Severity.WARN, who, "let NTP set the clocks: timedatectl set-ntp true")]
    if readings:
        return [Finding("clock", Severity.OK, f"agrees with {_names([r.peer for r in readings])}")]
    text = f"none of {num_peers} other peers answered" if num_peers else "no other peer to compare with"
    return [Finding("clock", Severity.OK, text)]


def check_memory(total: int, available: int, usable: int, reserved: int, max_memory: int | None) -> list[Finding]:
    """Checks the memory for models. All in bytes. usable: what a node would offer now; reserved: by loaded models."""
    limited = max_memory is not None and usable == max(0, max_memory - reserved)
    reason = (
        f"--max-memory is {human_bytes(max_memory)}"
        if limited and max_memory is not None
        else f"{human_bytes(max(0, available - usable))} stays free for the system"
    )
    held = f", loaded models hold {human_bytes(reserved)}" if reserved else ""
    text = (
        f"{human_bytes(usable)} usable for models: {human_bytes(available)} of {human_bytes(total)} are available, "
        f"{reason}{held}"
    )
    if usable >= LITTLE_MEMORY_BYTES:
        return [Finding("memory", Severity.OK, text)]
    if reserved:
        return [Finding("memory", Severity.OK, text, "exo-mesh ps shows what is loaded")]
    remedy = "raise --max-memory" if limited else "close other programs; this peer can hold few layers or none"
    return [Finding("memory", Severity.WARN, text, remedy)]


def check_directories(readings: Sequence[DirectoryReading]) -> list[Finding]:
    """Checks that the home and the models directories exist, can be used and have space."""
    return [finding for reading in readings if (finding := _directory_finding(reading)) is not None]


def _directory_finding(reading: DirectoryReading) -> Finding | None:
    what = f"{reading.purpose} {reading.path}"
    if reading.error:
        remedy = (
            "set --home to a directory that you may write" if reading.purpose == "home" else "check its permissions"
        )
        return Finding(
            "disk",
            Severity.FAIL if reading.purpose == "home" else Severity.WARN,
            f"{what}: {reading.error}",
            remedy,
        )
    if not reading.exists and reading.purpose != "home":
        if not reading.must_exist:
            return None
        return Finding("disk", Severity.WARN, f"{what} does not exist", "create it, or correct --models-dir")
    free = "" if reading.free_bytes is None else f"{human_bytes(reading.free_bytes)} free"
    if reading.free_bytes is not None and reading.free_bytes < LITTLE_DISK_BYTES:
        return Finding("disk", Severity.WARN, f"{what}: only {free}", "free disk space")
    note = "" if reading.exists else ", will be created"
    return Finding("disk", Severity.OK, f"{what}: {free}{note}")


def check_models(errors_by_name: Mapping[str, str]) -> list[Finding]:
    """Checks the models. errors_by_name: for every model on this machine why its card cannot be read; "" if it can."""
    good = [name for name, error in errors_by_name.items() if not error]
    bad = [
        Finding("models", Severity.WARN, f"{name}: {error}", "remove it, or see docs/reference/errors.md")
        for name, error in errors_by_name.items()
        if error
    ]
    if not errors_by_name:
        remedy = "download one with exo-mesh pull, or set --models-dir; other peers may have models"
        return [Finding("models", Severity.WARN, "no models on this machine", remedy)]
    if good:
        return [Finding("models", Severity.OK, f"{len(good)} can be read: {_names(good)}"), *bad[:MAX_NAMED]]
    return bad[:MAX_NAMED]


def check_peers(state: Mapping[str, Any] | None, url: str, why_not: str) -> list[Finding]:
    """Checks the peers that the node sees. state: GET /state of the node at `url`, or None; why_not: then the error."""
    if state is None:
        if why_not:
            return [
                Finding(
                    "peers", Severity.WARN, f"the node at {url} answers with an error: {why_not}", "see the node's log"
                )
            ]
        return [
            Finding(
                "peers",
                Severity.OK,
                f"no node answers at {url}, so its peers cannot be checked",
                "start a node: exo-mesh",
            )
        ]
    peers = {peer["id"]: peer for peer in state["view"]["peers"] if peer["alive"]}
    own = peers.pop(state["node_id"], {})
    others = [peer["name"] for peer in peers.values()]
    text = f"this node sees {counted(len(others), 'other')}: {_names(others)}" if others else "this node is alone"
    remedy = "" if others else "start exo-mesh on another machine; if it runs there, see broadcast and firewall above"
    reasons = [reason for reason in state["health"].get("reasons", ()) if reason["code"] not in _SAID_HERE]
    problems = [Finding("peers", Severity.WARN, r["message"], r.get("remedy", "")) for r in reasons]
    version = own.get("version")
    older_or_newer = [f"{p['name']} {p['version']}" for p in peers.values() if p.get("version") != version]
    if older_or_newer:
        what = f"this node runs exo-mesh {version}, other peers differ: {_names(older_or_newer)}"
        problems.append(Finding("peers", Severity.WARN, what, "install the same version on all machines"))
    return [Finding("peers", Severity.OK, text, remedy), *problems]


_SAID_HERE = ("version_mix", "alone")
"""Reasons in the node's health that check_peers reports by itself."""


def check_health(state: Mapping[str, Any] | None) -> list[Finding]:
    """Checks the health of other peers and of instances. state: as in check_peers."""
    if state is None:
        return []
    health = state["health"]
    said = [(peer["name"], peer) for peer in health.get("peer_health", ()) if peer["id"] != state["node_id"]]
    said += [(instance["id"], instance) for instance in health.get("instance_health", ())]
    wrong = [
        Finding("health", Severity.WARN, f"{name}: {reason['message']}", reason["remedy"])
        for name, one in said
        for reason in one["reasons"]
        if reason["level"] != "ok" and reason["code"] != "version_mix"
    ]
    return wrong or [Finding("health", Severity.OK, f"healthy other peers and instances: {len(said)}")]


def check_services(reading: ServiceReading) -> list[Finding]:
    """Checks whether systemd starts the node at boot, and whether nginx is installed."""
    findings = []
    if reading.unit == "active":
        findings.append(Finding("services", Severity.OK, "systemd runs exo-mesh.service"))
    elif reading.unit == "failed":
        remedy = "journalctl -u exo-mesh -n 50"
        findings.append(Finding("services", Severity.WARN, "exo-mesh.service has failed", remedy))
    elif reading.unit:
        text = f"exo-mesh.service is {reading.unit}"
        findings.append(Finding("services", Severity.OK, text, "to start a node at boot: exo-mesh service install"))
    if reading.nginx:
        text = f"nginx is at {reading.nginx}"
        remedy = "exo-mesh nginx-config --site writes a site for the nginx in front of all nodes"
        findings.append(Finding("services", Severity.OK, text, remedy))
    return findings


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    return shown + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
