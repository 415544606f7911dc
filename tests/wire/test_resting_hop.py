"""A hop over real gRPC on loopback that rests while its ring is idle: nothing is lost, and it comes back with the next
frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest

from exo_mesh.base.versions import SPOKEN
from exo_mesh.domain.frame import RingHello
from exo_mesh.errors import StageLostError
from exo_mesh.wire import ring_link
from exo_mesh.wire.ring_link import RingLink
from exo_mesh.wire.ring_receiver import RingReceiver
from tests.wire.test_ring_hop import BALLOT, Receiving, frame, hello, until


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ring_link, "REST_LOOK_S", 0.01)
    yield


class Hop:
    """A hop whose ring is idle or not, as the test says."""

    def __init__(self) -> None:
        self.is_idle = False
        self.hellos: list[RingHello] = []
        self.receiving = Receiving()
        self.receiving.receiver = RingReceiver(
            SPOKEN, "i", BALLOT, 0, self.receiving._deliver, on_hello=self.hellos.append
        )
        self.link = RingLink(hello(), may_rest=lambda: self.is_idle)
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.receiving.up()
        self.link.set_endpoint(f"127.0.0.1:{self.receiving.port}")
        self.running = asyncio.create_task(self.link.run())
        await until(lambda: self.link.linked)

    async def stop(self) -> None:
        assert self.running is not None
        self.running.cancel()
        await asyncio.wait([self.running])
        if self.receiving.server is not None:
            await self.receiving.down()

    async def fall_asleep(self) -> None:
        self.is_idle = True
        await until(lambda: self.link.rests)

    async def until_arrived(self, steps: int) -> None:
        await self.receiving.until(lambda: len(self.receiving.frames) >= steps)
        assert [one.step for one in self.receiving.frames] == list(range(1, steps + 1))


@asynccontextmanager
async def a_hop() -> AsyncIterator[Hop]:
    hop = Hop()
    await hop.start()
    try:
        yield hop
    finally:
        await hop.stop()


async def test_a_hop_stays_open_while_its_ring_is_in_use() -> None:
    async with a_hop() as hop:
        await hop.link.send(frame(1))
        await hop.until_arrived(1)
        await asyncio.sleep(0.1)  # ten looks
        assert not hop.link.rests and hop.receiving.receiver.num_streams == 1


async def test_an_idle_hop_is_closed_and_counts_as_linked() -> None:
    async with a_hop() as hop:
        await hop.link.send(frame(1))
        await hop.fall_asleep()
        assert hop.link.linked
        await until(lambda: hop.receiving.receiver.num_streams == 0)
        assert not hop.link._unacked, "the receiver has acknowledged the frame, although one in 64 is usual"
        assert hop.running is not None and not hop.running.done()


async def test_the_next_frame_opens_a_hop_that_rests() -> None:
    async with a_hop() as hop:
        for step in range(1, 4):
            await hop.link.send(frame(step))
            await hop.fall_asleep()
            await hop.until_arrived(step)
            hop.is_idle = False
        await hop.link.send(frame(4))
        await hop.until_arrived(4)
        await until(lambda: hop.link.linked)
        assert not hop.link.rests and len(hop.hellos) == 4


async def test_a_frame_that_is_sent_while_the_hop_closes_arrives_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver holds back its last acknowledgement until the frame has been sent."""
    async with a_hop() as hop:
        receiver, closing, sent = hop.receiving.receiver, asyncio.Event(), asyncio.Event()
        acknowledge = receiver._acknowledge_all

        async def late(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
            closing.set()
            await sent.wait()
            await acknowledge(context)

        monkeypatch.setattr(receiver, "_acknowledge_all", late)
        await hop.link.send(frame(1))
        hop.is_idle = True
        await closing.wait()
        await hop.link.send(frame(2))
        hop.is_idle = False
        sent.set()
        await hop.until_arrived(2)


@pytest.mark.parametrize("rounds", [200])
async def test_frames_that_race_with_the_closing_of_the_hop_arrive_once_and_in_order(rounds: int) -> None:
    async with a_hop() as hop:
        hop.is_idle = True
        for step in range(1, rounds + 1):
            await hop.link.send(frame(step))
            await asyncio.sleep(0.0005 * (step % 30))
        await hop.until_arrived(rounds)
        assert len(hop.hellos) > 1, "it has rested in between"


async def test_a_frame_without_an_acknowledgement_keeps_the_hop_from_resting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver of an older version ends the stream without one; after the redial its hello has it."""
    async with a_hop() as hop:

        async def say_nothing(context: object) -> None:
            pass

        monkeypatch.setattr(hop.receiving.receiver, "_acknowledge_all", say_nothing)
        await hop.link.send(frame(1))
        await hop.fall_asleep()
        assert len(hop.hellos) == 2 and not hop.link._unacked
        await hop.until_arrived(1)


async def test_a_receiver_that_does_not_end_the_stream_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_link, "REST_S", 0.05)
    async with a_hop() as hop:

        async def wait(context: object) -> None:
            await asyncio.sleep(20)

        acknowledge = hop.receiving.receiver._acknowledge_all
        monkeypatch.setattr(hop.receiving.receiver, "_acknowledge_all", wait)
        await hop.link.send(frame(1))
        hop.is_idle = True
        await until(lambda: len(hop.hellos) >= 2)
        monkeypatch.setattr(hop.receiving.receiver, "_acknowledge_all", acknowledge)
        await hop.fall_asleep()
        await hop.until_arrived(1)


async def test_a_next_stage_that_came_back_meanwhile_gets_the_next_frame() -> None:
    async with a_hop() as hop:
        await hop.link.send(frame(1))
        await hop.fall_asleep()
        await hop.receiving.down()
        await hop.receiving.up()
        await hop.link.send(frame(2))
        await hop.until_arrived(2)


async def test_a_next_stage_that_went_meanwhile_is_lost_with_the_next_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_link, "LOST_AFTER_S", 0.3)
    async with a_hop() as hop:
        await hop.fall_asleep()
        await hop.receiving.down()
        await asyncio.sleep(0.5)  # longer than LOST_AFTER_S
        assert hop.link.rests and hop.running is not None and not hop.running.done()
        await hop.link.send(frame(1))
        assert not hop.link.linked
        with pytest.raises(StageLostError, match="cannot be reached"):
            async with asyncio.timeout(20):
                await hop.running


async def test_a_hop_that_rests_long_is_tried_and_rests_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_link, "TRY_AFTER_S", 0.05)
    async with a_hop() as hop:
        await hop.link.send(frame(1))
        await hop.fall_asleep()
        await until(lambda: len(hop.hellos) >= 3)
        await until(lambda: hop.link.rests)
        await hop.link.send(frame(2))
        await hop.until_arrived(2)


async def test_a_loss_while_a_hop_rests_is_found_without_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_link, "LOST_AFTER_S", 0.3)
    monkeypatch.setattr(ring_link, "TRY_AFTER_S", 0.05)
    async with a_hop() as hop:
        await hop.fall_asleep()
        await hop.receiving.down()
        assert hop.running is not None
        with pytest.raises(StageLostError, match="cannot be reached"):
            async with asyncio.timeout(20):
                await hop.running


async def test_a_next_stage_that_lost_what_it_had_is_a_lost_stage_at_the_next_frame() -> None:
    async with a_hop() as hop:
        await hop.link.send(frame(1))
        await hop.fall_asleep()
        hop.receiving.receiver._last_step = 0
        await hop.link.send(frame(2))
        assert hop.running is not None
        with pytest.raises(StageLostError, match="frame 2 follows frame 0"):
            async with asyncio.timeout(20):
                await hop.running


async def test_a_hop_that_rests_follows_its_stage_to_another_address() -> None:
    async with a_hop() as hop:
        await hop.fall_asleep()
        hop.link.set_endpoint(f"localhost:{hop.receiving.port}", keep_stream=True)
        await asyncio.sleep(0.05)
        assert hop.link.rests, "the same stage: the address is for the next dial"
        await hop.receiving.down()
        hop.receiving.port = 0
        await hop.receiving.up()
        hop.link.set_endpoint(f"127.0.0.1:{hop.receiving.port}")
        await until(lambda: len(hop.hellos) == 2)
        await hop.link.send(frame(1))
        await hop.until_arrived(1)


async def test_a_hop_can_be_opened_to_see_whether_it_works() -> None:
    async with a_hop() as hop:
        await hop.fall_asleep()
        hop.link.open(0.3)
        await until(lambda: hop.link.linked and not hop.link.rests)
        assert not hop.hellos[-1].wants_lap
        await until(lambda: hop.link.rests)


async def test_a_knock_asks_for_a_lap_and_is_for_a_hop_that_rests() -> None:
    async with a_hop() as hop:
        hop.link.knock()
        await hop.fall_asleep()
        assert len(hop.hellos) == 1, "it was open"
        hop.link.knock()
        await until(lambda: len(hop.hellos) == 2)
        assert hop.hellos[1].wants_lap
        await until(lambda: hop.link.rests)
        hop.link.open()
        await until(lambda: len(hop.hellos) == 3)
        assert not hop.hellos[2].wants_lap


async def test_a_hop_that_rests_ends_at_once_when_its_stage_ends() -> None:
    async with a_hop() as hop:
        await hop.fall_asleep()
        assert hop.running is not None
        hop.running.cancel()
        async with asyncio.timeout(5):
            await asyncio.wait([hop.running])


async def test_a_change_of_plan_reaches_a_receiver_whose_hop_rests() -> None:
    """The old hop is dropped, and the new one begins with step 1."""
    async with a_hop() as hop:
        await hop.link.send(frame(1))
        await hop.fall_asleep()
        higher = type(BALLOT)(3, "me")
        hop.receiving.receiver.change(higher, 2)
        new = RingLink(hello(higher, stage=2), may_rest=lambda: True)
        new.set_endpoint(f"127.0.0.1:{hop.receiving.port}")
        running = asyncio.create_task(new.run())
        await new.send(frame(1).changed(ballot=higher))
        await hop.receiving.until(lambda: len(hop.receiving.frames) == 2)
        await until(lambda: new.rests)
        running.cancel()
        await asyncio.wait([running])
