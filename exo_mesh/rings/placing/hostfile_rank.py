"""Finds the tensor group and rank that a hostfile or `mlx.launch` gives this node, and the addresses of the other
nodes."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from exo_mesh.domain.device import StaticRank
from exo_mesh.domain.wiring_rules import MLX_VARIABLES
from exo_mesh.machine.interfaces import read_interfaces
from exo_mesh.settings.config import Settings

if TYPE_CHECKING:
    from exo_mesh.mesh.discovery.static_group import StaticGroup


class OwnRank(msgspec.Struct, frozen=True):
    """This node's rank in a static group. rank: None if no hostfile or launcher defines a group. addresses: "host:port"
    of the other nodes, as far as known."""

    rank: StaticRank | None
    addresses: tuple[str, ...]
    fast_synch: str = ""

    def settings(self, settings: Settings) -> Settings:
        """The settings, with `fast_synch` taken from the hostfile where the settings leave it at "auto"."""
        if not self.fast_synch or settings.fast_synch != "auto":
            return settings
        return replace(settings, fast_synch=self.fast_synch)


def own_rank(settings: Settings, environ: Mapping[str, str]) -> OwnRank:
    """This node's static rank. A configured hostfile takes precedence over the variables of mlx.launch.

    Raises InputError for a hostfile that is invalid or does not identify which of its hosts this machine is.
    """
    if settings.hostfile is None and not environ.keys() & MLX_VARIABLES:
        return OwnRank(None, ())
    from exo_mesh.mesh.discovery.static_group import given_rank, launched_group, read_hostfile

    launched = launched_group(environ)
    if settings.hostfile is not None:
        group = read_hostfile(settings.hostfile)
        given = given_rank(environ)
        if given.isascii() and given.isdecimal() and int(given) < len(group.hosts):
            return _own(group, int(given))
        names = (settings.name, platform.node(), platform.node().partition(".")[0])
        return _own(group, group.rank_of((one.address for one in read_interfaces()), names))
    return OwnRank(None, ()) if launched is None else _own(*launched)


def _own(group: StaticGroup, rank: int) -> OwnRank:
    known = [host for host in group.hosts if not host.name.startswith("rank") or host.ips]
    addresses = tuple(dict.fromkeys(address for host in known for address in host.addresses))
    return OwnRank(group.rank(rank), addresses, group.fast_synch)
