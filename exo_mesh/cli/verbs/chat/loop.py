"""Runs a conversation in a terminal: reads a message, shows the answer, until the user leaves."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.tables import complain
from exo_mesh.cli.terminal import DIM, shows_styles, styled
from exo_mesh.cli.verbs.chat.answer import ChatAnswer
from exo_mesh.cli.verbs.chat.commands import ChatState, Commands, LeaveChat
from exo_mesh.cli.verbs.chat.following import follow
from exo_mesh.cli.verbs.chat.lines import LineReader
from exo_mesh.cli.verbs.chat.sinks import PlainSink, TerminalSink
from exo_mesh.errors import MeshError


class Chat:
    """Runs the turns of one conversation."""

    def __init__(self, state: ChatState, members: MeshNodes, commands: Commands, lines: LineReader) -> None:
        self._state = state
        self._members = members
        self._commands = commands
        self._lines = lines

    def run(self) -> None:
        """Runs until /bye or Ctrl-D. Ctrl-C only stops the current answer or command."""
        print(f"Talking to {self._state.conversation.model}. /? for help, /bye or Ctrl-D to leave.")
        while True:
            try:
                line = self._lines.read()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\nUse Ctrl-D or /bye to leave.")
                continue
            try:
                self._do(line)
            except LeaveChat:
                return
            except MeshError as exc:
                complain(str(exc))
            except KeyboardInterrupt:
                print("(stopped)")

    def _do(self, line: str) -> None:
        is_command = line.startswith("/") and "\n" not in line
        if is_command:
            print(self._commands.run(line))
            self._lines.keeps_history = self._state.history
        elif line:
            self._ask(line)

    def _ask(self, question: str) -> None:
        """Runs one turn. The conversation keeps the received part of an answer that was stopped or failed."""
        conversation = self._state.conversation
        is_loaded = self._members.learn_whether_loaded(conversation.model)
        kept: list[str] = []
        try:
            with self._sink(kept) as sink:
                answer = follow(
                    self._members, conversation.model, conversation.asking(question), conversation.parameters, sink,
                    is_loaded=is_loaded,
                )  # fmt: skip
        except BaseException:
            if kept:
                conversation.add(question, "".join(kept))
            raise
        conversation.add(question, answer.text)
        report(answer, verbose=self._state.verbose)

    def _sink(self, kept: list[str]) -> PlainSink:
        model = self._state.conversation.model
        return answer_sink(self._members, model, kept, markdown=self._state.markdown, stream=sys.stdout)


def answer_sink(members: MeshNodes, model: str, kept: list[str], *, markdown: bool, stream: TextIO) -> PlainSink:
    """Chooses how to show an answer: with markdown in a terminal, else as plain text. kept: gets its pieces of text."""
    if markdown and stream.isatty() and os.environ.get("TERM") != "dumb":
        return TerminalSink(members, model, kept)
    return PlainSink(members, model, kept, is_terminal=stream.isatty())


def report(answer: ChatAnswer, *, verbose: bool) -> None:
    """Reports on standard error that the answer was cut, and with verbose its times."""
    if answer.finish_reason == "length":
        print("exo-mesh: the answer was cut at the token limit (max_tokens)", file=sys.stderr)
    if verbose:
        timing = answer.timing()
        print(styled(timing, DIM) if shows_styles(sys.stderr) else timing, file=sys.stderr)
