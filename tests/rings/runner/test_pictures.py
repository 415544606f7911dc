"""Images go round the ring before the rows with their tokens, one at a time, also after a stage was lost."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from collections.abc import Sequence as Ordered

import grpc
import pytest

from exo_mesh.domain.frame import PIXELS, Frame, ShowImage
from exo_mesh.domain.images import (
    PIECE_BYTES,
    ImagePiece,
    Picture,
    PictureSpec,
    PixelBudget,
    digest_of,
    pictures_defect,
    pieces_of,
    whole_row,
)
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import StageInput, StageOutput
from exo_mesh.errors import EngineError, InputError, OverloadError, PeerVersionError
from exo_mesh.rings.runner.calls import DriverService
from exo_mesh.rings.runner.picture_store import KEEP_S, MAX_WAITING_BYTES, PictureStore
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from exo_mesh.rings.runner.scheduling.sequence import Sequence
from exo_mesh.rings.runner.stage import Stage
from exo_mesh.wire.calls import PUT_IMAGE
from exo_mesh.wire.channels import method_of
from exo_mesh.wire.codec import FrameAssembler, encode_frame
from exo_mesh.wire.driver_codec import PICTURE, PIECE, specs_from_proto
from exo_mesh.wire.gate import handlers_of
from exo_mesh.wire.image_upload import UploadedCall
from exo_mesh.wire.proto import driver_pb2 as pb
from tests.rings.runner.test_change_of_plan import CountingEngine, LosingRing
from tests.rings.runner.test_stage_and_driver import BALLOT, Caller, Ring, expected, ids, request

MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
PROMPT = list(range(1, 31))


def picture(start: int, num_tokens: int = 6, seed: int = 0, *, is_whole: bool = True, side: int = 2) -> Picture:
    pixels = bytes([seed]) * (side * side * 3)
    spec = PictureSpec(start, num_tokens, 1, num_tokens, side, side, MEAN, STD, digest_of(pixels), is_whole)
    return Picture(spec, pixels)


class SeeingEngine(CountingEngine):
    """Fails unless it was shown every image of a row before, and pixels came to the first stage alone."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__(first, last)
        self.shown: dict[int, list[PictureSpec]] = {}

    def show(self, sequence: int, spec: PictureSpec, pixels: Tensor | None) -> None:
        if sequence not in self.kv or (pixels is not None) != self.first:
            raise EngineError("an image came too early, or its pixels to the wrong stage")
        self.shown.setdefault(sequence, []).append(spec)

    def forward(self, stage_input: StageInput) -> StageOutput:
        for row in stage_input.rows:
            for spec in self.shown.get(row.sequence, ()):
                is_apart = row.pos0 + row.n <= spec.start or spec.stop <= row.pos0
                assert is_apart or (row.pos0 <= spec.start and spec.stop <= row.pos0 + row.n), "an image was cut"
            if row.pos0 + row.n > 22:
                assert len({spec.start for spec in self.shown[row.sequence]}) == 2, "an image is missing"
        return super().forward(stage_input)

    def remove(self, sequence: int) -> None:
        super().remove(sequence)
        self.shown.pop(sequence, None)


class SeeingRing(LosingRing):
    def __init__(self, num_stages: int, **limits: float) -> None:
        super().__init__(num_stages, **limits)
        for index in range(num_stages):
            self.replace(index)
        self.frames: list[Frame] = []

    def replace(self, index: int) -> None:
        self.engines[index] = SeeingEngine(index == 0, index == len(self.stages) - 1)
        self.stages[index] = Stage(self.engines[index], index)

    def lap(self) -> None:
        self.frames.append(self.sent[0])
        assert sum(PIXELS in frame.tensors for frame in self.sent) <= 1, "two images are on their way"
        super().lap()

    @property
    def num_shown(self) -> int:
        return sum(isinstance(op, ShowImage) for frame in self.frames for op in frame.ops)


TWO = (picture(4), picture(13, 8, seed=1))


async def answer(ring: Ring, caller: Caller) -> list[int]:
    ring.run()
    return ids(await caller.collect())


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("chunk", [3, 5, 64])
async def test_every_stage_is_shown_each_image_before_its_rows(num_stages: int, chunk: int) -> None:
    ring, callers = SeeingRing(num_stages, prefill_chunk=chunk), [Caller(), Caller()]
    for number, caller in enumerate(callers):
        ring.driver.submit(request(f"r{number}", PROMPT, 6, pictures=TWO), caller.mailbox)
    for caller in callers:
        assert await answer(ring, caller) == expected(PROMPT, 6, num_stages)
    assert ring.num_shown == 4 and ring.kv_rows == 0
    assert not any(engine.shown for engine in ring.engines)  # type: ignore[attr-defined]


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("laps_before", [0, 1, 2, 3, 5, 9])
async def test_images_go_round_again_whichever_stage_is_lost_and_when(lost: int, laps_before: int) -> None:
    ring, caller = SeeingRing(3, prefill_chunk=4), Caller()
    ring.driver.submit(request("r", PROMPT, 6, pictures=TWO), caller.mailbox)
    for _ in range(laps_before):
        ring.lap()
    ring.lose(kept_from=lost + 1)
    ring.replace(lost)
    assert await answer(ring, caller) == expected(PROMPT, 6, 3)
    assert ring.kv_rows == 0


async def test_pixels_stay_at_the_first_stage() -> None:
    ring = SeeingRing(2)
    ring.driver.submit(request("r", PROMPT, 1, pictures=TWO), Caller().mailbox)
    frame = next(frame for frame in ring.sent if PIXELS in frame.tensors)
    assert frame.tensors[PIXELS].shape == (2, 2, 3)
    passed = ring.stages[0].process(frame).frame
    assert not passed.tensors and any(isinstance(op, ShowImage) for op in passed.ops)


async def test_an_engine_without_vision_refuses_only_that_request() -> None:
    ring, with_image, without = LosingRing(2), Caller(), Caller()
    ring.driver.submit(request("r0", PROMPT, 4, pictures=TWO), with_image.mailbox)
    ring.driver.submit(request("r1", PROMPT, 4), without.mailbox)
    assert await answer(ring, without) == expected(PROMPT, 4, 2)
    await with_image.collect()
    assert with_image.error == InputError.code and "takes no images" in with_image.messages[-1].error_message
    assert ring.kv_rows == 0


async def test_a_cancelled_request_leaves_no_image_behind() -> None:
    ring, caller, other = SeeingRing(2), Caller(), Caller()
    ring.driver.submit(request("r0", PROMPT, 4, pictures=TWO), caller.mailbox)
    ring.driver.cancel("r0", caller.mailbox)
    ring.driver.submit(request("r1", PROMPT, 4, pictures=TWO), other.mailbox)
    assert await answer(ring, other) == expected(PROMPT, 4, 2)
    assert ring.kv_rows == 0 and ring.num_shown <= 3


def test_a_row_takes_all_of_a_whole_image_or_none_of_it() -> None:
    spec, other = picture(4).spec, picture(20, is_whole=False).spec
    assert whole_row((spec, other), 0, 3) == 3
    assert whole_row((spec, other), 0, 6) == 4
    assert whole_row((spec, other), 4, 1) == 6
    assert whole_row((spec, other), 10, 12) == 12


@pytest.mark.parametrize(
    ("pictures", "words"),
    [
        ([picture(0), picture(5)], "overlap"),
        ([picture(25)], "behind the prompt"),
        ([picture(8 * index, 1) for index in range(33)], "33 images"),
    ],
)
def test_images_that_do_not_fit_a_prompt_are_refused(pictures: Ordered[Picture], words: str) -> None:
    assert words in str(pictures_defect([one.spec for one in pictures], 30))
    with pytest.raises(ValueError, match=words):
        request("r", PROMPT, pictures=tuple(pictures))


def test_images_have_other_contents_than_their_placeholders_and_each_other() -> None:
    one, same, other = picture(4).spec, picture(9).spec, picture(4, seed=1).spec
    assert one.words() == same.words() and len(one.words()) == 6
    assert not set(one.words()) & set(other.words())
    assert min(one.words()) >= 2**31 and max(one.words()) < 2**32


def test_an_image_survives_the_wire() -> None:
    specs = tuple(one.spec for one in TWO)
    assert specs_from_proto([PICTURE.write(spec) for spec in specs]) == specs
    with pytest.raises(ValueError, match="pixels"):
        specs_from_proto([pb.Image(start=1, num_tokens=1, rows=1, columns=1, height=1 << 20, width=1 << 20,
                                   mean=MEAN, std=STD, digest="0" * 64)])  # fmt: skip


async def stream(pieces: Ordered[ImagePiece]) -> AsyncIterator[ImagePiece]:
    for piece in pieces:
        yield piece


async def test_five_megabytes_of_pixels_arrive_in_pieces() -> None:
    large = picture(4, side=1300)
    pieces = list(pieces_of(large))
    assert len(pieces) == 10 and max(len(piece.pixels) for piece in pieces) == PIECE_BYTES
    store = PictureStore()
    await store.receive(stream(pieces))
    (got,) = store.pictures((large.spec,))
    assert got.pixels == large.pixels


@pytest.mark.parametrize("harm", ["changed", "short", "long", "huge", "nothing"])
async def test_pixels_that_are_not_what_was_announced_are_refused(harm: str) -> None:
    pieces = list(pieces_of(picture(4, side=500)))
    if harm == "changed":
        pieces[1] = ImagePiece(pixels=b"x" + pieces[1].pixels[1:])
    elif harm == "short":
        del pieces[1]
    elif harm == "long":
        pieces.append(ImagePiece(pixels=b"x"))
    elif harm == "huge":
        pieces[0] = ImagePiece(pieces[0].digest, 1 << 31, pieces[0].pixels)
    else:
        pieces = []
    with pytest.raises(InputError):
        await PictureStore().receive(stream(pieces))


async def test_pixels_that_nobody_asks_for_are_dropped() -> None:
    now = [0.0]
    store = PictureStore(clock=lambda: now[0])
    first = picture(4, side=1300)
    await store.receive(stream(list(pieces_of(first))))
    now[0] += KEEP_S + 1
    with pytest.raises(OverloadError, match="dropped"):
        store.pictures((first.spec,))
    for seed in range(70):
        await store.receive(stream(list(pieces_of(picture(4, seed=seed, side=1300)))))
    assert sum(len(pixels) for _, pixels in store._waiting.values()) <= MAX_WAITING_BYTES


def test_live_images_are_counted_until_their_request_ends() -> None:
    budget = PixelBudget(max_bytes=30)
    held = [budget.hold(picture(4)), budget.hold(picture(4))]
    with pytest.raises(OverloadError, match="24 bytes"):
        budget.hold(picture(4))
    held.pop()
    gc.collect()
    assert budget.held_bytes == 12
    budget.hold(picture(4))


@pytest.mark.parametrize(("seed", "reused"), [(0, 199), (1, 0)])
def test_a_kept_prefix_is_found_by_its_images_and_not_by_their_placeholders(seed: int, reused: int) -> None:
    def sequence(number: int, image: Picture) -> Sequence:
        return Sequence(number, [7] * 4 + [300] * 100 + [8] * 96, pictures=(image.spec,))

    cache = PrefixCache(1)
    first = sequence(1, picture(4, 100))
    first.computed = 200
    assert cache.ended(first, 0.0)
    found = cache.find(sequence(2, picture(4, 100, seed=seed)), 1.0)
    assert (0 if found is None else found.length) == reused


async def test_an_upload_is_checked_over_a_real_connection() -> None:
    server = grpc.aio.server()
    service = DriverService.__new__(DriverService)
    service._pictures = PictureStore()
    server.add_generic_rpc_handlers(handlers_of(service.answers()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    large = picture(4, side=1300)
    wrong = [pb.ImagePiece(digest=large.spec.digest, num_bytes=3, pixels=b"abc")]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            put_image = method_of(channel, PUT_IMAGE)
            await put_image(map(PIECE.write, pieces_of(large)))
            with pytest.raises(grpc.aio.AioRpcError, match="not the 3 that were announced"):
                await put_image(iter(wrong))
    finally:
        await server.stop(None)
    assert service._pictures.pictures((large.spec,))[0].pixels == large.pixels


async def test_a_driver_of_an_older_version_refuses_images_with_the_reason() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = UploadedCall(channel, pb.GenerateRequest(), TWO)
            with pytest.raises(PeerVersionError, match="takes no images"):
                await call.read()
    finally:
        await server.stop(None)


def test_a_frame_with_an_image_survives_the_wire() -> None:
    one = picture(4, side=2000)
    op = ShowImage(3, one.spec)
    frame = Frame(BALLOT, 1, ops=(op,), tensors={PIXELS: Tensor("uint8", (2000, 2000, 3), one.pixels)})
    assembler, got = FrameAssembler(), None
    for message in encode_frame(frame):
        got = assembler.feed(message)
    assert got is not None and got.ops == (op,)
    assert bytes(got.tensors[PIXELS].data) == one.pixels
