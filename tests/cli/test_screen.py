"""What a node prints when it has started: plain text in a file, and styles and short lines on a terminal."""

from __future__ import annotations

import io
import unicodedata

import pytest
from msgspec.structs import replace

from exo_mesh.cli.screen import ConsoleScreen, NodeFacts

FACTS = NodeFacts(
    node_id="0123456789abcdef",
    name="räuber",
    version="1.2.3",
    grpc_address="10.0.0.1:5000",
    addresses=("10.0.0.1:5000",),
    api_url="",
    engine="dummy",
    engine_reason="as asked",
    usable_bytes=1 << 30,
    total_bytes=2 << 30,
    models=("one", "two"),
    namespace="default",
    mesh_is_open=True,
    home="/nowhere",
    access="",
    notes=("port 1 is taken " + "and so on " * 20,),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(file: io.StringIO, facts: NodeFacts = FACTS) -> str:
    ConsoleScreen(file).started(facts)
    ConsoleScreen(file).stopping("SIGTERM")
    return file.getvalue()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_file_gets_one_line_for_each_fact_and_no_styles() -> None:
    text = shown(io.StringIO(), replace(FACTS, models=tuple(f"model-{number}" for number in range(50))))
    assert "\x1b" not in text and "\nmodels             model-0, " in text and "model-49\n" in text
    assert text.startswith("exo-mesh 1.2.3\nnode               räuber (01234567), namespace ")
    assert "so on\n" in text.replace("on \n", "on\n") and text.endswith("SIGTERM: stopping (repeat to force)\n")


def test_a_terminal_gets_styles_and_lines_that_fit_it() -> None:
    text = shown(Terminal(), replace(FACTS, models=tuple(f"model-{number}" for number in range(50))))
    assert text.startswith("\x1b[1mexo-mesh 1.2.3\x1b[0m\n\x1b[2mnode\x1b[0m               räuber")
    assert "\x1b[33mThe mesh is open" in text
    models = [line for line in text.splitlines() if "model-" in line]
    assert len(models) > 10 and all(len(line.replace("\x1b[2m", "").replace("\x1b[0m", "")) <= 40 for line in models)
    assert all(line.startswith(" " * 19 + "model-") for line in models[1:])


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_user_may_want_no_styles(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert "\x1b" not in shown(Terminal())


def test_control_characters_of_facts_and_notes_do_not_reach_a_terminal() -> None:
    evil = "\x1b]0;title\x07\u202e"
    text = shown(Terminal(), replace(FACTS, models=(evil,), notes=(evil,)))
    assert not [
        char for char in text.replace("\x1b[", "") if unicodedata.category(char) in ("Cc", "Cf") and char != "\n"
    ]
