"""How errors quote a client's text: as JSON, short and printable."""

from __future__ import annotations

import pytest

from exo_mesh.api.errors import MAX_QUOTED_CHARS, quoted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("yes", '"yes"'),
        ('a "b"', '"a \\"b\\""'),
        ("Größe", '"Größe"'),
        ("\x1b[2J\u202e", '"\\u001b[2J\\u202e"'),
        ("x" * MAX_QUOTED_CHARS, f'"{"x" * MAX_QUOTED_CHARS}"'),
        ("x" * (MAX_QUOTED_CHARS + 1), f'"{"x" * (MAX_QUOTED_CHARS - 1)}…"'),
    ],
)
def test_a_text_is_quoted_as_json(text: str, shown: str) -> None:
    assert quoted(text) == shown
