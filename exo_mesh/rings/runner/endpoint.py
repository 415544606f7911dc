"""A runner's data-plane server, and its hop to the next stage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

from exo_mesh.base.telemetry.durations import LAP_BOUNDS_S, Durations
from exo_mesh.base.versions import SPOKEN
from exo_mesh.domain.frame import Frame, RingHello
from exo_mesh.domain.group_placement import REDUCES_PER_LAYER
from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.engine.contract import GroupTimer, MemoryTeller
from exo_mesh.errors import RankLostError, StageLostError
from exo_mesh.rings.runner.calls import DriverService
from exo_mesh.rings.runner.group.ranks import RankLinks, watch_leader
from exo_mesh.rings.runner.inbox import Change, Reassure
from exo_mesh.rings.runner.queue_places import SIGN_OF_LIFE_S
from exo_mesh.rings.runner.stage_setup import StageSetup
from exo_mesh.rings.runner.worker import Worker
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.wire.data_server import Binding, DataServer
from exo_mesh.wire.incoming import MAX_BYTES
from exo_mesh.wire.ring_link import RingLink
from exo_mesh.wire.ring_receiver import RingReceiver

HOP_LOST_S = 60.0
"""Seconds that a stage without its next stage waits for a new plan. Its weights are worth keeping, and the peer that
makes the plan may first have to notice that the owner of the instance has died."""

HOP_SHOWN_S = 3.0
"""Seconds for which a hop that its node wants to see stays open: the node looks at two heartbeats per second."""

FRAME_FOLLOWS_S = 1.0
"""Seconds for which a hop stays open because a frame will probably come: it comes right after a dial, over a link that
may be slow."""

_log = logging.getLogger(__name__)


class Endpoint:
    """The data-plane server, its service, and the hops that begin at this runner. Made and used on the event loop;
    `heartbeat` may be called from any thread. on_hop_lost: called with the reason when the next stage cannot be reached
    any more."""

    def __init__(
        self,
        setup: StageSetup,
        worker: Worker,
        credentials: CredentialSource | None = None,
        on_hop_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        plan = setup.plan
        self._setup = setup
        self._worker = worker
        self._credentials = credentials
        self._server: DataServer | None = None
        self._on_hop_lost = on_hop_lost
        self._hops = Durations(LAP_BOUNDS_S)
        self._link = self._new_link(setup)
        self._changed = asyncio.Event()
        self._ranks: RankLinks | None = None
        if setup.rank is not None and setup.rank.is_leader:
            self._ranks = RankLinks(_hello(setup), setup.rank.size, credentials)
        status = (lambda: worker.status) if setup.follows else None
        self._receiver = RingReceiver(
            SPOKEN, plan.instance_id, plan.ballot, setup.before, worker.accept, status, self._called
        )
        self._service = DriverService(plan, worker)

    async def listen(self, binding: Binding) -> int:
        """Start the server; returns the port. Raises TransportError if no port of the range is free."""
        drives = self._setup.is_last and not self._setup.follows
        self._server = DataServer(self._max_bytes, self._service.answers() if drives else (), self._receiver)
        return await self._server.listen(binding, self._credentials)

    def _max_bytes(self, method: str, data: bytes) -> int:
        """The size limit of a message: a request has at most 5 bytes for each prompt token, and as many for each token
        that it resumes after."""
        return MAX_BYTES + 10 * self._setup.plan.context_limit

    def link_to(self, endpoint: str, keep_stream: bool) -> None:
        """Set the endpoint of the next stage. keep_stream: dial there only when the present stream breaks."""
        self._link.set_endpoint(endpoint, keep_stream=keep_stream)

    def _new_link(self, setup: StageSetup) -> RingLink:
        return RingLink(_hello(setup), self._credentials, self._hops.add, lambda: self._worker.rest.is_idle)

    def open_hop(self) -> None:
        """Open a hop that rests, for long enough that the node sees whether it works."""
        self._link.open(HOP_SHOWN_S)

    def want_lap(self) -> None:
        """Let the driver of the idle ring send a frame round soon, because a machine is short of memory."""
        if self._setup.is_last:
            self._worker.send_lap()
        else:
            self._link.knock()

    def _called(self, hello: RingHello) -> None:
        """The stage before has connected. A frame will probably follow, so the next hop is opened, too, but not behind
        the driver, where the lap ends."""
        if hello.wants_lap:
            self.want_lap()
        elif not self._setup.is_last and not self._setup.follows:
            self._link.open(FRAME_FOLLOWS_S)

    def change(self, change: Change) -> None:
        """Continue under another plan, in which this stage has the same layers. Frames and requests of the old plan are
        refused from now on, and its unsent frames are dropped; the new hop waits for `link_to`."""
        self._setup, plan = change.setup, change.setup.plan
        link = self._new_link(change.setup)
        link.frames_out, link.bytes_out = self._link.frames_out, self._link.bytes_out
        self._link = link
        self._changed.set()
        self._receiver.change(plan.ballot, change.setup.before)
        self._service.change(plan)
        self._worker.change(change)

    def ranks_at(self, endpoints: Sequence[str]) -> RankLinks:
        """The hops to the other ranks of this leader's tensor group. Raises RankLostError unless there is one for each
        endpoint."""
        if self._ranks is None or len(self._ranks) != len(endpoints):
            raise RankLostError(
                f"got the endpoints of {len(endpoints)} other ranks; this stage leads no group of that size"
            )
        return self._ranks

    async def run(self) -> None:
        """Work and keep the hops up until cancelled. Raises StageLostError if the next stage is lost and no
        other plan comes within HOP_LOST_S, and RankLostError if another rank of this tensor group is lost."""
        async with asyncio.TaskGroup() as group:
            for part in self._beside():
                group.create_task(part)
            if (ranks := self._ranks) is None:
                await self._worker.run(self._send)
            else:
                await self._worker.run(self._send, ranks.hand_out, lambda: ranks.status)

    def _beside(self) -> Iterator[Coroutine[Any, Any, None]]:
        """The coroutines that run beside the worker."""
        if self._setup.follows:
            yield watch_leader(self._receiver)
            return
        if self._setup.num_stages > 1:
            yield self._keep_hop()
            yield self._reassure()
        if self._ranks is not None:
            yield self._ranks.run()

    def _send(self, frame: Frame) -> Awaitable[None]:
        return self._link.send(frame) if frame.ballot == self._setup.plan.ballot else _drop()

    async def _reassure(self) -> None:
        """While the hop is down, notify the callers of a driver from time to time that their requests are alive."""
        while True:
            await asyncio.sleep(SIGN_OF_LIFE_S)
            if self._worker.driver is not None and not self._link.linked:
                self._worker.inbox.put_nowait(Reassure())

    async def _keep_hop(self) -> None:
        """Run the hop of the current plan, and then of each plan that replaces it."""
        while True:
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait(), name="change of plan")
            hop = asyncio.create_task(self._link.run(), name="hop")
            try:
                await asyncio.wait((hop, changed), return_when=asyncio.FIRST_COMPLETED)
                if hop.done():
                    await self._without_hop(hop, changed)
            finally:
                for task in (hop, changed):
                    task.cancel()
                await asyncio.wait((hop, changed))

    async def _without_hop(self, hop: asyncio.Task[None], changed: asyncio.Task[bool]) -> None:
        """Wait for another plan after the hop was lost. Raises the error of the hop if no plan comes, or if it is not a
        loss."""
        error = hop.exception()
        if isinstance(error, StageLostError):
            if not changed.done():
                _log.warning("%s; waiting for another plan", error)
                self._on_hop_lost(str(error))
                await asyncio.wait((changed,), timeout=HOP_LOST_S)
            if changed.done():
                return
        if error is not None:
            raise error

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    @property
    def _linked(self) -> bool:
        """Whether every hop that begins here is up."""
        alone = self._setup.num_stages == 1 or self._setup.follows
        return (alone or self._link.linked) and (self._ranks is None or self._ranks.linked)

    def heartbeat(self) -> Heartbeat:
        """The counters of this moment. Raises RankLostError if this is a rank that hangs; see Worker.check_alive."""
        worker, link, driver = self._worker, self._link, self._worker.driver
        worker.check_alive()
        worker.look()
        engine, clock = worker.engine, worker.clock
        beat = Heartbeat(
            progress=worker.progress,
            busy_s=worker.busy_s,
            frames_in=self._receiver.frames_in,
            frames_out=link.frames_out,
            bytes_out=link.bytes_out,
            linked=self._linked,
            sequences=worker.num_sequences,
            memory_bytes=engine.memory_bytes() if engine else 0,
            computing_tokens=clock.tokens,
            computing_prefill=clock.is_prefill,
            expected_s=clock.expected_s(),
            prefill_frames=clock.prefill_frames,
            decode_frames=clock.decode_frames,
            prefill_tokens=clock.prefill_tokens,
            prefill_s=clock.prefill_s,
            is_idle=worker.rest.is_idle,
            hop_rests=link.rests,
            hop_took=self._hops.snapshot(),
            library=engine.library_memory() if isinstance(engine, MemoryTeller) else None,
        )
        if worker.check is not None:
            beat.all_reduce_s = worker.check.all_reduce_s
            if isinstance(engine, GroupTimer):
                beat.all_reduce_s = engine.all_reduce_s
            beat.step_all_reduces = REDUCES_PER_LAYER * len(self._setup.plan.stages[self._setup.index].shard)
        worker.describe_prefix(beat.prefix)
        if driver is not None:
            beat.queued, beat.running, beat.tokens = driver.num_waiting, driver.num_running, driver.outputs.tokens
            beat.lap_p50_s, beat.lap_p99_s = driver.laps.quantiles()
            beat.laps = driver.laps.count
            driver.describe_load(beat)
        return beat


async def _drop() -> None:
    """Sends nothing: the frame is of an earlier plan."""


def _hello(setup: StageSetup) -> RingHello:
    return RingHello(SPOKEN.oldest, SPOKEN.newest, setup.plan.instance_id, setup.plan.ballot, setup.index)
