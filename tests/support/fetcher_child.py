"""A fetcher's process for tests that need no node: requests as keyword arguments, answers as objects of the wire."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.domain.spans import Spans
from exo_mesh.models.fetcher.wire import (
    Answer,
    Fetch,
    Fetched,
    FetchFailed,
    FetchProgress,
    Request,
    Resolve,
    Search,
    Setup,
    Share,
    Source,
)
from exo_mesh.weights.fetched import read_manifest
from tests.support.hub import LoopbackHub

HUB = Source()
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN_PATH")


def fetcher_environ(hub: LoopbackHub, home: Path, **more: str) -> dict[str, str]:
    """For a fetcher that knows this hub only; `home` is that of its Hugging Face libraries."""
    own = {name: value for name, value in os.environ.items() if name not in TOKENS}
    return {**own, **hub.environment, "HF_HOME": str(home), **more}


class FetcherChild:
    """Starts at once. `close` ends it, and so does the end of the test's process."""

    def __init__(self, environ: Mapping[str, str], *, floor_bytes: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "exo_mesh.models.fetcher"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
        )
        self._ids = itertools.count(1)
        self._answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
        self.send(Setup(None, floor_bytes))

    def __enter__(self) -> FetcherChild:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(5)
        self.process.stdout.close()

    def send(self, request: Request) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(request) + b"\n")
        self.process.stdin.flush()

    def answer(self, on_progress: Callable[[FetchProgress], None] = lambda progress: None) -> Answer:
        """The last answer to what was asked last. Raises EOFError if the process ends before."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            answer = self._answers.decode(line)
            if not isinstance(answer, FetchProgress):
                return answer
            on_progress(answer)
        raise EOFError

    def resolve(self, repo: str, model_dir: Path, *, revision: str = "main", **settings: Any) -> Answer:
        self.send_resolve(repo, model_dir, revision=revision, **settings)
        return self.answer()

    def send_resolve(self, repo: str, model_dir: Path, *, revision: str = "main", **settings: Any) -> None:
        self.send(Resolve(next(self._ids), repo, repo, revision, str(model_dir), (HUB,), **settings))

    def begin_fetch(self, model_dir: Path, pieces: Mapping[str, Spans] | None = None) -> int:
        """Ask for some bytes, or for all of the model."""
        manifest = read_manifest(model_dir)
        assert manifest is not None
        every = {name: ((0, file.size),) for name, file in manifest.files.items()}
        number = next(self._ids)
        self.send(Fetch(number, str(model_dir), (Share(dict(pieces if pieces is not None else every), (HUB,)),)))
        return number

    def fetch(self, model_dir: Path, pieces: Mapping[str, Spans] | None = None) -> Answer:
        self.begin_fetch(model_dir, pieces)
        return self.answer()

    def pull(self, repo: str, model_dir: Path) -> Answer:
        """Resolve and fetch everything; the first answer that is a failure, else the last."""
        answer = self.resolve(repo, model_dir)
        return answer if isinstance(answer, FetchFailed) else self.fetch(model_dir)

    def search(self, query: str, limit: int) -> Answer:
        self.send_search(query, limit)
        return self.answer()

    def send_search(self, query: str, limit: int) -> None:
        self.send(Search(next(self._ids), query, limit))


def is_same_model(model_dir: Path, original: Path) -> bool:
    """Are all files of the original in the directory, whole, equal, and by their own names?"""
    names = {file.name for file in original.iterdir()}
    here = {file.name for file in model_dir.iterdir()}
    return names <= here and all((model_dir / name).read_bytes() == (original / name).read_bytes() for name in names)


def wrong_files(model_dir: Path, original: Path) -> list[str]:
    """Names by which a program would find something else than the original: none, however a fetch ended."""
    if not model_dir.exists():
        return []
    names = [file.name for file in original.iterdir() if (model_dir / file.name).exists()]
    return [name for name in names if (model_dir / name).read_bytes() != (original / name).read_bytes()]


__all__ = ["FetchFailed", "Fetched", "FetcherChild", "fetcher_environ", "is_same_model", "wrong_files"]
