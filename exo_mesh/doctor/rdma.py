"""What `exo-mesh doctor rdma` concludes about RDMA over Thunderbolt. Values in, findings out; it changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exo_mesh.doctor.checks import Finding, Severity
from exo_mesh.domain.fast_synch import FastSynch
from exo_mesh.domain.rdma_links import MAX_QUEUE_PAIRS
from exo_mesh.domain.thunderbolt import (
    ACTIVE,
    BRIDGE,
    Bus,
    ThunderboltReading,
    device_of,
    is_new_enough,
    parse_hardware_ports,
    parse_ibv_devices,
    parse_ibv_devinfo,
    parse_max_queue_pairs,
    parse_rdma_ctl,
    parse_sw_vers,
    parse_thunderbolt,
)

TB5_GIGABITS = 80
_TOO_OLD = "no RDMA on Thunderbolt 3 or 4, and the ports here are older than Thunderbolt 5"
_ENABLE = "start into macOS Recovery, open Utilities > Terminal, run `rdma_ctl enable`, and restart"


def check_rdma(
    reading: ThunderboltReading, state: Mapping[str, Any] | None, fast_synch: FastSynch, jaccl: bool | None
) -> list[Finding]:
    """state: what the node that runs here says, None if none does. jaccl: has the MLX here that backend, None if that
    is not known."""
    if not reading.sw_vers:
        return [
            Finding(
                "macos",
                Severity.WARN,
                "this is no Mac: RDMA over Thunderbolt needs one",
                "tensor groups over TCP work anywhere MLX does: --group-backend ring",
            ),
            _fast_synch(fast_synch),
        ]
    buses = parse_thunderbolt(reading.thunderbolt)
    return [
        _macos(reading),
        _enabled(reading),
        *_devices(reading, buses),
        *_ports(reading, buses),
        *_bridge(reading),
        _mlx(jaccl),
        _fast_synch(fast_synch),
        *_groups(state),
    ]


def _macos(reading: ThunderboltReading) -> Finding:
    version, build = parse_sw_vers(reading.sw_vers)
    text = f"macOS {version or 'of unknown version'} (build {build or 'unknown'})"
    if is_new_enough(version):
        return Finding("macos", Severity.OK, text)
    return Finding("macos", Severity.FAIL, f"{text} has no RDMA over Thunderbolt", "update to macOS 26.2 or later")


def _enabled(reading: ThunderboltReading) -> Finding:
    enabled = parse_rdma_ctl(reading.rdma_ctl)
    if enabled:
        return Finding("rdma_ctl", Severity.OK, "RDMA is enabled")
    if enabled is False:
        return Finding("rdma_ctl", Severity.FAIL, "RDMA is disabled", _ENABLE)
    return Finding("rdma_ctl", Severity.WARN, "rdma_ctl status does not say whether RDMA is enabled", _ENABLE)


def _devices(reading: ThunderboltReading, buses: Sequence[Bus]) -> list[Finding]:
    devices = parse_ibv_devices(reading.ibv_devices)
    if devices:
        found = Finding("devices", Severity.OK, f"ibv_devices lists {', '.join(devices)}")
        return [found, _queue_pairs(devices, parse_max_queue_pairs(reading.ibv_limits))]
    if buses and max(bus.gigabits for bus in buses) < TB5_GIGABITS:
        return [Finding("devices", Severity.FAIL, _TOO_OLD)]
    return [Finding("devices", Severity.FAIL, "ibv_devices lists no RDMA device", _ENABLE)]


def _queue_pairs(devices: Sequence[str], limits: Mapping[str, int]) -> Finding:
    told = ", ".join(f"{device} {limits[device]}" for device in devices if device in limits)
    text = told or f"macOS does not say how many; reckoned with {MAX_QUEUE_PAIRS} for each device"
    return Finding("queues", Severity.OK, f"queue pairs: {text}. Each tensor group takes one for each other rank")


def _ports(reading: ThunderboltReading, buses: Sequence[Bus]) -> list[Finding]:
    """One line for each receptacle: interface, device, state, and who is at the other end."""
    interfaces, states = parse_hardware_ports(reading.hardware_ports), parse_ibv_devinfo(reading.ibv_devinfo)
    findings = []
    for bus in buses:
        interface, device = device_of(bus, interfaces)
        state = states.get(device, "no RDMA")
        other = " and ".join(name or uuid[:8] for uuid, name in bus.others)
        end = f"cable to {other}" if other else "something that is no Mac" if bus.connected else "no cable"
        text = f"port {bus.receptacle} ({interface or '?'}, {device or '?'}): {state}, {end}, {bus.speed or 'no speed'}"
        findings.append(_port_finding(text, bus, state))
    return findings or [Finding("ports", Severity.WARN, "system_profiler lists no Thunderbolt port")]


def _port_finding(text: str, bus: Bus, state: str) -> Finding:
    if not bus.others or state == ACTIVE:
        return Finding("port", Severity.OK, text)
    if bus.gigabits < TB5_GIGABITS:
        return Finding("port", Severity.WARN, text, "RDMA needs Thunderbolt 5 ports and a Thunderbolt 5 cable")
    return Finding("port", Severity.WARN, text, f"a port is active once the Macs at both ends have RDMA: {_ENABLE}")


def _bridge(reading: ThunderboltReading) -> list[Finding]:
    if BRIDGE not in parse_hardware_ports(reading.hardware_ports):
        return []
    return [
        Finding(
            "bridge",
            Severity.WARN,
            "there is a Thunderbolt Bridge: with cables in a loop it may send packets round for ever",
            "if Macs are cabled to more than one other, remove it in System Settings > Network",
        )
    ]


def _mlx(jaccl: bool | None) -> Finding:
    if jaccl is None:
        return Finding("mlx", Severity.WARN, "MLX could not be asked for its backends", "pip install exo-mesh[mlx]")
    if jaccl:
        return Finding("mlx", Severity.OK, "this MLX has the jaccl backend")
    remedy = "update MLX and macOS; until then --group-backend ring uses TCP"
    return Finding("mlx", Severity.FAIL, "this MLX has no jaccl backend", remedy)


def _fast_synch(chosen: FastSynch) -> Finding:
    value = "unset" if chosen.value is None else chosen.value
    return Finding("synch", Severity.OK, f"MLX_METAL_FAST_SYNCH for runners: {value} ({chosen.why})")


def _groups(state: Mapping[str, Any] | None) -> list[Finding]:
    """Which peers of the mesh the cables join, as the node here knows it."""
    if state is None:
        return [
            Finding("mesh", Severity.WARN, "no node runs here, so its cables to peers are not known", "exo-mesh serve")
        ]
    names = {peer["id"]: peer["name"] for peer in state["view"]["peers"]}
    findings = []
    for cable in state.get("cables", ()):
        a, b = (names.get(end["peer"], end["peer"][:8]) for end in cable["ends"])
        ports = " - ".join(end["device"] or "no device" for end in cable["ends"])
        level, word = (Severity.OK, "up") if cable["up"] else (Severity.WARN, "down")
        findings.append(Finding("cable", level, f"{a} - {b} ({ports}): RDMA {word}"))
    return findings or [Finding("mesh", Severity.WARN, "no Thunderbolt cable joins two peers of this mesh")]
