"""The output of `exo-mesh demo`: the ring, the answer as it streams, and commands to try next."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from exo_mesh.base.printable import cells, counted, padded
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.screen import FIRST_QUESTION, curl_line
from exo_mesh.cli.stage_colours import stage_colour
from exo_mesh.cli.tables import layers_text, peer_names
from exo_mesh.cli.verbs.chat.answer import ask

_MAX_TOKENS = 256
"""A bound for engines that compute nonsense; the demo model itself stops much earlier."""

_WIDTH = 32
"""Most blocks in the line of a stage: a block for some layers of a deep model, or some blocks for a layer."""


class DemoScreen:
    """Writes to the terminal, or as plain text where there is none."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Shows a spinner during a wait; without a terminal, prints one line."""
        if not self._console.is_terminal:
            self._console.print(f"{what} …")
        return self._console.status(f"{what} …")

    def ring(self, instance: dict[str, Any], state: dict[str, Any]) -> None:
        """Draws the ring of an instance: its peers, their layers and engines."""
        names = peer_names(state)
        title = f"{instance['model']} over {counted(len(instance['stages']), 'peer')}"
        width = min(self._console.width, 78)
        self._console.print(Panel(ring_picture(instance["stages"], names), title=title, width=width))

    def answer(self, client: ApiClient, model: str, question: str) -> None:
        """Asks the question and shows the tokens as they arrive."""
        self._console.print(Text.assemble(("you    ", "bold"), question))
        self._console.print(Text("model  ", style="bold"), end="")
        messages = [{"role": "user", "content": question}]
        answer = ask(client, model, messages, {"temperature": 0, "max_tokens": _MAX_TOKENS}, self._piece)
        self._console.print(Text(f"\n       {answer.timing()}", style="dim"))

    def serving(self, api_urls: list[str], model: str, token: str = "") -> None:
        """Shows the addresses of the API, the page, and a curl command. token: the local token of the first peer, which
        gives the page local rights. Only a terminal shows it, no log."""
        self._console.print(f"\nThe mesh is up. OpenAI-style API: [bold]{api_urls[0]}/v1[/bold]")
        if api_urls[1:]:
            self._console.print(f"Every peer answers for every model: {', '.join(api_urls[1:])} too.")
        rights = f"/#token={token}" if token and self._console.is_terminal else ""
        self._console.print(
            f"Page in a browser{', with local rights' if rights else ''}: [bold]{api_urls[0]}{rights}[/bold]"
        )
        print(curl_line(api_urls[0], model, FIRST_QUESTION), flush=True)
        self._console.print("[dim]Ctrl-C stops all peers.[/dim]")

    def peer_ended(self, number: int, log_tail: str) -> None:
        """Reports a peer that ended unexpectedly."""
        self._console.print(Text(f"peer-{number} ended; {log_tail}", style="red"))

    def stopping(self) -> None:
        """Reports that Ctrl-C or SIGTERM stops the mesh."""
        self._console.print(Text("\nstopping all peers", style="dim"))

    def _piece(self, text: str) -> None:
        self._console.print(Text(text), end="")


def ring_picture(stages: list[dict[str, Any]], names: dict[str, str]) -> Text:
    """Draws one line per stage with its layers as blocks, in the order in which a token passes them."""
    picture = Text.assemble(("tokens in ─► embed\n", "dim"))
    name_width = max(cells(names.get(stage["peer"], stage["peer"][:8])) for stage in stages)
    total = stages[-1]["layers"][1]
    width = max(1, _WIDTH // total) * total if total <= _WIDTH else _WIDTH
    for index, stage in enumerate(stages):
        start, stop = stage["layers"]
        name = names.get(stage["peer"], stage["peer"][:8])
        picture.append(f"  {padded(name, name_width)}  ", style="bold")
        first = min(start * width // total, width - 1)
        last = max(stop * width // total, first + 1)
        picture.append("·" * first, style="dim")
        picture.append("█" * (last - first), style=stage_colour(index))
        picture.append("·" * (width - last), style="dim")
        picture.append(f"  layers {layers_text(stage['layers'])}, {stage['engine']}\n")
    picture.append("sample ─► token out, and round again", style="dim")
    return picture
