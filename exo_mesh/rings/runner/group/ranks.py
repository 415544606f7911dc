"""A leader's view of its tensor group: every frame goes to all ranks, in order, before the leader computes it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

from exo_mesh.domain.frame import Frame, MemoryStatus, RingHello
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.engine.contract import GroupCheck
from exo_mesh.errors import RankLostError, StageLostError
from exo_mesh.rings.runner.group.environment import VARIABLES, environment
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.wire.ring_link import LOST_AFTER_S, RingLink
from exo_mesh.wire.ring_receiver import RingReceiver

SHORTEST_DEADLINE_S = 10.0
CHUNK_TIMES = 20
REDUCE_TIMES = 2000
"""A frame may take CHUNK_TIMES the slowest chunk of the check, or REDUCE_TIMES its all-reduce: enough for far longer
contexts and a busy machine. A frame that takes longer hangs."""

FIRST_CALL_S = 120.0
"""Seconds that a rank waits for its leader's first call: the leader's check may take longer than the ranks'."""

HAND_OUT_S = 3 * LOST_AFTER_S
"""Longest time that a frame waits for the hop to a rank; a lost rank is given up earlier, after LOST_AFTER_S."""

LEADER_GONE_S = 2 * LOST_AFTER_S
_LOOK_S = 0.5


def frame_deadline_s(check: GroupCheck, longest_s: float) -> float:
    """Seconds that a frame may take before the group counts as hung, from the measurements of the group check."""
    measured_s = max(CHUNK_TIMES * check.chunk_s, REDUCE_TIMES * check.all_reduce_s)
    return min(longest_s, SHORTEST_DEADLINE_S + measured_s)


class RankFiles:
    """The files from which MLX reads which rank this process is; MLX reads them once."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def write(self, wiring: RankWiring) -> None:
        """Write the files, and set the environment variables of this process that name them: call it before the library
        is imported. Raises EngineError if the group could not be formed."""
        self._folder = Path(tempfile.mkdtemp(prefix="exo-mesh-rank-"))
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(environment(wiring, self._folder))

    def remove(self) -> None:
        """Remove the files. From any thread, at any time."""
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class RankLinks:
    """The leader's hops to ranks 1 to size - 1. Used on the event loop."""

    def __init__(self, hello: RingHello, size: int, credentials: CredentialSource | None) -> None:
        self._links = [RingLink(hello, credentials) for _ in range(size - 1)]

    @property
    def linked(self) -> bool:
        return all(link.linked for link in self._links)

    def __len__(self) -> int:
        return len(self._links)

    @property
    def status(self) -> MemoryStatus:
        """The memory status of the rank with the least memory, as last reported."""
        return reduce(MemoryStatus.worse, (link.status for link in self._links), MemoryStatus())

    def link_to(self, endpoints: Sequence[str]) -> None:
        """Set where ranks 1, 2, ... listen, one endpoint for each."""
        for link, endpoint in zip(self._links, endpoints, strict=True):
            link.set_endpoint(endpoint)

    async def hand_out(self, frame: Frame) -> None:
        """Return when the transport has taken the frame for every rank: computing blocks the loop, and a broken hop
        could not be dialled again meanwhile. Raises RankLostError if a hop stays down, or has no endpoint."""
        for link in self._links:
            await link.send(frame)
        for rank, link in enumerate(self._links, 1):
            try:
                async with asyncio.timeout(HAND_OUT_S):
                    await link.settle()
            except TimeoutError as exc:
                raise RankLostError(f"rank {rank} has taken no frame for {HAND_OUT_S:.0f} s") from exc

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
    """Watch the leader from another rank: raises RankLostError when the leader has had no stream to this rank for too
    long."""
    while True:
        await asyncio.sleep(_LOOK_S)
        patience_s = LEADER_GONE_S if receiver.was_called else FIRST_CALL_S
        if not receiver.num_streams and time.monotonic() - receiver.alone_since > patience_s:
            raise RankLostError(f"the leader of the tensor group has had no stream to this rank for {patience_s:.0f} s")
