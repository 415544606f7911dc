"""Work of a browser for each frame of a growing answer: `python -m tools.bench page`.

Chromium shows the chat while an answer of --tokens arrives, so many tokens a frame. Script, style and layout are read
from the browser's own counters over a number of frames, at the beginning of the answer and at its end, beside two pages
of the same run: an empty one that only counts frames, and one that appends the same text to a single element.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.errors import InputError
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.page.chromium import CHROMIUM, page_at
from tests.page.samples import MARKDOWN
from tests.text.text_models import write_text_model

TOKEN_CHARS = 4
COUNTERS = ("ScriptDuration", "RecalcStyleDuration", "LayoutDuration")
END_S = 600.0
PAUSE_S = 0.05
"""Between two looks at the page: a look is work of the page, too."""
SETTLES_FRAMES = 30
SENDER = """(given) => {
  const { text, perFrame, tokenChars } = JSON.parse(given);
  const counted = (window.counted = { frames: 0, sent: 0 });
  const eachFrame = (act) => requestAnimationFrame(() => { counted.frames += 1; if (act() !== false) eachFrame(act); });
  const next = () => { const part = text.slice(counted.sent, counted.sent + tokenChars); counted.sent += part.length; return part; };
  window.countFrames = () => eachFrame(() => {});
  window.appendPlain = (place) => eachFrame(() => { for (let n = 0; n < perFrame; n += 1) place.appendData(next()); return counted.sent < text.length; });
  const real = window.fetch, bytes = new TextEncoder();
  const event = (id, choice, usage) => bytes.encode(`id: ${id}\\ndata: ${JSON.stringify({ id: "c1", choices: [{ index: 0, ...choice }], usage })}\\n\\n`);
  const answer = () => new Response(new ReadableStream({ start(out) {
    let id = 0;
    eachFrame(() => {
      for (let n = 0; n < perFrame && counted.sent < text.length; n += 1) out.enqueue(event(id++, { delta: { content: next() }, finish_reason: null }, null));
      if (counted.sent < text.length) return true;
      out.enqueue(event(id++, { delta: {}, finish_reason: "stop" }, { prompt_tokens: 9, completion_tokens: id }));
      out.enqueue(bytes.encode("data: [DONE]\\n\\n"));
      out.close();
      return false;
    });
  } }), { headers: { "Content-Type": "text/event-stream" } });
  window.fetch = (url, options) => (String(url).endsWith("/v1/chat/completions") ? Promise.resolve(answer()) : real(url, options));
}"""  # noqa: E501


class Frames(msgspec.Struct, frozen=True):
    """Milliseconds of script, style and layout of a frame, in the mean of so many frames."""

    empty_ms: float
    plain_ms: float
    begin_ms: float
    end_ms: float
    num_frames: int

    @property
    def of_empty(self) -> float:
        """The work of a frame at the end of the answer, as a multiple of the empty page."""
        return self.end_ms / self.empty_ms

    @property
    def of_plain(self) -> float:
        """The same, as a multiple of the page that only appends the text."""
        return self.end_ms / self.plain_ms

    @property
    def growth(self) -> float:
        """A frame at the end of the answer, as a multiple of one at its beginning."""
        return self.end_ms / self.begin_ms


def answer_of(num_tokens: int) -> str:
    """A text of so many tokens with titles, formulas, code, tables, lists and long paragraphs."""
    paragraph = "A mesh runs one model over several machines, and nobody is the master of it. " * 12
    part = f"{MARKDOWN}\n{paragraph}\n\n"
    return (part * (num_tokens * TOKEN_CHARS // len(part) + 1))[: num_tokens * TOKEN_CHARS]


async def _until(page: Any, condition: str) -> None:
    async with asyncio.timeout(END_S):
        while True:
            if await page.evaluate(condition):
                return
            await asyncio.sleep(PAUSE_S)


async def _per_frame(page: Any, num_frames: int) -> float:
    """Milliseconds of work of a frame, over about so many frames from now on."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable")

    async def read() -> tuple[float, int]:
        found = {one["name"]: one["value"] for one in (await session.send("Performance.getMetrics"))["metrics"]}
        return sum(found[name] for name in COUNTERS), await page.evaluate("counted.frames")

    before, first = await read()
    await _until(page, f"counted.frames >= {first + num_frames}")
    after, last = await read()
    return 1000 * (after - before) / (last - first)


async def measure(num_tokens: int, per_frame: int, num_frames: int) -> Frames:
    """One run. num_frames: of each of the four figures. Raises InputError if the answer has fewer."""
    text = answer_of(num_tokens)
    if (num_tokens // per_frame) < 3 * (num_frames + SETTLES_FRAMES):
        raise InputError(f"{num_tokens} tokens, {per_frame} a frame, are too few for twice {num_frames} frames")
    given = json.dumps({"text": text, "perFrame": per_frame, "tokenChars": TOKEN_CHARS})
    sender = f"({SENDER})({json.dumps(given)})"
    with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as folder:
        mesh = ScriptedMesh(write_text_model(Path(folder)))
        async with served(mesh, ApiOptions(access=AccessPolicy(open_admin=True))) as api, page_at(api.url) as page:
            bare = await page.context.new_page()
            await bare.goto(f"{api.url}/healthz")
            await bare.evaluate(sender)
            await bare.evaluate("document.body.textContent = ''; countFrames()")
            empty_ms = await _per_frame(bare, num_frames)
            await bare.reload()
            await bare.evaluate(sender)
            await bare.evaluate(
                "appendPlain(document.body.appendChild(document.createElement('p')).appendChild(document.createTextNode('')))"
            )
            await _until(bare, f"counted.sent >= {len(text) // 2}")
            plain_ms = await _per_frame(bare, num_frames)
            await bare.close()
            await page.bring_to_front()
            await page.evaluate(sender)
            await page.locator(".model-choice .chosen[data-known=true]").wait_for()
            await page.get_by_label("Write a message").fill("Tell me all.")
            await page.keyboard.press("Enter")
            await _until(page, f"counted.frames >= {SETTLES_FRAMES}")
            begin_ms = await _per_frame(page, num_frames)
            last_frames = (num_frames + SETTLES_FRAMES) * per_frame * TOKEN_CHARS
            await _until(page, f"counted.sent >= {len(text) - last_frames}")
            end_ms = await _per_frame(page, num_frames)
            await page.get_by_role("button", name="Regenerate").wait_for(timeout=1000 * END_S)
    return Frames(empty_ms, plain_ms, begin_ms, end_ms, num_frames)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("page", help="work of a browser for each frame of an answer", description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--per-frame", type=int, default=8, help="tokens that arrive with each frame (8)")
    parser.add_argument("--frames", type=int, default=200, help="frames of each figure (200)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures once and prints the figures."""
    if min(args.tokens, args.per_frame, args.frames) < 1:
        raise InputError("page needs at least one token, one token a frame and one frame")
    if CHROMIUM is None or find_spec("playwright") is None:
        raise InputError("page needs Chromium and playwright; docs/tasks/page.md says how to install them")
    found = asyncio.run(measure(args.tokens, args.per_frame, args.frames))
    print(f"script, style and layout of a frame, mean of {found.num_frames} frames, {args.tokens} tokens")
    print(f"an empty page              {found.empty_ms:8.3f} ms")
    print(f"the text in one element    {found.plain_ms:8.3f} ms")
    print(f"the chat, at the beginning {found.begin_ms:8.3f} ms")
    print(f"the chat, at the end       {found.end_ms:8.3f} ms")
    ratios = f"{found.of_empty:.1f} x the empty page, {found.of_plain:.2f} x the one element"
    print(f"at the end: {ratios}, {found.growth:.2f} x the beginning")
    return 0
