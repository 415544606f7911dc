"""Sends an answer as a stream, to the client that asked for it or to another reader."""

from __future__ import annotations

from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.answer import Answer
from exo_mesh.api.core.reply import Reply
from exo_mesh.api.sse import EventStream
from exo_mesh.base.clock import monotonic
from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.request import Progress


async def stream_answer(
    context: ApiContext,
    request: web.Request,
    answer: Answer,
    reply: Reply,
    received: int | None,
    *,
    is_taken: bool = False,
) -> web.StreamResponse:
    """Stream an answer. Status and headers are sent with the first token, or with the first frame of waiting, so an
    earlier error still gets its own status.

    received: the number of events that the client already has; None means that the events have no ids. is_taken: the
    mesh has already accepted the request.
    """
    keep_alive_s = context.options.keep_alive_s
    has_come = await _first_token(answer, keep_alive_s, keep_alive_s if is_taken else context.options.head_hold_s)
    stream = EventStream(request, context.options.stall_limit_s, context.watchdog, reply.form)
    await stream.start()
    opening = [] if received else reply.opening()
    quiet_until = monotonic() + keep_alive_s
    while True:
        if not has_come:
            await stream.send(*opening, reply.waiting(waiting_for(answer.progress)))
            opening, quiet_until = [], monotonic() + keep_alive_s
        elif frames := _frames(answer, reply, received):
            await stream.send(*opening, *frames)
            opening, quiet_until = [], monotonic() + keep_alive_s
        if answer.finished:
            if closing := reply.closing():
                await stream.send(closing)
            return stream.response
        has_come = await answer.wait(quiet_until)


async def _first_token(answer: Answer, keep_alive_s: float, head_hold_s: float) -> bool:
    """Wait for the first token. Returns False if a comment is due first. Raises the request's error.

    The first comment is due after keep_alive_s, but while the mesh may still refuse the request only after head_hold_s,
    because clients retry a refusal that has its own status, but not an error event.
    """
    began = monotonic()
    due = began + keep_alive_s
    while not await answer.wait(due):
        if answer.is_taken or monotonic() >= began + head_hold_s:
            return False
        due = min(monotonic() + keep_alive_s / 4, began + head_hold_s)
    return True


def _frames(answer: Answer, reply: Reply, received: int | None) -> list[bytes]:
    """The events for all arrived tokens that the client does not have yet."""
    frames: list[bytes] = []
    for step in answer.steps():
        chunks = reply.chunks(step)
        if received is not None and step.position <= received:
            continue
        frames += [reply.frame(chunk, None) for chunk in chunks[:-1]]
        frames += [reply.frame(chunk, None if received is None else step.position) for chunk in chunks[-1:]]
    return frames


def waiting_for(progress: Progress | None) -> str:
    """The comment for a stream that waits: `fetching 12 % of 9.60 GB`, `loading 3/8`, `queued 3 of 7, about 12 s`,
    `prefill 40 %`, or `keep-alive`."""
    if progress is None:
        return "keep-alive"
    if progress.phase == "queued" and progress.total:
        about = f", about {_duration(progress.wait_s)}" if progress.wait_s else ""
        return f"queued {progress.done} of {progress.total}{about}"
    if not progress.total:
        return f"{progress.phase} {progress.done}" if progress.done else progress.phase
    if progress.phase == "fetching":
        return f"fetching {100 * progress.done // progress.total} % of {gigabytes(progress.total)}"
    if progress.phase == "prefill":
        return f"prefill {100 * progress.done // progress.total} %"
    return f"{progress.phase} {progress.done}/{progress.total}"


def _duration(seconds: float) -> str:
    """A time in whole seconds, or in minutes from two minutes on."""
    return f"{max(1, round(seconds))} s" if seconds < 120 else f"{round(seconds / 60)} min"
