"""The parts of a conversation in a terminal: commands, settings, markdown, history, saved conversations."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.mesh_nodes import MAX_MEMBERS, MeshNodes
from exo_mesh.cli.verbs.chat import history as history_module
from exo_mesh.cli.verbs.chat.blocks import finished_length
from exo_mesh.cli.verbs.chat.commands import ChatState, Commands, LeaveChat
from exo_mesh.cli.verbs.chat.conversation import Dialogue, SavedChats
from exo_mesh.cli.verbs.chat.history import MAX_BYTES, MAX_ENTRIES, MAX_ENTRY_CHARS, QuestionHistory
from exo_mesh.cli.verbs.chat.knobs import KNOBS, OTHER_NAMES, read_knob
from exo_mesh.cli.verbs.chat.markdown import MarkdownWriter, rendered
from exo_mesh.errors import InputError
from tests.cli.closed_port import closed_port


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    """Of a chat without a node."""
    nodes = MeshNodes(ApiClient(f"http://127.0.0.1:{closed_port()}", tmp_path))
    return Commands(ChatState(Dialogue("m")), nodes, SavedChats(tmp_path))


def dialogue(commands: Commands) -> Dialogue:
    return commands._state.conversation


@pytest.mark.parametrize(
    ("line", "parameters"),
    [
        ("/set temperature 0.5", {"temperature": 0.5}),
        ("/set parameter temperature 0.5", {"temperature": 0.5}),
        ("/set num_predict 7", {"max_tokens": 7}),
        ("/set stop a b", {"stop": ["a b"]}),
        ('/set stop ["a", "b"]', {"stop": ["a", "b"]}),
        ("/set think off", {"enable_thinking": False}),
        ("/set nothink", {"enable_thinking": False}),
        ("/set effort high", {"reasoning_effort": "high"}),
        ("/set seed default", {}),
    ],
)
def test_settings_become_fields_of_a_request(commands: Commands, line: str, parameters: dict[str, object]) -> None:
    commands.run(line)
    assert dialogue(commands).parameters == parameters


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/set temperature hot", 'temperature must be 0 to 2, or default; "hot" is not'),
        ("/set temperature nan", "temperature must be"),
        ("/set top_p 1.5", "top_p must be 0 to 1"),
        ("/set stop []", "stop must be"),
        ("/set seed", "needs a value"),
        ("/set num_ctx 4096", "the context is set when a model is placed"),
        ("/set nonsense 1", "there is no setting nonsense"),
        ("/set markdown maybe", "markdown must be on or off"),
        ("/sow", "did you mean /show?"),
        ("/load x", "there is no saved conversation x; saved: none yet"),
        ("/save ../x", "cannot name a conversation"),
        ("/save .x", "cannot name a conversation"),
        ("/show weather", "use settings, info, system or messages"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(commands: Commands, line: str, says: str) -> None:
    with pytest.raises(InputError) as found:
        commands.run(line)
    assert says in str(found.value)
    assert dialogue(commands) == Dialogue("m")


def test_every_setting_can_be_set_to_default_and_has_a_line_in_the_help(commands: Commands) -> None:
    shown = commands.run("/set")
    for name in (*KNOBS, *OTHER_NAMES):
        assert read_knob(name, "default")[1] is None
    assert all(f"/set {name} " in shown for name in (*KNOBS, "system", "markdown", "verbose", "history"))


def test_words_of_ollama_switch_the_screen(commands: Commands) -> None:
    for line in ("/set quiet", "/set nohistory", "/set markdown off"):
        commands.run(line)
    assert (commands._state.verbose, commands._state.history, commands._state.markdown) == (False, False, False)
    commands.run('/set system "You are brief."')
    assert dialogue(commands).asking("Hi")[0] == {"role": "system", "content": "You are brief."}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("/s", {"/set", "/show", "/save"}), ("/set te", {"temperature"}), ("/set think o", {"on", "off"}),
        ("/set verbose o", {"on", "off"}), ("/show me", {"messages"}), ("/set effort ", {"default"}), ("hello", set()),
        ("/load a", {"a1"}), ("/model x", set()),
    ],
)  # fmt: skip
def test_completion_knows_commands_settings_and_saved_conversations(
    commands: Commands, line: str, found: set[str]
) -> None:
    commands.run("/save a1")
    word = line.rpartition(" ")[2]
    assert {text for text in commands.complete(line, word) if text.startswith(word)} == found


def test_a_conversation_is_saved_for_its_owner_only_and_loaded_whole(commands: Commands, tmp_path: Path) -> None:
    dialogue(commands).add("one\ntwo\x1b[31m", "three 机器")
    commands.run("/set temperature 0")
    commands.run("/save a-1.b")
    file = tmp_path / "chats" / "a-1.b.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert list(file.parent.iterdir()) == [file]
    commands.run("/clear")
    commands.run("/set temperature default")
    assert "2 messages with m" in commands.run("/load a-1.b")
    assert dialogue(commands).messages == [
        {"role": "user", "content": "one\ntwo\x1b[31m"}, {"role": "assistant", "content": "three 机器"}
    ]  # fmt: skip
    assert dialogue(commands).parameters == {"temperature": 0.0}
    assert "\x1b" not in commands.run("/show messages")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "model": 7}', "\xff", "[" * 9999])
def test_a_file_that_is_no_conversation_is_refused(commands: Commands, tmp_path: Path, text: str) -> None:
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "x.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"x\.json"):
        commands.run("/load x")


def test_bye_leaves(commands: Commands) -> None:
    for line in ("/bye", "/exit", "/quit"):
        with pytest.raises(LeaveChat):
            commands.run(line)


def test_history_is_kept_over_runs_for_its_owner_only(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for entry in ("first", "two\nlines", " secret", "", "x" * (MAX_ENTRY_CHARS + 1), "last"):
        QuestionHistory(home).add(entry)
    assert QuestionHistory(home).entries() == ["first", "two\nlines", "last"]
    assert stat.S_IMODE((home / history_module.FILE_NAME).stat().st_mode) == 0o600


def test_history_is_bounded(tmp_path: Path) -> None:
    history = QuestionHistory(tmp_path)
    for number in range(3 * MAX_BYTES // 10_000):
        history.add(f"{number} " + "x" * 10_000)
        assert (tmp_path / "chat_history").stat().st_size <= MAX_BYTES
    kept = history.entries()
    assert kept[-1].startswith(f"{3 * MAX_BYTES // 10_000 - 1} ") and len(kept) > 20
    for number in range(MAX_ENTRIES + 5):
        history.add(str(number))
    assert history.entries() == [str(number) for number in range(5, MAX_ENTRIES + 5)]


def test_a_damaged_or_forbidden_history_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "chat_history").write_bytes(b'\xff\xfe\n{"a": 1}\n"kept"\n' + b"[" * 9999 + b"\n")
    assert QuestionHistory(tmp_path).entries() == ["kept"]
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "chat_history").symlink_to(tmp_path / "elsewhere")
    QuestionHistory(tmp_path / "other").add("question")
    assert (tmp_path / "elsewhere").read_text() == "", "a link is not followed"


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one", ""), ("one\n\n", ""), ("one\n\ntwo", "one\n\n"), ("- a\n\n  more\n\n- b", "- a\n\n  more\n\n"),
        ("a\n\n```py\nx\n\ny\n", "a\n\n"), ("```\nx\n```\n", "```\nx\n```\n"),
        ("~~~~\n```\n~~~~\nb", "~~~~\n```\n~~~~\n"),
        ("a\n```\nx", "a\n"),
    ],
)  # fmt: skip
def test_blocks_that_are_finished(text: str, finished: str) -> None:
    assert text[: finished_length(text)] == finished


@given(st.lists(st.sampled_from(["a", " ", "\n", "\n\n", "```", "- x", "  ", "# t"]), max_size=30).map("".join))
@settings(max_examples=80, deadline=None)
def test_what_is_finished_stays_finished_as_the_text_grows(text: str) -> None:
    lengths = [finished_length(text[:end]) for end in range(len(text) + 1)]
    assert lengths == sorted(lengths)


def as_shown(text: str) -> str:
    out = io.StringIO()
    Console(file=out, width=60, force_terminal=True, color_system=None).print(rendered(text))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_markdown_obeys_no_control_characters_and_hides_nothing() -> None:
    assert "\x1b[31m" not in as_shown("a \x1b[31m b") and "\\x1b[31m" in as_shown("a \x1b[31m b")
    assert "<script>alert(1)</script>" in as_shown("<script>alert(1)</script>")
    assert "https://evil.example" in as_shown("[bank](https://evil.example)")
    assert as_shown("one\ntwo") == "one\ntwo"


def test_an_answer_that_streams_ends_as_if_it_had_come_at_once() -> None:
    text = (
        "# Title\n\nSome **bold**.\n\n1. one\n\n2. two\n\n```py\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nEnd."
    )
    outputs = []
    for size in (1, 7, len(text)):
        out = io.StringIO()
        writer = MarkdownWriter(Console(file=out, width=60))  # no terminal: nothing is drawn twice
        for start in range(0, len(text), size):
            writer.write(text[start : start + size])
        writer.end()
        outputs.append(" ".join(out.getvalue().split()))
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0].endswith("End.") and "x = 1" in outputs[0]


def test_the_key_is_not_shown_to_members_of_an_open_mesh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Any machine can join one and say that it has an API."""
    monkeypatch.setenv("EXO_MESH_API_KEY", "secret")
    for mesh, shown in (("open", False), ("closed", True)):
        nodes = MeshNodes(ApiClient("http://127.0.0.1:1", tmp_path))
        nodes.note([{"name": "b", "api_url": "http://127.0.0.2:1"}], {"mesh": mesh})
        assert nodes.client.credentials() == {"Authorization": "Bearer secret"}
        nodes.leave(nodes.client)
        assert (nodes.client.url, bool(nodes.client.credentials())) == ("http://127.0.0.2:1", shown)


def test_members_are_bounded_and_addresses_that_are_none_left_out(tmp_path: Path) -> None:
    nodes = MeshNodes(ApiClient("http://127.0.0.1:1", tmp_path))
    bad = ["", None, "file:///etc/passwd", "http://", "http://h:99999999"]
    peers = [{"name": str(url), "api_url": url} for url in bad]
    peers += [{"name": str(port), "api_url": f"http://10.0.0.1:{port}"} for port in range(1, 500)]
    nodes.note(peers, {"mesh": "open"})
    assert MAX_MEMBERS - len(bad) <= len(nodes) <= MAX_MEMBERS + 1
    for _ in range(2 * len(nodes)):
        nodes.leave(nodes.client)
    assert nodes.client.url == "http://127.0.0.1:1", "all were asked in turn"


def test_the_file_of_a_conversation_is_json_that_people_can_read(commands: Commands, tmp_path: Path) -> None:
    commands.run("/save x")
    assert json.loads((tmp_path / "chats" / "x.json").read_text())["version"] == 1
