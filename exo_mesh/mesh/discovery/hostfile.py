"""Reads a hostfile as `mlx.launch` does: a list of `{"ssh": …, "ips": […], "rdma": […]}`, one per host by rank.

`rdma[i]` names the device by which a host reaches host i. Only the addresses are used here, but a file that MLX would
reject later is refused at once. Only the host itself knows whether a device is active and a host can be reached.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from exo_mesh.errors import InputError

KEYS = frozenset({"ssh", "ips", "rdma"})

_DEVICE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_NOT_IN_HOSTS = set("/,;\"'{}\\")


def is_hostfile(entries: Sequence[Any]) -> bool:
    """Whether this list is meant as a hostfile: at least one entry has one of its keys."""
    return any(isinstance(entry, dict) and KEYS & entry.keys() for entry in entries)


def hosts_in(entries: Sequence[Any], where: str, key: str) -> list[str]:
    """The hosts to dial: the ips of each entry, or else its ssh host. where, key: for messages.

    Raises InputError that names the entry and the defect.
    """
    found: list[str] = []
    for rank, entry in enumerate(entries):
        field = f"{key}[{rank}]"
        if not isinstance(entry, dict):
            raise wrong(where, field, "must be an object with ssh, ips and rdma, like the other entries")
        ssh, ips = _ssh(entry, where, field), _ips(entry, rank, where, field)
        _check_rdma(entry, rank, entries, where, field)
        found += ips or [ssh]
    return found


def is_host(text: object) -> bool:
    """Whether this is a possible host name or address."""
    return (
        isinstance(text, str)
        and 0 < len(text) <= 255
        and not any(char.isspace() or char in _NOT_IN_HOSTS for char in text)
    )


def wrong(where: str, field: str, what: str) -> InputError:
    """The error of a peers file: its path, the field, and the requirement that the field violates."""
    return InputError(f"{where}: {field}: {what}" if field else f"{where}: {what}", param="peers_file")


def _ssh(entry: dict[str, Any], where: str, field: str) -> str:
    """The ssh host without a leading "user@"."""
    if "ssh" not in entry:
        raise wrong(where, f"{field}.ssh", "is missing")
    ssh = entry["ssh"]
    host = ssh.rpartition("@")[2] if isinstance(ssh, str) else ""
    if not is_host(host):
        raise wrong(where, f"{field}.ssh", "must be a host or an address")
    return host


def _ips(entry: dict[str, Any], rank: int, where: str, field: str) -> list[str]:
    ips = entry.get("ips", [])
    if not isinstance(ips, list):
        raise wrong(where, f"{field}.ips", "must be a list of addresses")
    for index, ip in enumerate(ips):
        if not is_host(ip):
            raise wrong(where, f"{field}.ips[{index}]", "must be a host or an address")
    if rank == 0 and not ips:
        raise wrong(where, f"{field}.ips", "the first host needs an address, because the others connect to it")
    return ips


def _check_rdma(entry: dict[str, Any], rank: int, entries: Sequence[Any], where: str, field: str) -> None:
    """Check the RDMA devices. Either all entries list them or none does: MLX's `ring` backend needs none, and MLX's
    tools then write `[]`."""
    rows = [other.get("rdma", []) for other in entries if isinstance(other, dict)]
    if all(row == [] for row in rows):
        return
    if "rdma" not in entry:
        raise wrong(where, f"{field}.rdma", "is missing, but other hosts have it")
    devices = entry["rdma"]
    if not isinstance(devices, list):
        raise wrong(where, f"{field}.rdma", "must be a list of device names and null")
    if len(devices) != len(entries):
        raise wrong(where, f"{field}.rdma", f"must have one entry per host, {len(entries)}, not {len(devices)}")
    for other, device in enumerate(devices):
        if other == rank and device is not None:
            raise wrong(where, f"{field}.rdma[{other}]", "must be null: a host needs no device to reach itself")
        if device is not None and not (isinstance(device, str) and _DEVICE.fullmatch(device)):
            raise wrong(where, f"{field}.rdma[{other}]", "must be the name of a device, or null")
