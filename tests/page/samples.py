"""Conversations for the page's tests: one with everything that a message can show, and hostile text."""

from __future__ import annotations

from typing import Any

HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script> [x](javascript:alert(3)) ![y](https://example.com/y.png)"
)

MARKDOWN = """## A title

Text with `code`, **strong words**, a formula $e^{i\\pi} + 1 = 0$ and a longer one:

$$\\int_0^1 x^2\\,dx = \\tfrac13 \\qquad \\vec{v} = \\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}$$

```python
def greet(name: str) -> str:
    # a comment that is rather long, so that on a phone this block scrolls sideways and the page does not
    return f"Hello {name}" + str(42)
```

| peer | layers | memory |
|---|---|---|
| studio | 0-15 | 64 GB |
| laptop | 16-27 | 16 GB |

1. first
2. second, with a [link](https://example.com)

> quoted
"""


def conversation(name: str, *messages: dict[str, Any], updated: float = 1e13) -> dict[str, Any]:
    return {"id": name, "title": name, "model": "exo-mesh-demo", "updated": updated, "messages": list(messages)}


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(text: str, **more: Any) -> dict[str, Any]:
    numbers = {"tokens": 120, "ttft": 0.4, "speed": 33.3, "finish": "stop", "error": None, "reasoning": "", "calls": []}
    return {"role": "assistant", "content": text, **numbers, **more}


RICH = conversation(
    "A conversation whose title is too long for the list beside it",
    said("Show me what you can do. <b>This is no HTML.</b>"),
    answered(
        MARKDOWN,
        reasoning="The user wants to see **everything**.",
        calls=[{"id": "c1", "name": "get_weather", "arguments": '{"city": "Berlin"}'}],
        finish="length",
    ),
    said("And when something fails?"),
    answered("", error={"code": "no_capacity", "message": "no set of peers can hold the model: 12 GB are missing"}),
)
EVIL = conversation(
    HOSTILE,
    said(HOSTILE),
    answered(HOSTILE, reasoning=HOSTILE, calls=[{"id": "c", "name": HOSTILE, "arguments": HOSTILE}]),
    answered("", error={"code": HOSTILE, "message": HOSTILE}),
)
