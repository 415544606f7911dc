"""What peers have on their disks of a model, the ring that uses most of it, and the copies that a peer deletes. Pure.

KV in files can be used only by a ring with the same cuts, where each stage runs on the machine that has its files of
the same prompts. So placement keeps such a ring if it is as good as the ring that it would choose otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.fitting import stage_stops
from exo_mesh.domain.footprint import pools_to_try, stage_bytes
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.ring_candidates import Candidate, Group, Surroundings, is_meant
from exo_mesh.domain.shard import KeptLayers

MOST_STEPS = 10_000
"""Most stages that are looked at to find rings: peers report what they like, and the number of rings grows fast."""

Ring = list[tuple[Candidate, range]]
"""Peers in ring order with their layers."""


class _KeptPart(msgspec.Struct, frozen=True):
    """A stage that could be made from files on a disk. tokens: of KV in its files. keys: of these files, see
    KeptLayers. is_fetched: whether files of the model would have to be fetched for it."""

    peer: Candidate
    layers: range
    tokens: int = 0
    activation_dtype: str = ""
    is_fetched: bool = False
    keys: tuple[int, ...] = ()


def kept_rings(
    card: ModelCard, groups: Sequence[Group], size: int, context_limit: int, around: Surroundings
) -> Iterator[tuple[Ring, int]]:
    """Yields the rings of `size` stages that use KV or weights on disks, with the KV pool that fits; the most useful
    first.

    A ring is useful if each stage finds KV of the same prompts in its files, or if some peer lacks files of the model
    and no stage of the ring does. More KV is better, then fewer stages that fetch files. The order does not depend on
    the proposer.
    """
    if not around.on_disk:
        return
    found: dict[tuple[tuple[str, int], ...], tuple[tuple[int, int, int], Ring]] = {}
    for group in groups:
        for parts in _chains(card, group, size, around):
            ring = [(part.peer, part.layers) for part in parts]
            worth = _worth(parts, all(peer.has_files for peer in group))
            key = tuple((peer.peer_id, layers.start) for peer, layers in ring)
            if worth is None or not is_meant(group, [part.peer for part in parts]):
                continue
            if key not in found or worth < found[key][0]:
                found[key] = worth, ring
    for _, (_, ring) in sorted(found.items(), key=lambda item: (item[1][0], item[0])):
        for pool_tokens in pools_to_try(context_limit):
            if _fits(card, ring, pool_tokens, around):
                yield ring, pool_tokens
                break


def _worth(parts: Sequence[_KeptPart], all_have_files: bool) -> tuple[int, int, int] | None:
    """A key that sorts the most useful ring first; None for a ring that uses nothing."""
    least = min(part.tokens for part in parts)
    num_fetched = sum(part.is_fetched for part in parts)
    if not least and (all_have_files or num_fetched):
        return None
    shared = _shared_keys(parts)
    if shared:  # what all stages have of the same prompts, to judge by the newest files
        least = least * len(shared) // min(len(part.keys) for part in parts if part.keys)
    return -least, num_fetched, -sum(part.tokens for part in parts)


def _shared_keys(parts: Iterable[_KeptPart | KeptLayers]) -> set[int] | None:
    """The keys that all parts have; None if no part says its keys. Weights, and KV at peers of older versions, have
    none and fit to all."""
    known = [set(part.keys) for part in parts if part.keys]
    return set.intersection(*known) if known else None


def _chains(card: ModelCard, group: Group, size: int, around: Surroundings) -> Iterator[list[_KeptPart]]:
    """The ways to hold all layers by `size` stages on peers of a group, as far as MOST_STEPS allow."""
    by_start: dict[int, list[_KeptPart]] = {}
    for part in _parts(card, group, around):
        by_start.setdefault(part.layers.start, []).append(part)
    for parts in by_start.values():
        parts.sort(key=lambda part: (-part.tokens, part.is_fetched, part.peer.peer_id, -part.layers.stop))
    steps = 0

    def extend(chain: list[_KeptPart], start: int) -> Iterator[list[_KeptPart]]:
        nonlocal steps
        if start == card.num_layers or len(chain) == size:
            if start == card.num_layers and len(chain) == size:
                yield list(chain)
            return
        taken = {peer_id for part in chain for peer_id in part.peer.members}
        for part in by_start.get(start, ()):
            steps += 1
            if steps > MOST_STEPS:
                return
            dtypes = {part.activation_dtype, *(one.activation_dtype for one in chain if one.tokens)}
            longer = [*chain, part]
            is_one_ring = not part.tokens or (len(dtypes) == 1 and _shared_keys(longer) != set())
            if is_one_ring and taken.isdisjoint(part.peer.members):
                yield from extend(longer, part.layers.stop)

    yield from extend([], 0)


def _parts(card: ModelCard, group: Group, around: Surroundings) -> Iterator[_KeptPart]:
    """The stages for which a peer of the group has KV; if a peer lacks files, also those between the same cuts for
    which a peer has the weights."""
    kept = around.on_disk
    for peer in group:
        for one in _common(peer, kept):
            if one.engine == peer.engine and one.tokens and 0 <= one.start < one.stop <= card.num_layers:
                is_fetched = not _has_weights(peer, one.start, one.stop, kept)
                yield _KeptPart(
                    peer, range(one.start, one.stop), one.tokens, one.activation_dtype, is_fetched, one.keys
                )
    if all(peer.has_files for peer in group):
        return
    ends = {end for peer in group for one in _common(peer, kept) for end in (one.start, one.stop)}
    cuts = sorted({0, card.num_layers, *(end for end in ends if 0 < end < card.num_layers)})
    for peer in group:
        for index, start in enumerate(cuts):
            for stop in cuts[index + 1 :]:
                if _has_weights(peer, start, stop, kept):
                    yield _KeptPart(peer, range(start, stop))


def _common(peer: Candidate, kept: Mapping[str, Sequence[KeptLayers]]) -> Iterator[KeptLayers]:
    """What every member of a candidate has on its disk; of a group, each rank its own share of the same prompts."""
    if peer.group is None:
        yield from (one for one in kept.get(peer.peer_id, ()) if one.size == 1)
        return
    shares = [
        {(one.engine, one.start, one.stop, one.activation_dtype): one for one in kept.get(peer_id, ())
         if (one.rank, one.size) == (rank, peer.size)}
        for rank, peer_id in enumerate(peer.members)
    ]  # fmt: skip
    for key in shares[0]:
        if all(key in share for share in shares):
            ranks = [share[key] for share in shares]
            if (keys := _shared_keys(ranks)) != set():
                yield replace(min(ranks, key=lambda rank: rank.tokens), keys=tuple(sorted(keys or ())))


def _has_weights(peer: Candidate, start: int, stop: int, kept: Mapping[str, Sequence[KeptLayers]]) -> bool:
    """Whether no member of a candidate would have to fetch files for these layers."""
    return peer.has_files or all(
        any(not one.tokens and one.start <= start and stop <= one.stop for one in kept.get(peer_id, ()))
        for peer_id in peer.members
    )


def _fits(card: ModelCard, ring: Ring, pool_tokens: int, around: Surroundings) -> bool:
    """Whether the cuts are legal, and each stage fits its peer."""
    held = [around.held_by(card, peer) for peer, _ in ring]
    return all(
        layers.stop in stops and stage_bytes(one, layers.start, layers.stop, pool_tokens) <= peer.usable_bytes
        for one, stops, (peer, layers) in zip(held, stage_stops(held), ring, strict=True)
    )


GRACE_S = 30.0
"""A copy that was used within this time is kept: a plan that needs the copy may not be in the view yet."""


class StagedCopy(msgspec.Struct, frozen=True):
    """A local copy of a model of the store. used_at: seconds of the caller's clock. is_in_use: an instance or a fetch
    needs it. is_orphan: the store's host is reachable and no longer has the model."""

    model: str
    num_bytes: int
    used_at: float
    is_in_use: bool = False
    is_orphan: bool = False


def surplus(copies: Iterable[StagedCopy], keep_bytes: int | None, now: float) -> list[str]:
    """Lists the models whose copies are to be deleted, the most recently used first.

    Idle copies are kept, newest first, as long as together they take at most `keep_bytes`; 0 keeps none, None keeps
    all. Orphans are deleted even if there is room. A copy in use is never deleted, and does not count against
    keep_bytes.
    """
    left = keep_bytes
    found = []
    for copy in sorted(copies, key=lambda one: (-one.used_at, one.model)):
        if copy.is_in_use:
            continue
        if copy.is_orphan:
            found.append(copy.model)
        elif left is None or copy.num_bytes <= left:
            left = None if left is None else left - copy.num_bytes
        elif now - copy.used_at >= GRACE_S:
            found.append(copy.model)
    return found
