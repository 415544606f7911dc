"""Lines that agents put first go to the end of their message, and nothing else moves."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from exo_mesh.api.core.agent_lines import MAX_LINES, with_agent_lines_last
from exo_mesh.api.core.request import Turn

USER = Turn("user", "Today's date is unknown", "messages[1]")


def system(text: str) -> Turn:
    return Turn("system", text, "messages[0]")


@pytest.mark.parametrize(
    "line",
    [
        "x-anthropic-billing-header: cc_version=2.1.0; cch=4f1e2;",
        "Today's date: 2026-11-23",
        "Today's date is 2026-11-23.",
        "Current date: Monday",
        " - Current date and time: 2026-11-23T01:02:03Z",
        "The current time is 10:00",
    ],
)
def test_a_line_that_changes_with_each_request_goes_last(line: str) -> None:
    (moved, user) = with_agent_lines_last([system(f"{line}\nYou are an agent.\nBe brief."), USER])
    assert moved.text == f"You are an agent.\nBe brief.\n{line}"
    assert user is USER


def test_two_prompts_of_an_agent_share_their_beginning() -> None:
    rest = "You are an agent.\n" * 30
    texts = [
        with_agent_lines_last([system(f"x-anthropic-billing-header: cch={number}\n{rest}")])[0].text
        for number in (1, 2)
    ]
    assert texts[0].startswith(rest) and texts[1].startswith(rest)


@pytest.mark.parametrize(
    "text",
    ["You are an agent. The current date matters.", "Ask for today's date", "\n" * MAX_LINES + "Today's date: 1", ""],
)
def test_other_lines_stay(text: str) -> None:
    assert with_agent_lines_last([system(text), USER]) == (system(text), USER)


def test_nothing_moves_where_the_client_marks_cache_positions() -> None:
    first = system("Today's date: 1\nYou are an agent.")
    for turns in ([replace(first, has_cache_marks=True), USER], [first, replace(USER, has_cache_marks=True)]):
        assert with_agent_lines_last(turns) == tuple(turns)


def test_only_a_first_message_of_the_system_is_looked_at() -> None:
    turns = (replace(USER, text="Today's date: 1\nHi"), system("Today's date: 1\nx"))
    assert with_agent_lines_last(turns) == turns


@pytest.mark.parametrize("line", [" ", "- ", "x-", "x-billing-header", "the current "])
def test_a_line_of_a_megabyte_takes_no_time_worth_mentioning(line: str) -> None:
    """With a pattern that backtracks, this test does not end."""
    turns = (system(line * 1_000_000 + "\nbe brief"), USER)
    assert with_agent_lines_last(turns) == turns
