"""Measures what a forward pass of an engine costs per layer, for the head and for itself, with a few real layers.

Runs in a process of its own (rings/runner/asking/layer_speed.py), because it loads weights and imports heavy libraries.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil

from exo_mesh.domain.engine_speed import PROMPT_TOKENS, EngineSpeed, ForwardCost
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import EngineProvider, LoadRequest, Surveyor
from exo_mesh.engine.measure import StageFeed
from exo_mesh.errors import EngineError
from exo_mesh.weights.card import read_card

MAX_LAYERS = 8
"""Most layers of the longest slice; more would take longer to load and tell little more."""

MAX_SLICE_BYTES = 512 * 2**20
"""Most bytes in the files of the longest slice, unless a single piece of the model is larger."""

MAX_OTHER_WORK = 0.1
"""Largest share of all cores that other processes may use meanwhile. Beside a process that keeps one of two cores busy,
an engine of two threads was measured to be 20 times slower than alone."""

MAX_CONTEXT = 2048
"""Positions for which a slice is loaded: eight sequences of a few steps, or one prompt."""

BUDGET_S = 3.0
"""Seconds for the timed forward passes of all slices; importing and loading come on top."""

MIN_LAYER_SHARE = 0.7
"""Least share of a slice without the head that its layers take. Known engines spend less than this on the pass itself,
and a difference between two slices that says otherwise is noise."""


class SliceTimes(NamedTuple):
    """Seconds of one forward pass of a slice. one, eight: a step of that many sequences. prompt: a prompt."""

    num_layers: int
    one_s: float
    eight_s: float
    prompt_s: float


class OtherWork:
    """Observes how much of this machine other processes use, from its creation on."""

    def __init__(self) -> None:
        self._began, self._busy_s, self._own_s = time.perf_counter(), _busy_s(), time.process_time()

    def share(self) -> float:
        """The share of all cores that other processes have used."""
        elapsed_s, busy_s = time.perf_counter() - self._began, _busy_s() - self._busy_s
        return others_share(busy_s, time.process_time() - self._own_s, elapsed_s, psutil.cpu_count() or 1)


def others_share(busy_s: float, own_s: float, elapsed_s: float, num_cores: int) -> float:
    """The share of all cores that other processes used. busy_s: CPU seconds of all processes, own_s: of this one."""
    return max(0.0, (busy_s - own_s) / (elapsed_s * num_cores))


def _busy_s() -> float:
    """CPU seconds that all processes of this machine have used."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


def lower_quartile(seconds: Sequence[float]) -> float:
    """The time that a quarter of the passes stay below: other work on the machine only makes passes longer."""
    return sorted(seconds)[len(seconds) // 4]


def slices_to_time(bounds: Sequence[int], piece_bytes: Sequence[int]) -> tuple[range, range, range]:
    """Returns the layers of three slices: a long and a shorter slice that end with the model, and a slice before the
    end.

    bounds: 0, the legal cuts, and the number of layers. piece_bytes[i]: bytes from bounds[i] to bounds[i + 1]. The
    longer slice may be equal to the shorter one, and the last one to the first, for a model that has only one piece.
    """
    stop, pieces = bounds[-1], len(bounds) - 1
    long = 1
    while (
        long < pieces
        and stop - bounds[pieces - long - 1] <= MAX_LAYERS
        and sum(piece_bytes[pieces - long - 1 :]) <= MAX_SLICE_BYTES
    ):
        long += 1
    short = (long + 1) // 2
    begin = max(0, pieces - 1 - short)  # the piece before the last one ends this slice, so it has no head
    inner = range(bounds[begin], bounds[min(begin + short, max(1, pieces - 1))])
    return range(bounds[pieces - long], stop), range(bounds[pieces - short], stop), inner


def costs_of(long: SliceTimes, short: SliceTimes, inner: SliceTimes, which: str) -> ForwardCost:
    """Splits the times of the slices into the cost of the pass, of a layer and of the head. long, short: with the head;
    inner: without. which: the field of SliceTimes."""
    long_s, short_s, inner_s = (float(getattr(times, which)) for times in (long, short, inner))
    if inner == long:
        return ForwardCost(0.0, long_s / long.num_layers, 0.0)
    most_s = inner_s / inner.num_layers
    layer_s = most_s
    if long.num_layers > short.num_layers:
        slope_s = (long_s - short_s) / (long.num_layers - short.num_layers)
        layer_s = min(most_s, max(MIN_LAYER_SHARE * most_s, slope_s))
    fixed_s = inner_s - inner.num_layers * layer_s
    return ForwardCost(fixed_s, layer_s, max(0.0, long_s - fixed_s - long.num_layers * layer_s))


def measure_speed(
    provider: EngineProvider, model_dir: Path, options: Mapping[str, str], budget_s: float = BUDGET_S
) -> EngineSpeed:
    """Time a few layers with random activations. Raises ModelError or EngineError as the engine does."""
    card = read_card(model_dir, model_dir.name)
    cuts = provider.survey(model_dir, options).legal_cuts if isinstance(provider, Surveyor) else card.legal_cuts
    bounds = (0, *cuts, card.num_layers)
    sizes = [card.shard_bytes(start, stop) for start, stop in pairwise(bounds)]
    num_tokens = min(PROMPT_TOKENS, card.context_length)
    timed: dict[range, SliceTimes] = {}
    for layers in (slices := slices_to_time(bounds, sizes)):
        if layers not in timed:
            timed[layers] = _time(provider, model_dir, options, card, layers, num_tokens, budget_s / len(slices))
    long, short, inner = (timed[layers] for layers in slices)
    one, eight, chunk = (costs_of(long, short, inner, which) for which in ("one_s", "eight_s", "prompt_s"))
    return EngineSpeed(one, eight, chunk, num_tokens)


def _time(
    provider: EngineProvider,
    model_dir: Path,
    options: Mapping[str, str],
    card: ModelCard,
    layers: range,
    num_tokens: int,
    budget_s: float,
) -> SliceTimes:
    shard = Shard(card.name, layers.start, layers.stop, card.num_layers)
    engine = provider.create()
    try:
        engine.load(LoadRequest(shard, model_dir, min(card.context_length, MAX_CONTEXT), options), lambda *_: None)
        if not shard.is_first and not engine.capabilities.inputs:
            raise EngineError(f"a stage of {shard} does not declare its inputs")
        feed = StageFeed(engine, card.vocab_size, int(shard.is_last), typical=lower_quartile)
        begin = time.perf_counter()
        prompt_s = feed.prompt_s(num_tokens, budget_s / 3)
        left_s = max(0.0, budget_s - (time.perf_counter() - begin))
        return SliceTimes(len(layers), feed.decode_s(1, left_s / 2), feed.decode_s(8, left_s / 2), prompt_s)
    finally:
        engine.close()
