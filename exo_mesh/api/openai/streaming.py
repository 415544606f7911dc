"""An answer as server-sent events: the stream that a client asked for, and that of somebody who reads it too."""

from __future__ import annotations

from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.answer import Answer
from exo_mesh.api.openai.replies import Reply
from exo_mesh.api.sse import DONE, EventStream, comment_frame, data_frame
from exo_mesh.clock import monotonic
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
    """Status and headers go out with the first token, or with the first comment: what fails before has a status.

    received: events that the client has had already; None: the events have no ids. is_taken: it is known that the mesh
    has taken the request.
    """
    keep_alive_s = context.options.keep_alive_s
    has_come = await _first_word(answer, keep_alive_s, keep_alive_s if is_taken else context.options.head_hold_s)
    stream = EventStream(request, context.options.stall_limit_s, context.watchdog)
    await stream.start()
    quiet_until = monotonic() + keep_alive_s
    while True:
        if not has_come:
            await stream.send(comment_frame(waiting_for(answer.progress)))
            quiet_until = monotonic() + keep_alive_s
        elif frames := _frames(answer, reply, received):
            await stream.send(*frames)
            quiet_until = monotonic() + keep_alive_s
        if answer.finished:
            await stream.send(DONE)
            return stream.response
        has_come = await answer.wait(quiet_until)


async def _first_word(answer: Answer, keep_alive_s: float, head_hold_s: float) -> bool:
    """Wait for the first token; False if a comment is due before it. The first comment is due after keep_alive_s, but
    while the request may still be refused only after head_hold_s: clients retry a refusal that has a status of its own,
    and do not retry an event. Raises what the request failed with."""
    began = monotonic()
    due = began + keep_alive_s
    while not await answer.wait(due):
        if answer.is_taken or monotonic() >= began + head_hold_s:
            return False
        due = min(monotonic() + keep_alive_s / 4, began + head_hold_s)
    return True


def _frames(answer: Answer, reply: Reply, received: int | None) -> list[bytes]:
    """The events for all that has come. Where they have ids, steps that the client has had already are left out."""
    frames: list[bytes] = []
    for step in answer.steps():
        chunks = reply.chunks(step)
        if received is not None and step.position <= received:
            continue
        frames += map(data_frame, chunks[:-1])
        frames += [data_frame(chunk, None if received is None else step.position) for chunk in chunks[-1:]]
    return frames


def waiting_for(progress: Progress | None) -> str:
    """A comment for a stream with nothing new: `fetching 12 % of 9.60 GB`, `loading 3/8`, `queued 3 of 7, about 12 s`,
    `prefill 40 %`, or just `keep-alive`."""
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
    """Whole seconds, or minutes from two on."""
    return f"{max(1, round(seconds))} s" if seconds < 120 else f"{round(seconds / 60)} min"
