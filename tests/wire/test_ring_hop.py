"""A hop over real gRPC on loopback: order, repeats, breaks, strangers."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable

import grpc
import numpy as np
import pytest

from exo_mesh.base.versions import SPOKEN
from exo_mesh.domain.frame import HIDDEN, Frame, RingHello, Row
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.tensor import Tensor
from exo_mesh.errors import StageLostError, TransportError
from exo_mesh.wire.channel_options import SERVER_OPTIONS
from exo_mesh.wire.codec import encode_frame, encode_hello
from exo_mesh.wire.ring_link import FRAMES_METHOD, RingLink, _first_to_end
from exo_mesh.wire.ring_receiver import ACK_EVERY_FRAMES, RingReceiver, _to_its_end

BALLOT = Ballot(2, "me")


def hello(ballot: Ballot = BALLOT, instance: str = "i", stage: int = 0) -> RingHello:
    return RingHello(SPOKEN.oldest, 0, instance, ballot, stage)


def frame(step: int, floats: int = 16) -> Frame:
    hidden = Tensor.from_numpy(np.full((1, floats), step, dtype=np.float32))
    return Frame(BALLOT, step, (Row(1, step, 1),), (step,), tensors={HIDDEN: hidden})


class Receiving:
    """A stage's receiving end that can be taken down and brought back on the same port."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.changed = asyncio.Event()
        self.gate: asyncio.Event | None = None
        self.receiver = RingReceiver(SPOKEN, "i", BALLOT, 0, self._deliver)
        self.server: grpc.aio.Server | None = None
        self.port = 0

    async def _deliver(self, frame: Frame) -> None:
        if self.gate is not None:
            await self.gate.wait()
        self.frames.append(frame)
        self.changed.set()

    async def up(self) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        self.server.add_generic_rpc_handlers((self.receiver.handler(),))
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def down(self) -> None:
        assert self.server is not None
        await self.server.stop(grace=None)
        self.server = None

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def receiving() -> AsyncIterator[Receiving]:
    receiving = Receiving()
    await receiving.up()
    yield receiving
    if receiving.server:
        await receiving.down()


@pytest.fixture
async def link(receiving: Receiving) -> AsyncIterator[RingLink]:
    link = RingLink(hello())
    link.set_endpoint(f"127.0.0.1:{receiving.port}")
    task = asyncio.create_task(link.run())
    yield link
    task.cancel()
    await asyncio.wait([task])


async def test_frames_arrive_in_order_with_their_tensors(receiving: Receiving, link: RingLink) -> None:
    for step in range(1, 201):
        await link.send(frame(step, floats=1 if step % 2 else 600_000 if step == 100 else 64))
    await receiving.until(lambda: len(receiving.frames) == 200)
    assert [arrived.step for arrived in receiving.frames] == list(range(1, 201))
    assert receiving.frames[99].tensors[HIDDEN].numpy()[0, -1] == 100


async def test_a_break_loses_and_doubles_nothing(receiving: Receiving, link: RingLink) -> None:
    for step in range(1, 51):
        await link.send(frame(step))
    await receiving.until(lambda: len(receiving.frames) >= 10)
    await receiving.down()
    for step in range(51, 101):
        await link.send(frame(step))
    await receiving.up()
    await receiving.until(lambda: len(receiving.frames) >= 100)
    assert [arrived.step for arrived in receiving.frames] == list(range(1, 101))


async def test_another_way_to_the_same_stage_is_for_the_next_dial(receiving: Receiving, link: RingLink) -> None:
    await until(lambda: link.linked)
    link.set_endpoint(f"localhost:{receiving.port}", keep_stream=True)
    for step in range(1, 101):
        await link.send(frame(step))
    await receiving.until(lambda: len(receiving.frames) == 100)
    assert receiving.receiver._stream == 1, "the stream that was up"
    link.set_endpoint(f"127.0.0.1:{receiving.port}")
    await until(lambda: receiving.receiver._stream == 2)  # without keep_stream it is dialled at once


async def test_what_was_acknowledged_is_not_kept(receiving: Receiving, link: RingLink) -> None:
    for step in range(1, 1001):
        await link.send(frame(step))
    await receiving.until(lambda: len(receiving.frames) == 1000)
    async with asyncio.timeout(10):
        while len(link._unacked) > ACK_EVERY_FRAMES:
            await asyncio.sleep(0.01)


async def test_a_hop_that_stays_broken_is_a_lost_stage(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.wire.ring_link.LOST_AFTER_S", 0.5)
    await receiving.down()
    link = RingLink(hello())
    link.set_endpoint(f"127.0.0.1:{receiving.port}")
    with pytest.raises(StageLostError, match="cannot be reached"):
        await asyncio.wait_for(link.run(), timeout=20)


@pytest.mark.parametrize(
    "stranger", [hello(Ballot(1, "me")), hello(instance="other"), hello(stage=1)], ids=["ballot", "instance", "stage"]
)
async def test_a_stranger_is_refused_and_changes_nothing(receiving: Receiving, stranger: RingHello) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{receiving.port}") as channel:
        call = channel.stream_stream(FRAMES_METHOD)()
        await call.write(encode_hello(stranger))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert receiving.frames == []


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1", b"H\xff\xff", b"F\x00\x00\x00\x00"])
async def test_garbage_ends_its_own_stream_only(receiving: Receiving, link: RingLink, garbage: bytes) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{receiving.port}") as channel:
        call = channel.stream_stream(FRAMES_METHOD)()
        await call.write(garbage)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    await link.send(frame(1))
    await receiving.until(lambda: len(receiving.frames) == 1)


class Relay(Receiving):
    """A stage in the middle: each frame goes on to `link`, which may have to wait."""

    def __init__(self, link: RingLink) -> None:
        super().__init__()
        self._onward = link

    async def _deliver(self, frame: Frame) -> None:
        await super()._deliver(frame)
        await self._onward.send(frame)


@pytest.mark.extended
async def test_a_break_before_a_stage_does_not_break_its_own_hop(receiving: Receiving) -> None:
    """The stage in the middle is cut off from the one before it while it waits for the one after it."""
    open_gate = asyncio.Event()
    receiving.gate = open_gate
    onward = RingLink(hello())
    onward.set_endpoint(f"127.0.0.1:{receiving.port}")
    middle = Relay(onward)
    await middle.up()
    first = RingLink(hello())
    first.set_endpoint(f"127.0.0.1:{middle.port}")
    hops = [asyncio.create_task(link.run()) for link in (first, onward)]
    await until(lambda: first.linked and onward.linked)
    sending = asyncio.create_task(send_all(first, [frame(step, floats=1_000_000) for step in range(1, 25)]))
    await standstill(lambda: onward.bytes_out)  # flow control has stopped it in the middle of a frame

    first.set_endpoint(f"localhost:{middle.port}")
    await until(lambda: middle.receiver._stream == 2)
    await asyncio.sleep(0.5)  # the old stream is gone by now, on both sides
    open_gate.set()
    await receiving.until(lambda: len(receiving.frames) == 24)

    assert [arrived.step for arrived in receiving.frames] == list(range(1, 25))
    assert not any(hop.done() for hop in hops)
    for task in (sending, *hops):
        task.cancel()
    await asyncio.wait((sending, *hops))
    await middle.down()


async def test_a_frame_that_the_next_stage_cannot_read_is_a_lost_stage(receiving: Receiving) -> None:
    link = RingLink(hello())
    link.set_endpoint(f"127.0.0.1:{receiving.port}")
    await link.send(frame(7))
    with pytest.raises(StageLostError, match="frame 7 follows frame 0"):
        await asyncio.wait_for(link.run(), timeout=3)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def standstill(count: Callable[[], int]) -> None:
    before = -1
    while (now := count()) != before:
        before = now
        await asyncio.sleep(0.5)


async def send_all(link: RingLink, frames: list[Frame]) -> None:
    for one in frames:
        await link.send(one)


async def test_after_a_change_of_ballot_only_the_new_neighbour_is_heard_and_steps_begin_anew(
    receiving: Receiving,
) -> None:
    """The stage before is another one, too. What the old stream still brings is dropped, and breaks nothing."""
    higher = Ballot(3, "me")
    old = RingLink(hello())
    old.set_endpoint(f"127.0.0.1:{receiving.port}")
    running = asyncio.create_task(old.run())
    for step in (1, 2, 3):
        await old.send(frame(step))
    await receiving.until(lambda: len(receiving.frames) == 3)
    receiving.receiver.change(higher, 2)
    await old.send(frame(4))
    new = RingLink(hello(higher, stage=2))
    new.set_endpoint(f"127.0.0.1:{receiving.port}")
    going_on = asyncio.create_task(new.run())
    await new.send(frame(1).changed(ballot=higher))
    await receiving.until(lambda: len(receiving.frames) == 4)
    assert [(one.ballot, one.step) for one in receiving.frames[2:]] == [(BALLOT, 3), (higher, 1)]
    assert not going_on.done()
    for task in (running, going_on):
        task.cancel()
    await asyncio.gather(running, going_on, return_exceptions=True)


async def test_a_frame_whose_bytes_do_not_fit_its_shape_is_an_invalid_argument(receiving: Receiving) -> None:
    (message,) = encode_frame(frame(1))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{receiving.port}") as channel:
        call = channel.stream_stream(FRAMES_METHOD)(iter([encode_hello(hello()), message[:-4]]), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and receiving.frames == []


async def test_a_hop_is_timed_without_what_the_next_stage_computes(receiving: Receiving) -> None:
    hops: list[float] = []
    link = RingLink(hello(), None, hops.append)
    link.set_endpoint(f"127.0.0.1:{receiving.port}")
    task = asyncio.create_task(link.run())
    for step in range(1, ACK_EVERY_FRAMES):
        await link.send(frame(step))
    await receiving.until(lambda: len(receiving.frames) == ACK_EVERY_FRAMES - 1)
    receiving.gate = asyncio.Event()  # the next frame takes until it is set
    await link.send(frame(ACK_EVERY_FRAMES))
    await until(lambda: bool(hops))
    assert len(receiving.frames) == ACK_EVERY_FRAMES - 1
    receiving.gate.set()
    await receiving.until(lambda: len(receiving.frames) == ACK_EVERY_FRAMES)
    assert len(hops) == 1 and 0 < hops[0] < 20
    task.cancel()
    await asyncio.wait([task])


class Stalled:
    """A stream on which nothing can be written, and that breaks when it is told to."""

    def __init__(self) -> None:
        self.breaks = asyncio.Event()

    async def write(self, message: bytes) -> None:
        await self.breaks.wait()
        raise ConnectionError("it broke")


async def test_a_frame_whose_acknowledgement_cannot_be_written_is_delivered_before_the_next(
    receiving: Receiving,
) -> None:
    stalled, accept = Stalled(), receiving.receiver._accept
    first = asyncio.create_task(accept(frame(1), stalled))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    second = asyncio.create_task(accept(frame(2)))  # of the stream that replaces the first one
    await asyncio.sleep(0)
    assert receiving.frames == []
    stalled.breaks.set()
    await asyncio.wait((first, second))
    assert [arrived.step for arrived in receiving.frames] == [1, 2]
    assert isinstance(first.exception(), ConnectionError) and second.exception() is None


@pytest.mark.parametrize(
    ("kind", "logged"),
    [
        (grpc.aio.BaseError, []),
        (asyncio.InvalidStateError, []),
        (TransportError, []),
        (RuntimeError, ["reading a ring stream failed: no"]),
    ],
)
async def test_a_reader_whose_connection_breaks_says_only_what_that_does_not_explain(
    kind: type[Exception], logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """grpc cancels the handler, and the acknowledgement that was being written fails."""
    breaks = asyncio.Event()

    async def read() -> None:
        await breaks.wait()
        raise kind("no")

    handler = asyncio.create_task(_to_its_end(asyncio.create_task(read())))
    await asyncio.sleep(0)
    handler.cancel()
    await asyncio.sleep(0)
    breaks.set()
    with caplog.at_level(logging.ERROR):
        await asyncio.wait([handler])
        assert handler.cancelled()
        del handler
        gc.collect()  # asyncio logs the error of a task that nobody has asked for
    assert [record.getMessage() for record in caplog.records] == logged


async def test_a_hop_that_is_cancelled_while_its_parts_end_does_not_go_on() -> None:
    """A change of plan comes while a broken stream is cleaned up. The next hop waits for the end of this one."""
    ending, goes_on = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await goes_on.wait()

    async def breaks() -> None:
        await asyncio.sleep(0)
        raise TransportError("it broke")

    hop = asyncio.create_task(_first_to_end(slow_to_end(), breaks()))
    async with asyncio.timeout(5):
        await ending.wait()
        hop.cancel()
        goes_on.set()
        await asyncio.wait([hop])
    assert hop.cancelled()
