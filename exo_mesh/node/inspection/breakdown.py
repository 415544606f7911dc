"""Divides the time of one request into parts that add up to it, from its trace and the times of its handler."""

from __future__ import annotations

import msgspec

from exo_mesh.rings.serving.traces import RequestTrace


class HandlerTimes(msgspec.Struct, frozen=True):
    """When the handler of a request did what, on the clock of RequestTrace.entered_at. began: before it read the body;
    asked: the body is checked; prepared: the prompt is ready in tokens; ended: the reply is built. template_s,
    tokenizer_s: their seconds between asked and prepared."""

    began: float
    asked: float
    prepared: float
    ended: float
    template_s: float
    tokenizer_s: float


class RequestParts(msgspec.Struct, frozen=True):
    """Seconds of each part of a request; together they are the whole request.

    http_s: reading and checking the body, and building the reply after the last token. model_s: finding the model, its
    text files and its limits. template_s, tokenizer_s: making the prompt. place_s: until a ring is found or placed.
    queue_s: until the first frame leaves. prefill_s, decode_s: stages compute for the prompt, and for the tokens of
    the answer. wait_s: frames wait at a stage behind others. hops_s: frames are on their way between
    stages. driver_s: no frame of the request is on its way: scheduling, sampling, and the ways between the entry peer
    and the driver.
    """

    http_s: float = 0.0
    model_s: float = 0.0
    template_s: float = 0.0
    tokenizer_s: float = 0.0
    place_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    hops_s: float = 0.0
    driver_s: float = 0.0


def parts_of(trace: RequestTrace, times: HandlerTimes) -> RequestParts:
    """The parts of a request that has ended. A driver counts the times of its laps from when the request reached it, so
    the way there is in driver_s."""
    place_s = queue_s = prefill_s = decode_s = wait_s = hops_s = driver_s = until = 0.0
    for leg in trace.legs:
        sums = leg.sums
        place_s += max(0.0, leg.began_s - until)
        until = max(until, leg.began_s)
        queue_s += sums.first_s
        prefill_s += sums.prefill_s
        decode_s += sums.decode_s
        wait_s += sums.waited_s
        hops_s += sums.hops_s
        driver_s += sums.until_s - sums.first_s - sums.covered_s
        until += sums.until_s
    driver_s += max(0.0, trace.last_token_s - until)
    until = max(until, trace.last_token_s)
    return RequestParts(
        http_s=times.asked - times.began + trace.entered_at - times.prepared + times.ended - trace.entered_at - until,
        model_s=times.prepared - times.asked - times.template_s - times.tokenizer_s,
        template_s=times.template_s,
        tokenizer_s=times.tokenizer_s,
        place_s=place_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        wait_s=wait_s,
        hops_s=hops_s,
        driver_s=driver_s,
    )
