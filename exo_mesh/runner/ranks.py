"""What a tensor group is to its leader: every frame goes to all ranks, in order, before the leader computes it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

from exo_mesh.domain.frame import Frame, MemoryStatus
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.engine.contract import GroupCheck
from exo_mesh.errors import RankLostError, StageLostError
from exo_mesh.proto import ring_pb2 as pb
from exo_mesh.runner.rank_environment import VARIABLES, environment
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.transport.ring_link import LOST_AFTER_S, RingLink
from exo_mesh.transport.ring_receiver import RingReceiver

SHORTEST_DEADLINE_S = 10.0
CHUNK_TIMES = 20
REDUCE_TIMES = 2000
"""A frame may take so many times what the slowest chunk of the check took, or as long as so many all-reduces: far
longer contexts, a machine that is busy with other things. What takes longer hangs."""

FIRST_CALL_S = 120.0
"""How long a rank waits for its leader's first call: the leader's own check may take longer than that of the others."""

HAND_OUT_S = 3 * LOST_AFTER_S
"""Longest that a frame waits for the hop to a rank; one that is gone is given up before, after LOST_AFTER_S."""

LEADER_GONE_S = 2 * LOST_AFTER_S
_LOOK_S = 0.5


def frame_deadline_s(check: GroupCheck, longest_s: float) -> float:
    """How long a frame may take before the group counts as hung, from what was measured when it was checked."""
    measured_s = max(CHUNK_TIMES * check.chunk_s, REDUCE_TIMES * check.all_reduce_s)
    return min(longest_s, SHORTEST_DEADLINE_S + measured_s)


class RankFiles:
    """The files that tell MLX which rank this process is; it reads them once."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def write(self, wiring: RankWiring) -> None:
        """Write them, and put the variables that name them into the environment of this process: call it before the
        library is imported. Raises EngineError if the group could not be formed."""
        self._folder = Path(tempfile.mkdtemp(prefix="exo-mesh-rank-"))
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(environment(wiring, self._folder))

    def remove(self) -> None:
        """From any thread, at any time."""
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class RankLinks:
    """The leader's hops to ranks 1 to size - 1. Used on the event loop."""

    def __init__(self, hello: pb.RingHello, size: int, credentials: CredentialSource | None) -> None:
        self._links = [RingLink(hello, credentials) for _ in range(size - 1)]

    @property
    def linked(self) -> bool:
        return all(link.linked for link in self._links)

    def __len__(self) -> int:
        return len(self._links)

    @property
    def status(self) -> MemoryStatus:
        """Of the memory of the poorest of them, as they said last."""
        return reduce(MemoryStatus.worse, (link.status for link in self._links), MemoryStatus())

    def link_to(self, endpoints: Sequence[str]) -> None:
        """Where ranks 1, 2, ... listen, one endpoint for each."""
        for link, endpoint in zip(self._links, endpoints, strict=True):
            link.set_endpoint(endpoint)

    async def hand_out(self, frame: Frame) -> None:
        """Returns when the transport has taken the frame for every rank: computing blocks the loop, and a hop that is
        down could not be dialled again meanwhile. Raises RankLostError if one stays down, or was never told of."""
        for link in self._links:
            await link.send(frame)
        for rank, link in enumerate(self._links, 1):
            try:
                async with asyncio.timeout(HAND_OUT_S):
                    await link.settle()
            except TimeoutError as exc:
                raise RankLostError(f"rank {rank} cannot be given frames for {HAND_OUT_S:.0f} s") from exc

    async def run(self) -> None:
        """Keep the hops up until cancelled. Raises RankLostError when a rank is gone."""
        async with asyncio.TaskGroup() as group:
            for rank, link in enumerate(self._links, 1):
                group.create_task(_keep_up(link, rank))


async def _keep_up(link: RingLink, rank: int) -> None:
    try:
        await link.run()
    except StageLostError as exc:
        raise RankLostError(f"rank {rank} is lost: {exc}".replace("the next stage", "it")) from exc


async def watch_leader(receiver: RingReceiver) -> None:
    """In a rank that follows: raises RankLostError when the leader has had no stream to it for too long."""
    while True:
        await asyncio.sleep(_LOOK_S)
        patience_s = LEADER_GONE_S if receiver.was_called else FIRST_CALL_S
        if not receiver.num_streams and time.monotonic() - receiver.alone_since > patience_s:
            raise RankLostError(f"the leader of the tensor group has not been there for {patience_s:.0f} s")
