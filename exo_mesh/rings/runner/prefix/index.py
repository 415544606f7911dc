"""Finds the known sequence that shares the longest beginning with a prompt. Pure.

The index is a radix tree over blocks of BLOCK_TOKENS tokens, keyed by their content. An edge holds all blocks up to the
next branch, so a lookup costs one dictionary access and one comparison of bytes for each branch on its way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec

BLOCK_TOKENS = 64
"""Tokens of a block: sequences are compared by whole blocks, and a shorter common beginning is not reused."""

TOKEN_BYTES = array("I").itemsize
_BLOCK = BLOCK_TOKENS * TOKEN_BYTES


def content_of(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, TOKEN_BYTES each."""
    return array("I", tokens).tobytes()


def common_tokens(one: bytes, other: bytes, start: int = 0) -> int:
    """The number of tokens that two contents have in common from their beginning on. start: known to be equal."""
    low, high = start, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        span = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        low, high = (middle, high) if one[span] == other[span] else (low, middle - 1)
    return low


class _Node:
    """An edge of the tree and the branch at its end. label: whole blocks. through: the sequences that begin with all
    blocks from the root to the first block of the label, and in fact with all of the label, because an edge is split
    where one ends. ending: those whose last whole block is the last one of the label."""

    __slots__ = ("children", "ending", "label", "parent", "through")

    def __init__(self, label: bytes, parent: _Node | None) -> None:
        self.label = label
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.through: dict[int, None] = {}
        self.ending: dict[int, None] = {}


class Match(msgspec.Struct, frozen=True):
    """The known sequences that begin like a prompt. blocks: the whole blocks that the closest ones share with it.
    closest: those sequences, oldest first. on_the_way: sequences that end, but for less than a block, within these
    blocks, the longest last."""

    blocks: int
    closest: tuple[int, ...]
    on_the_way: tuple[int, ...]


NO_MATCH = Match(0, (), ())


class PrefixIndex:
    """The radix tree. A sequence is known by a number, and has at least one whole block."""

    def __init__(self) -> None:
        self._root = _Node(b"", None)
        self._ends: dict[int, _Node] = {}
        self.num_blocks = 0
        """Different blocks in the tree."""

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, sequence: int, content: bytes) -> None:
        """Add a sequence, or replace its content. Raises ValueError if the content is shorter than a block."""
        self.remove(sequence)
        stop = len(content) // _BLOCK * _BLOCK
        if not stop:
            raise ValueError(f"{len(content) // TOKEN_BYTES} tokens are no block")
        node, at = self._root, 0
        while at < stop:
            child = node.children.get(content[at : at + _BLOCK])
            if child is None:
                child = self._grow(node, content[at:stop])
            elif (same := _common_bytes(child.label, content, at, stop)) < len(child.label):
                child = self._split(child, same)
            child.through[sequence] = None
            node, at = child, at + len(child.label)
        node.ending[sequence] = None
        self._ends[sequence] = node

    def remove(self, sequence: int) -> None:
        """Forget a sequence; an unknown one changes nothing."""
        node: _Node | None = self._ends.pop(sequence, None)
        if node is not None:
            del node.ending[sequence]
        while node is not None and node.parent is not None:
            del node.through[sequence]
            if not node.through:
                del node.parent.children[node.label[:_BLOCK]]
                self.num_blocks -= len(node.label) // _BLOCK
            node = node.parent

    def match(self, content: bytes) -> Match:
        """The sequences that share the most whole blocks with a prompt."""
        node, at, stop = self._root, 0, len(content)
        closest: Iterable[int] = ()
        ending: list[int] = []
        while (child := node.children.get(content[at : at + _BLOCK])) is not None:
            same = _common_bytes(child.label, content, at, stop)
            closest, at = child.through, at + same
            if same < len(child.label):
                break
            ending += child.ending
            node = child
        return Match(at // _BLOCK, tuple(closest), tuple(ending))

    def blocks_alone(self, sequence: int) -> int:
        """The number of blocks at the end of a sequence that no other sequence has."""
        node, alone = self._ends[sequence], 0
        while node.parent is not None and len(node.through) == 1:
            alone += len(node.label) // _BLOCK
            node = node.parent
        return alone

    def _grow(self, node: _Node, label: bytes) -> _Node:
        child = node.children[label[:_BLOCK]] = _Node(label, node)
        self.num_blocks += len(label) // _BLOCK
        return child

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut an edge after `at` bytes; returns the new first part."""
        assert node.parent is not None, "the root has no label"
        first = _Node(node.label[:at], node.parent)
        first.through = dict(node.through)
        node.parent.children[first.label[:_BLOCK]] = first
        node.label, node.parent = node.label[at:], first
        first.children[node.label[:_BLOCK]] = node
        return first


def _common_bytes(label: bytes, content: bytes, at: int, stop: int) -> int:
    """How many bytes of a label, in whole blocks, are in the content from `at` on."""
    if content.startswith(label, at):
        return len(label)
    low, high = 0, min(len(label), stop - at) // _BLOCK
    while low < high:
        middle = (low + high + 1) // 2
        if content.startswith(label[low * _BLOCK : middle * _BLOCK], at + low * _BLOCK):
            low = middle
        else:
            high = middle - 1
    return low * _BLOCK
