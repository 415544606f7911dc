"""Parses what macOS's own tools report about Thunderbolt ports, cables and RDMA. Pure.

Formats: `ibv_devices` and `ibv_devinfo` as Apple's TN3205 prints them ("Low-latency communication with RDMA over
Thunderbolt", developer.apple.com); `system_profiler SPThunderboltDataType -json` and `networksetup
-listallhardwareports` as MLX's own `mlx.distributed_config` reads them (mlx/_distributed_utils/config.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from exo_mesh.domain.device import RdmaPort

MIN_MACOS = (26, 2)
"""The first macOS with RDMA over Thunderbolt (TN3205)."""

ACTIVE = "PORT_ACTIVE"
BRIDGE = "Thunderbolt Bridge"

_DEVICE = re.compile(r"^\s*(rdma_[A-Za-z0-9]+)\s+([0-9a-fA-F]{16})\s*$", re.MULTILINE)
_STATE = re.compile(r"^\s*(?:port_)?state:\s*(PORT_[A-Z]+)", re.MULTILINE)
_QUEUE_PAIRS = re.compile(r"^\s*max_qp:\s*(\d{1,9})\s*$", re.MULTILINE)
_GBITS = re.compile(r"(\d+)\s*Gb/s")


class Bus(msgspec.Struct, frozen=True):
    """One Thunderbolt controller: a receptacle, and the hosts at the other end of its cable.

    uuid: of its domain, the same at every start. others: (domain uuid, name) of the hosts that it sees.
    """

    uuid: str
    receptacle: str
    speed: str
    connected: bool
    others: tuple[tuple[str, str], ...]

    @property
    def gigabits(self) -> int:
        """The most gigabits per second that the port reports; 0 if none. 40 is Thunderbolt 3 or 4, 80 and more is 5."""
        match = _GBITS.search(self.speed)
        return int(match[1]) if match else 0


class ThunderboltReading(msgspec.Struct, frozen=True):
    """The output of each tool, "" where the tool is missing or failed."""

    ibv_devices: str = ""
    ibv_devinfo: str = ""
    rdma_ctl: str = ""
    thunderbolt: str = ""
    hardware_ports: str = ""
    sw_vers: str = ""
    ibv_limits: str = ""


def parse_ibv_devices(text: str) -> tuple[str, ...]:
    """Returns the names of the RDMA devices over Thunderbolt, in the order listed."""
    return tuple(name for name, _ in _DEVICE.findall(text))


def parse_ibv_devinfo(text: str) -> dict[str, str]:
    """Returns the state of the first port of each device: "PORT_ACTIVE", "PORT_DOWN", …"""
    return {device: state[1] for device, block in _devices_in(text) if (state := _STATE.search(block))}


def parse_max_queue_pairs(text: str) -> dict[str, int]:
    """Returns how many queue pairs each device supports, as in `ibv_devinfo -v`; devices that report none are
    absent."""
    found = {device: int(most[1]) for device, block in _devices_in(text) if (most := _QUEUE_PAIRS.search(block))}
    return {device: most for device, most in found.items() if most}


def _devices_in(text: str) -> Iterator[tuple[str, str]]:
    """Yields (device, its block of the output)."""
    for block in re.split(r"^\s*hca_id:", text, flags=re.MULTILINE)[1:]:
        if words := block.split(maxsplit=1):
            yield words[0], block


def parse_rdma_ctl(text: str) -> bool | None:
    """Reads from `rdma_ctl status` whether RDMA is enabled; None if the output does not say."""
    words = set(re.findall(r"[a-z]+", text.lower()))
    if "disabled" in words:
        return False
    return True if "enabled" in words else None


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Returns the network interface of each hardware port: {"Thunderbolt 1": "en2", …}."""
    found, name = {}, ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Hardware Port":
            name = value.strip()
        elif key.strip() == "Device" and name:
            found[name], name = value.strip(), ""
    return found


def parse_thunderbolt(text: str) -> tuple[Bus, ...]:
    """Returns the controllers, by receptacle. Entries of an unexpected form are left out."""
    try:
        entries = json.loads(text).get("SPThunderboltDataType", [])
    except (ValueError, AttributeError):
        return ()
    found = [bus for entry in entries if isinstance(entry, dict) and (bus := _bus(entry)) is not None]
    return tuple(sorted(found, key=lambda bus: bus.receptacle))


def _bus(entry: Mapping[str, Any]) -> Bus | None:
    uuid, tag = entry.get("domain_uuid_key"), entry.get("receptacle_1_tag")
    if not isinstance(uuid, str) or not isinstance(tag, Mapping):
        return None
    others = tuple(
        (str(item["domain_uuid_key"]), str(item.get("device_name_key") or item.get("_name") or ""))
        for item in entry.get("_items") or ()
        if isinstance(item, Mapping) and isinstance(item.get("domain_uuid_key"), str)
    )
    status = str(tag.get("receptacle_status_key", ""))
    connected = bool(others) or ("connected" in status and "no_devices" not in status)
    return Bus(uuid, str(tag.get("receptacle_id_key", "")), str(tag.get("current_speed_key", "")), connected, others)


def parse_sw_vers(text: str) -> tuple[str, str]:
    """Returns (version, build) of macOS, each "" if missing."""
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return values.get("ProductVersion", "").strip(), values.get("BuildVersion", "").strip()


def is_new_enough(version: str) -> bool:
    numbers = [int(part) for part in version.split(".") if part.isdigit()]
    return tuple(numbers[:2]) >= MIN_MACOS


def device_of(bus: Bus, interfaces: Mapping[str, str]) -> tuple[str, str]:
    """Returns (network interface, RDMA device) of a receptacle; "" if there is no such interface."""
    interface = interfaces.get(f"Thunderbolt {bus.receptacle}", "")
    return interface, f"rdma_{interface}" if interface else ""


def rdma_ports(reading: ThunderboltReading) -> tuple[RdmaPort, ...]:
    """Every Thunderbolt port of this machine, with the RDMA device over it if there is one."""
    devices, states = set(parse_ibv_devices(reading.ibv_devices)), parse_ibv_devinfo(reading.ibv_devinfo)
    interfaces, limits = parse_hardware_ports(reading.hardware_ports), parse_max_queue_pairs(reading.ibv_limits)
    ports = []
    for bus in parse_thunderbolt(reading.thunderbolt):
        device = device_of(bus, interfaces)[1]
        name = device if device in devices else ""
        other = bus.others[0][0] if bus.others else ""
        active = bool(name) and states.get(device) == ACTIVE
        ports.append(RdmaPort(name, active, bus.uuid, other, bus.speed, limits.get(name, 0), BRIDGE in interfaces))
    return tuple(ports)
