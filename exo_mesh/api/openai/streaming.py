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
    context: ApiContext, request: web.Request, answer: Answer, reply: Reply, received: int | None
) -> web.StreamResponse:
    """Headers go out with the first token, or after keep_alive_s of waiting: what fails before has a status.

    received: events that the client has had already; None: the events have no ids.
    """
    keep_alive_s = context.options.keep_alive_s
    has_come = await answer.wait(monotonic() + keep_alive_s)
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
    """A comment for a stream that has no token yet: `fetching 12 % of 9.60 GB`, `loading 3/8`, `queued 3`,
    `prefill 40 %`, or just `keep-alive`."""
    if progress is None:
        return "keep-alive"
    if not progress.total:
        return f"{progress.phase} {progress.done}" if progress.done else progress.phase
    if progress.phase == "fetching":
        return f"fetching {100 * progress.done // progress.total} % of {gigabytes(progress.total)}"
    if progress.phase == "prefill":
        return f"prefill {100 * progress.done // progress.total} %"
    return f"{progress.phase} {progress.done}/{progress.total}"
