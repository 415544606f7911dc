"""Records what aider sends during one edit, by answering it rightly."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.clients.aider.running import MODEL, Edit, run_aider

FIRST, SECOND, NEW = "Quokka", "Wombat", "Numbat"
"""Words that aider's prompts do not have: each one found in a recorded prompt is one of the edit."""


@dataclass(frozen=True)
class Talk:
    """The messages of one request of aider's, and the right answer."""

    messages: list[dict[str, str]]
    answer: str


def record(program: str, folder: Path) -> list[Talk]:
    """The requests for the edit and for the commit message, for either of the two words of the file."""
    talks: list[Talk] = []
    for changes_second in (False, True):
        edit = Edit(FIRST, SECOND, NEW, changes_second)
        with answering(edit, talks) as url:
            done = run_aider(program, folder / edit.old, url, edit, model=MODEL, streams=False)
        assert done.content == edit.after, done.printed
        assert done.titles[0] == edit.commit_title, done.printed
    return talks


@contextmanager
def answering(edit: Edit, talks: list[Talk]) -> Iterator[str]:
    """The address of a server that answers this edit and appends each request to `talks`."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            wants_commit = "diff --git" in asked["messages"][-1]["content"]
            talks.append(Talk(asked["messages"], edit.commit_title if wants_commit else edit.answer))
            body = json.dumps(completion(talks[-1].answer)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def completion(text: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice], "usage": usage}
