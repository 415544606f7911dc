"""Decides which peers this node admits and where it dials them: `--node-id-filter` and `--interface-type-filter`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from exo_mesh.domain.addresses import LINK_WORDS, Interface, link_kind
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.peer_names import matching
from exo_mesh.machine.interfaces import recent_interfaces
from exo_mesh.mesh.membership.peers import refusal


class PeerFilter:
    """peers: the only peers to admit, see peer_names.matching; () for all. types: words of LINK_WORDS for
    the only kinds of links to dial on; () for all. read: returns the interfaces of this machine."""

    def __init__(
        self,
        peers: Sequence[str] = (),
        types: Sequence[str] = (),
        read: Callable[[], list[Interface]] = recent_interfaces,
    ) -> None:
        self._peers = peers
        self._types = types
        self._kinds = {LINK_WORDS[word] for word in types}
        self._read = read

    def refusal(self, own: PeerInfo, other: PeerInfo) -> str:
        """The reason why these two cannot be in one mesh; "" if they can."""
        if reason := refusal(own, other):
            return reason
        if self._peers and not any(matching(word, [other]) for word in self._peers):
            return f"the --node-id-filter of {own.name} does not name it"
        return ""

    def may_dial(self, address: str) -> bool:
        """Whether "host:port" is on a permitted kind of link."""
        return not self._kinds or link_kind(address, self._read()) in self._kinds

    def dialable(self, addresses: Sequence[str]) -> list[str]:
        """The addresses that may be dialled."""
        return [address for address in addresses if self.may_dial(address)]

    def obstacle(self, addresses: Sequence[str]) -> str:
        """The reason why a peer with these addresses cannot be reached; "" if it can."""
        if not addresses or self.dialable(addresses):
            return ""
        return f"none of its addresses is on {' or '.join(self._types)}, as --interface-type-filter requires"
