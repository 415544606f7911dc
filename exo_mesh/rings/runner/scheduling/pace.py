"""Learns the speed of the ring from frames that came round; decides the number of batches in flight and the chunk
size."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

SMOOTHING = 0.2
"""Weight of a new sample: a change of speed counts fully after about ten laps."""

OUTLIER = 3.0
"""A sample counts at most this many times the known value: a step that the system interrupts is no measure of
others."""

FIRST_SAMPLES = 4
"""A new point of a curve is the least of so many samples: the first steps of a size often take longer than later ones,
because buffers are allocated and kernels are built, and what disturbs a step never makes it faster."""

FORGET_AFTER = 500
"""Samples of other sizes after which a size is forgotten: trying it again takes about ten frames, 2 % of these."""

TOLERANCE = 0.01
"""Schedules whose predicted rates differ by less than this count as equal."""

LONE_TOLERANCE = 0.1
"""The same on a ring of one stage. Two frames there only hide the time between frames, and usually take longer to
compute than one; but once there are two, the larger size is not measured again for long."""

POINTS_PER_DOUBLING = 2
"""Sizes that differ by less than about a third share one point of a curve."""

ROW_POINTS_PER_DOUBLING = 4
"""The same for rows: up to 8 of them, each number has its own point, because one more frame changes it by one. With one
point for both, the curve could not tell them apart when it has no other point."""

CHUNKS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FIRST_CHUNK = 64
"""Chunk sizes to choose from, and the first size beside running streams while nothing has been measured."""

OVER_SMALLEST = 1.25
"""Where even the smallest chunk takes longer than the budget, larger ones may take this many times as long: a step that
reads all weights of a large model takes hardly longer with 512 tokens than with 16."""

RECONSIDER_AFTER = 8
"""Frames between two decisions how many frames should be on the ring, once some have come round: one takes 0.1 ms."""

STREAM_SHARE, PROMPT_SHARE = 0.8, 0.5
"""Chunks leave running streams STREAM_SHARE of their speed where the prompt then keeps PROMPT_SHARE of its own: a step
that reads all weights takes hardly longer with a small chunk than with one row."""

MOST_STEPS = 256
"""Most decode frames that go before the next chunk of texts for vectors."""

VECTOR_SHARE = 0.9
"""Texts for vectors beside streams take the smallest chunks that compute them at this part of the highest speed: a
stream stands still for each chunk."""

MAX_BATCHES_PER_STAGE = 4
"""Links that are slow beside the stages need more frames than stages; with more than this each row waits for long."""


DRAFT_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Tokens of a row to choose from."""

LEAST_GAIN, LEAST_GAIN_IN_FULL = 0.05, 0.2
"""Drafts must promise so much more speed before they are sent: more of it where as many sequences decode as there are
stages, because stages wait for each other where frames differ in size."""

MOST_CERTAIN = 0.98
"""Guesses count as right no more often than this, else one refusal after a long time would be a surprise."""


def shares(rows: int, batches: int) -> tuple[int, int]:
    """Split `rows` over `batches` as evenly as possible: the size of the larger batches, and how many of them there
    are."""
    return math.ceil(rows / batches), rows % batches or batches


class Curve:
    """Seconds as a function of a size (rows, tokens), from noisy samples: so many smoothed points per doubling."""

    def __init__(self, points_per_doubling: int = POINTS_PER_DOUBLING) -> None:
        self._points_per_doubling = points_per_doubling
        self._points: dict[int, tuple[float, float]] = {}
        self._num_samples: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._num_added = 0

    def add(self, size: int, seconds: float) -> None:
        """Add a sample. A sample far above the known value counts as OUTLIER times that value. A point without a sample
        for FORGET_AFTER is dropped: otherwise one bad moment would keep that size from ever being tried again."""
        key = round(self._points_per_doubling * math.log2(size))
        x, y = self._points.get(key, (float(size), seconds))
        seconds = min(seconds, OUTLIER * y) if y else seconds
        count = self._num_samples[key] = self._num_samples.get(key, 0) + 1
        if count > FIRST_SAMPLES:
            self._points[key] = x + SMOOTHING * (size - x), y + SMOOTHING * (seconds - y)
        elif count == 1 or seconds < y:
            self._points[key] = float(size), seconds
        self._num_added += 1
        self._seen[key] = self._num_added
        if self._num_added % FORGET_AFTER == 0:
            for old in [key for key, when in self._seen.items() if when <= self._num_added - FORGET_AFTER]:
                del self._points[old], self._seen[old], self._num_samples[old]

    def __bool__(self) -> bool:
        return bool(self._points)

    @property
    def span(self) -> tuple[float, float]:
        """The smallest and the largest size with a point."""
        sizes = [x for x, _ in self._points.values()]
        return min(sizes), max(sizes)

    def at(self, size: float) -> float:
        """Seconds at a size: linear between two points; before the first point its value; after the last one on the
        line through the last two, or its value if it is the only one. Never less than at a smaller size."""
        points = sorted(self._points.values())
        if not points:
            return 0.0
        xs = [x for x, _ in points]
        right = bisect_left(xs, size)
        if right == 0:
            return points[0][1]
        if right == len(points):
            right -= 1
        if right == 0:
            return points[0][1]
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        slope = max(0.0, (y1 - y0) / (x1 - x0)) if x1 > x0 else 0.0
        return y0 + slope * (size - x0)

    def divisible(self, size: float) -> float:
        """As `at`, but never more than several frames of the size of the point before take together, whatever a bad
        sample says. Before the first point on the line through the first two, but no less than in proportion: if
        smaller frames were expected to take as long, they would never be tried, and so never measured again once
        their point is forgotten."""
        points = sorted(self._points.values())
        before = bisect_left([x for x, _ in points], size) - 1
        if before < 0 and len(points) > 1:
            (x0, y0), (x1, y1) = points[:2]
            return min(y0, max(y0 * size / x0, y0 - (y1 - y0) / (x1 - x0) * (x0 - size)))
        if before < 0:
            return self.at(size)
        x, y = points[before]
        return min(self.at(size), y * math.ceil(size / x - 0.05))  # x is a mean of sizes, and so a fraction

    def proportional(self, size: float) -> float:
        """As `at`, but in proportion to the size before the first point, and never more than in proportion after any
        other: work done twice takes at most twice the time, whatever a bad sample at a larger size says."""
        points = sorted(self._points.values())
        if not points:
            return 0.0
        below = points[max(0, bisect_left([x for x, _ in points], size) - 1)]
        in_proportion = below[1] * size / below[0]
        return min(self.at(size), in_proportion) if points[0][0] < size <= points[-1][0] else in_proportion


class Pace:
    """The measured speed of one ring, and the decisions that follow from it. Pure: takes measurements, returns
    decisions."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._stages = [Curve(ROW_POINTS_PER_DOUBLING) for _ in range(num_stages)]
        self._hops_s = 0.0
        self._chunks = Curve()
        self._narrowest = 1.0
        """The part of a chunk's lap in which it delays the chunk that follows it."""
        self._lap_s = 0.0
        """A decode lap without waiting."""
        self._step_s = 0.0
        """The part of it at the slowest stage, or on the links if they take longer."""
        self._chosen: dict[int, int] = {}
        self._num_batches = 1
        """The last answer of `batches`."""
        self._chosen_chunks: dict[tuple[float, int, int], tuple[int, int]] = {}
        self._num_decoded = 0
        self._extra = [Curve() for _ in range(num_stages)]
        """Seconds that further tokens of rows add to a decode frame, by their number."""
        self._chosen_drafts: dict[tuple[int, int], tuple[int, int]] = {}

    def drafted(self, rows: int, tokens: int, compute_s: Sequence[float]) -> None:
        """Note a frame whose rows have more than one token each. compute_s: one number per stage, or the frame is
        ignored."""
        if len(compute_s) != self._num_stages or not self._stages[0]:
            return
        for curve, rows_s, seconds in zip(self._extra, self._stages, compute_s, strict=True):
            curve.add(tokens - rows, max(0.0, seconds - rows_s.at(rows)))
        self._chosen_drafts.clear()

    def drafts(self, rows: int, share: float) -> tuple[int, int]:
        """How to draft while `rows` sequences decode, if this share of the guesses is right: the tokens of a row, and
        how many rows of a sequence may be on their way. (1, 1) if drafts do not pay."""
        asked = rows, round(32 * share)
        if asked not in self._chosen_drafts:
            self._chosen_drafts[asked] = self._choose_drafts(rows, min(MOST_CERTAIN, share))
        return self._chosen_drafts[asked]

    def _choose_drafts(self, rows: int, share: float) -> tuple[int, int]:
        if not self._lap_s:
            return 1, 1
        batches = self.batches(rows)
        in_frame = math.ceil(rows / batches)
        known = max((curve.span[1] for curve in self._extra if curve), default=in_frame / 2)
        least = LEAST_GAIN if rows < self._num_stages or rows == 1 else LEAST_GAIN_IN_FULL
        best, fastest = (1, 1), (1 + least) * self._draft_rate(in_frame, batches, share, 1, 1)
        for tokens in DRAFT_TOKENS:
            if in_frame * (tokens - 1) > 2 * known:
                break  # a new size is no surprise
            for frames in range(1, max(1, MAX_BATCHES_PER_STAGE * self._num_stages // rows) + 1):
                if frames > 1 and rows >= self._num_stages:
                    break
                rate = self._draft_rate(in_frame, batches, share, tokens, frames)
                if rate > fastest:
                    best, fastest = (tokens, frames), (1 + TOLERANCE) * rate
        return best

    def _draft_rate(self, in_frame: int, batches: int, share: float, tokens: int, frames: int) -> float:
        """Tokens a second of one sequence whose rows have `tokens` tokens, of which so many rows are on their way.

        Each guess is right with probability `share`, so 1 / (1 - share) tokens come until one is refused. The refusal
        is known after a lap, and one step later for each row whose guesses were all right: share^tokens / (1 -
        share^tokens) on average.
        """
        steps_s = [
            rows_s.at(in_frame) + (extra_s.at(in_frame * (tokens - 1)) if tokens > 1 else 0.0)
            for rows_s, extra_s in zip(self._stages, self._extra, strict=True)
        ]
        slowest_s = max(steps_s)
        lap_s = max(self._hops_s + sum(steps_s), batches * frames * slowest_s)
        step_s = max(batches * slowest_s, lap_s / frames)
        all_right = share**tokens
        return 1 / ((1 - share) * max(1e-9, lap_s + step_s * all_right / (1 - all_right)))

    def decoded(self, rows: int, lap_s: float, compute_s: Sequence[float], waited_s: float) -> None:
        """Note a decode frame that came round. compute_s: one number per stage, or the frame is ignored. waited_s: of
        all stages together; the rest of the lap is spent on the links."""
        if len(compute_s) != self._num_stages:
            return
        for curve, seconds in zip(self._stages, compute_s, strict=True):
            curve.add(rows, seconds)
        self._num_decoded += 1
        if self._num_decoded < RECONSIDER_AFTER**2 or self._num_decoded % RECONSIDER_AFTER == 0:
            self._chosen.clear()
            self._chosen_chunks.clear()
            self._chosen_drafts.clear()
        moved_s = lap_s - waited_s
        if self._lap_s:  # the driver reads a frame late if it is still busy with the results of a chunk
            moved_s = min(moved_s, OUTLIER * self._lap_s)
        hops_s = max(0.0, moved_s - sum(compute_s))
        weight = SMOOTHING if self._lap_s else 1.0
        self._hops_s += (SMOOTHING if self._hops_s else 1.0) * (hops_s - self._hops_s)
        self._lap_s += weight * (moved_s - self._lap_s)
        self._step_s += weight * (max(*compute_s, hops_s) - self._step_s)

    def prefilled(self, tokens: int, lap_s: float, waited_s: float, compute_s: Sequence[float] = ()) -> None:
        """Note a prefill chunk that came round. The lap includes the links, because a slow link is a reason for small
        chunks. compute_s: of each stage. The slowest stage delays the next chunk, or the links do, which may be a
        single one."""
        moved_s = max(0.0, lap_s - waited_s)
        self._chunks.add(tokens, moved_s)
        self._chosen_chunks.clear()
        if moved_s and len(compute_s) == self._num_stages:
            narrowest_s = max(*compute_s, moved_s - sum(compute_s))
            self._narrowest += SMOOTHING * (min(1.0, narrowest_s / moved_s) - self._narrowest)

    def steps_between(self, tokens: int) -> int:
        """The number of decode frames to send between two chunks of so many tokens, so that streams keep STREAM_SHARE
        of their speed; 1 while nothing is known."""
        turn_s = max(self._step_s, self._lap_s / self._num_batches)
        if not self._chunks or not turn_s:
            return 1
        chunk_s = self._chunks.proportional(tokens) * self._narrowest
        return max(1, min(MOST_STEPS, math.ceil(STREAM_SHARE / (1 - STREAM_SHARE) * chunk_s / turn_s)))

    def vector_chunk(self, most: int) -> int:
        """Tokens of a chunk of texts for vectors beside streams, at most `most`: see VECTOR_SHARE."""
        if not self._chunks:
            return most
        enough = VECTOR_SHARE * most / max(1e-9, self._chunks.proportional(most))
        sizes = [size for size in CHUNKS if size < most]
        return next((size for size in sizes if size >= enough * self._chunks.proportional(size)), most)

    def rate(self, rows: int, batches: int) -> float:
        """Tokens a second if `rows` sequences decode in `batches` even frames; 0 while nothing is known.

        A frame is back after the sum of all stages and links, but not before the slowest stage has computed all the
        others (standard pipeline bound: rows / max(latency of a lap, time of all batches at the bottleneck)).
        """
        large, num_large = shares(rows, batches)
        lap_s, bottleneck_s = self._hops_s, 0.0
        for curve in self._stages:
            of_large = curve.divisible(large)
            of_all = num_large * of_large
            if num_large < batches:
                of_all += (batches - num_large) * curve.divisible(large - 1)
            lap_s += of_large
            bottleneck_s = max(bottleneck_s, of_all)
        lap_s = max(lap_s, bottleneck_s)
        return rows / lap_s if lap_s > 0 else 0.0

    def batches(self, rows: int) -> int:
        """The useful number of decode frames on the ring when `rows` sequences decode: the number of stages, unless
        measurements show that another number is faster."""
        usual = self._num_batches = max(1, min(rows, self._num_stages))
        if rows <= 1 or not self._stages[0]:
            return usual
        if rows not in self._chosen:
            counts = range(1, min(rows, MAX_BATCHES_PER_STAGE * self._num_stages) + 1)
            rates = {count: self.rate(rows, count) for count in counts}
            enough = (1 - (LONE_TOLERANCE if self._num_stages == 1 else TOLERANCE)) * max(rates.values())
            fast = (count for count in counts if rates[count] >= enough)
            self._chosen[rows] = min(fast, key=lambda count: abs(count - usual))
        self._num_batches = self._chosen[rows]
        return self._num_batches

    def chunk(self, budget_s: float, longest: int, tokens: int = 0) -> int:
        """Size of a prefill chunk whose lap should take no longer than budget_s, at most `longest`. If there is none:
        a size that takes hardly longer than the smallest.

        tokens: length of a prompt that has the ring for itself; the result is then the size that finishes the prompt
        first: small chunks keep all stages busy, large ones do more at once. 0: the result is the largest size.
        """
        if not self._chunks:
            return min(FIRST_CHUNK, longest)
        sizes = [size for size in CHUNKS if size <= longest and self._chunks.proportional(size) <= budget_s]
        sizes = sizes or self._like_the_smallest(longest)
        if not sizes:
            return min(CHUNKS[0], longest)
        if not tokens:
            return sizes[-1]
        took_s = {size: self._prompt_s(tokens, size) for size in sizes}
        return max(size for size in sizes if took_s[size] <= (1 + TOLERANCE) * min(took_s.values()))

    def _like_the_smallest(self, longest: int) -> list[int]:
        """Sizes of chunks that take hardly longer than the smallest, once that is measured. At most twice the largest
        size that was measured, so that a new size is no surprise."""
        smallest, largest = self._chunks.span
        most_s = OVER_SMALLEST * self._chunks.at(CHUNKS[0])
        if smallest >= CHUNKS[1]:
            return []
        return [size for size in CHUNKS if size <= min(longest, 2 * largest) and self._chunks.at(size) <= most_s]

    def _prompt_s(self, tokens: int, size: int) -> float:
        """Seconds for all chunks of a prompt, one behind the other: the lap of the first one, and the delay of each
        other."""
        size = min(size, tokens)
        return self._chunks.at(size) * (1 + (tokens / size - 1) * self._narrowest)

    def chunks(self, budget_s: float, longest: int) -> tuple[int, int]:
        """The number of prefill chunks on the ring beside running streams, and their tokens: the pair that
        computes most tokens and delays a stream by no more than budget_s. One chunk while nothing is known. A pair that
        hardly delays the streams is better if the prompt does not lose too much by it: see STREAM_SHARE.

        Frames do not overtake each other. A stream therefore waits for the lap of the chunk before it, or for the time
        that all chunks take at the bottleneck, whichever is more; up to 1.6 times that where chunks
        that come together after a pause delay it at more than one stage (test_pace.py).
        """
        asked = budget_s, longest, self._num_batches
        if asked not in self._chosen_chunks:
            self._chosen_chunks[asked] = self._choose_chunks(budget_s, longest)
        return self._chosen_chunks[asked]

    def _choose_chunks(self, budget_s: float, longest: int) -> tuple[int, int]:
        best = 1, self.chunk(budget_s, longest)
        if not self._chunks:
            return best
        for count in range(2, self._num_stages + 1):
            size = self.chunk(budget_s / max(1.0, count * self._narrowest), longest)
            if self._prefill_rate(count, size) > (1 + TOLERANCE) * self._prefill_rate(*best):
                best = count, size
        gentle = self._gentle_chunks(longest)
        if gentle is not None and self._rate_beside(*gentle) >= PROMPT_SHARE * self._rate_beside(*best):
            return gentle
        return best

    def _gentle_chunks(self, longest: int) -> tuple[int, int] | None:
        """The fastest pair that leaves running streams STREAM_SHARE of their speed; None if there is none."""
        longest_lap_s = self._lap_s / STREAM_SHARE
        found, fastest = None, 0.0
        for size in CHUNKS:
            chunk_s = self._chunks.proportional(size)
            if size > longest or chunk_s > longest_lap_s:
                break
            for count in range(1, self._num_stages + 1):
                lap_s = self._lap_beside(count, chunk_s)
                if lap_s <= longest_lap_s and count * size > fastest * lap_s:
                    found, fastest = (count, size), count * size / lap_s
        return found

    def _lap_beside(self, count: int, chunk_s: float) -> float:
        """Seconds of a lap with `count` chunks and the streams' frames on the ring. Frames do not overtake each other,
        so all take the longest of a lap of either, and of all at the slowest stage. chunk_s: the lap of a chunk."""
        frames = max(1, self._num_batches + 1 - count)
        return max(chunk_s, self._lap_s, count * chunk_s * self._narrowest + frames * self._step_s)

    def _rate_beside(self, count: int, size: int) -> float:
        """Tokens of prompts a second beside the streams."""
        return count * size / max(1e-9, self._lap_beside(count, self._chunks.proportional(size)))

    def _prefill_rate(self, count: int, size: int) -> float:
        """Tokens a second of `count` chunks on the ring at the same time, no more than stages."""
        return count * size / max(1e-9, self._chunks.proportional(size) * max(1.0, count * self._narrowest))
