"""Which prompts each instance has computed for this entry peer, so that the next turn of a chat goes where the last one
is kept. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from exo_mesh.domain.routing.digest import BLOCK_TOKENS

MAX_INSTANCES = 64
MAX_BLOCKS = 16_384
"""Most blocks remembered of one instance, about 1.5 MB; those used longest ago are forgotten first."""


class _Known(msgspec.Struct):
    members: tuple[str, ...]
    blocks: OrderedDict[bytes, None] = msgspec.field(default_factory=OrderedDict)


class KnownPrompts:
    """The blocks of prompts that each instance has computed for this entry peer."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def note(self, instance_id: str, members: Iterable[str], hashes: Sequence[bytes]) -> None:
        """Note that an instance has computed a prompt. members: its peers; with others it has kept nothing."""
        members = tuple(members)
        known = self._known.get(instance_id)
        if known is None or known.members != members:
            known = self._known[instance_id] = _Known(members)
        self._known.move_to_end(instance_id)
        for one in reversed(hashes):  # the first blocks are forgotten last: they are in most prompts
            known.blocks[one] = None
            known.blocks.move_to_end(one)
        while len(known.blocks) > MAX_BLOCKS:
            known.blocks.popitem(last=False)
        while len(self._known) > MAX_INSTANCES:
            self._known.popitem(last=False)

    def num_tokens(self, instance_id: str, members: Iterable[str], hashes: Sequence[bytes]) -> int:
        """How many first tokens of a prompt an instance has probably kept."""
        known = self._known.get(instance_id)
        if known is None or known.members != tuple(members):
            return 0
        low, high = 0, len(hashes)  # an instance that has a block has all blocks before it
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if hashes[middle - 1] in known.blocks else (low, middle - 1)
        return low * BLOCK_TOKENS
