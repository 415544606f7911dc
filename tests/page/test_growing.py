"""Growing answers in Chromium: each state shows what the whole text so far shows, at a cost that does not grow."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from exo_mesh.errors import InputError
from tests.api.scripted_mesh import Served
from tests.page.chromium import needs_chromium, page_at
from tests.page.samples import MARKDOWN
from tools.bench.page import measure

pytestmark = needs_chromium

WORDS = "a mesh runs one model over several machines and nobody is the master of it "
TEXTS = {
    "all": MARKDOWN,
    "code": "Here:\n\n```python\n" + "".join(f"print({n})  # line\n" for n in range(400)) + "```\n\nDone.\n\n" + WORDS,
    "fences": "````md\n```\nx\n```\n````\n\n~~~\n```\n~~~\nend",
    "list": "".join(f"{n}. item {n} with **words**\n" for n in range(1, 300)) + "\nDone.",
    "tasks": "- [x] done\n- [ ] open\n  - nested\n\n    more\n- last\n\ntext",
    "loose": "".join(f"- item {n}\n\n" for n in range(200)) + "end",
    "paragraph": WORDS * 200 + "*not open* " + WORDS * 50 + "\n\nnext\n\n1. one",
    "numbers": ", ".join(map(str, range(3000))),
    "links": "See [this] and [that][x].\n\n" + WORDS + "\n\n[this]: https://a.example\n[x]: https://b.example\n",
    "titles": "Title\n===\n\ntext\n---\n\n> quote\nlazy\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n    code\n\n    more\n",
    "hostile": "<img src=x onerror=alert(1)>\n\n<div>\n\n**x**\n\n</div>\n\n`<b>` $\\frac{1$ &amp; \\[x",
    "empty lines": "\n\n\na\n\n\n\nb\r\n\r\nc\r\n",
}
GROW = """async ([base, text, sizes]) => {
  const { GrowingText } = await import(`${base}/app/growing.js`);
  const { reading } = await import(`${base}/app/markdown.js`);
  let read = 0;
  const counting = Object.fromEntries(Object.entries(reading).map(([name, act]) => [name, (part) => { read += part.length; return act(part); }]));
  const place = document.body.appendChild(document.createElement("div")), whole = document.body.appendChild(document.createElement("div"));
  const drawn = new GrowingText(place, counting);
  const words = (element) => element.textContent.replace(/[\\s\\u2060]+/g, "");
  const wrong = [];
  const differing = (one, other) => { let at = 0; while (one[at] === other[at]) at += 1; return [one.slice(at - 60, at + 60), other.slice(at - 60, at + 60)]; };
  let end = 0;
  for (const size of sizes) {
    end += size;
    drawn.nextAt = 0; // a slow machine must not leave steps out
    drawn.show(text.slice(0, end), true);
    if (sizes.length > 400 || /(^|\\n)[`~]+$/.test(text.slice(0, end))) continue; // it may be a longer fence
    whole.textContent = "";
    new GrowingText(whole, reading).show(text.slice(0, end), false);
    const bars = whole.querySelectorAll(".code-bar").length === place.querySelectorAll(".code-bar").length;
    if (bars && words(whole) !== words(place)) wrong.push([end, words(whole).slice(-80), words(place).slice(-80)]);
  }
  const cost = read;
  drawn.show(text, false);
  whole.textContent = "";
  new GrowingText(whole, reading).show(text, false);
  const plain = (element) => element.innerHTML.replace(/<\\/?span>|\\u2060|\\n(?=<|$)/g, "");
  const same = place.querySelector(".cut") ? words(whole) === words(place) : plain(place) === plain(whole);
  const found = { wrong: wrong.slice(0, 3), cost, same, html: same ? "" : differing(plain(place), plain(whole)) };
  place.remove();
  whole.remove();
  return found;
}"""  # noqa: E501


async def grown(page: Any, text: str, sizes: list[int]) -> dict[str, Any]:
    base = await page.evaluate(
        "new URL(document.querySelector('script[src]').src).pathname.replace('/app/main.js', '')"
    )
    found: dict[str, Any] = await page.evaluate(GROW, [base, text, sizes])
    return found


def cuts(text: str, most: int, seed: int) -> list[int]:
    """Sizes of pieces of up to `most` characters, which together are the text."""
    draw, sizes = random.Random(seed), list[int]()
    while (rest := len(text) - sum(sizes)) > 0:
        sizes.append(min(rest, draw.randint(1, most)))
    return sizes


async def test_a_growing_text_shows_what_the_whole_text_so_far_shows(api: Served) -> None:
    async with page_at(api.url) as page:
        await page.locator(".composer").wait_for()
        for name, text in TEXTS.items():
            for seed, most in enumerate((max(4, len(text) // 150), max(9, len(text) // 40))):
                found = await grown(page, text, cuts(text, most, seed))
                if name != "links":  # what a link leads to is known only at the end
                    assert found["wrong"] == [], (name, seed)
                assert found["same"], (name, found["html"])
        assert not await page.locator(".markdown img, img[src=x]").count()


async def test_the_cost_of_a_step_does_not_grow_with_the_text(api: Served) -> None:
    """What is read again per step, in characters: a number that no busy machine changes."""
    async with page_at(api.url) as page:
        await page.locator(".composer").wait_for()
        for name in ("code", "list", "paragraph", "numbers"):
            text = "\n\n".join([TEXTS[name]] * 9)[:32_000]
            sizes = [16] * (len(text) // 16)
            found = await grown(page, text, sizes)
            assert found["cost"] / len(sizes) < 6_000, name


STEPS = 40
STYLED = """async ([base, settled, text, steps]) => {
  const { GrowingText } = await import(`${base}/app/growing.js`);
  const { reading } = await import(`${base}/app/markdown.js`);
  const place = document.querySelector(".messages").appendChild(document.createElement("div"));
  place.className = "markdown";
  const drawn = new GrowingText(place, reading), frame = () => new Promise((go) => requestAnimationFrame(() => setTimeout(go)));
  drawn.show(settled, true);
  await frame();
  performance.mark("begin");
  for (let step = 1; step <= steps; step += 1) {
    drawn.nextAt = 0;
    drawn.show(settled + text.slice(0, Math.ceil((step * text.length) / steps)), true);
    await frame();
  }
  performance.mark("end");
  place.remove();
}"""  # noqa: E501


async def styled_per_frame(page: Any, settled: str, text: str) -> float:
    """The elements that the browser styles for a frame, in the mean, while a text grows after a settled one."""
    base = await page.evaluate(
        "new URL(document.querySelector('script[src]').src).pathname.replace('/app/main.js', '')"
    )
    session, found, ended = await page.context.new_cdp_session(page), [], asyncio.Event()
    session.on("Tracing.dataCollected", lambda given: found.extend(given["value"]))
    session.on("Tracing.tracingComplete", lambda _: ended.set())
    categories = ["disabled-by-default-devtools.timeline", "devtools.timeline", "blink.user_timing"]
    await session.send("Tracing.start", {"traceConfig": {"includedCategories": categories}})
    await page.evaluate(STYLED, [base, settled, text, STEPS])
    await session.send("Tracing.end")
    await asyncio.wait_for(ended.wait(), 60)
    await session.detach()
    begin, end = (next(one["ts"] for one in found if one["name"] == name) for name in ("begin", "end"))
    styled = [one for one in found if one["name"] == "UpdateLayoutTree" and begin <= one["ts"] <= end]
    return sum(int(one["args"]["elementCount"]) for one in styled) / STEPS


async def test_the_elements_that_a_frame_styles_do_not_grow_with_the_text(api: Served) -> None:
    """A selector between siblings once made it style the whole answer again: 38 of 44 ms of a frame."""
    parts = f"{WORDS}\n\n- one\n- two\n\n"
    async with page_at(api.url) as page:
        await page.locator(".composer").wait_for()
        for name in ("list", "tasks", "titles", "code"):
            few, many = [await styled_per_frame(page, parts * number, TEXTS[name]) for number in (2, 300)]
            assert many <= few + 50, name


async def test_the_work_of_a_frame_is_measured_beside_an_empty_page_in_the_same_run() -> None:
    """The figures are in docs/measurements; here only that they are made."""
    found = await measure(num_tokens=1300, per_frame=8, num_frames=20)
    assert 0 < found.empty_ms < found.begin_ms and found.plain_ms > 0 and found.end_ms > 0
    assert found.of_empty == found.end_ms / found.empty_ms > 1
    assert found.of_plain == found.end_ms / found.plain_ms
    assert found.growth == found.end_ms / found.begin_ms
    with pytest.raises(InputError, match="1199 tokens, 8 a frame, are too few for twice 20 frames"):
        await measure(num_tokens=1200 - 1, per_frame=8, num_frames=20)
