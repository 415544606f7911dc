"""The grammars of the requests at one driver: a tokenizer for all of them, and the threads that they work in."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from exo_mesh.errors import InputError, MeshError, ModelError
from exo_mesh.model_files import MAX_TOKENIZER_BYTES, named, one_line, read_model_file
from exo_mesh.text.deep_stack import deep_executor
from exo_mesh.text.panics import is_panic

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from exo_mesh.domain.grammar import GrammarSpec

PREPARE_BYTES = 1 << 20
"""A tokenizer.json of at least this size is read while the stage loads: that stops all Python code of the process, for
0.7 s with 100,000 tokens. A smaller one is read when the first grammar comes, in less than a tenth of a second."""

MASK_THREADS = 4
"""At most; a grammar whose masks take long keeps one of them busy, and the other grammars have the rest."""

Wake = Callable[[Callable[[], None]], None]
"""Has something done on the event loop; called from any thread."""

Begin = Callable[["LLMatcher", frozenset[int]], None]

_log = logging.getLogger(__name__)


class Grammars:
    """Made on the event loop at the driver; costs nothing before the first grammar, unless `prepare` was called."""

    def __init__(self, model_dir: Path, wake: Wake) -> None:
        self.wake = wake
        self._model_dir = model_dir
        self._compiling: ThreadPoolExecutor | None = None
        self._masking: ThreadPoolExecutor | None = None
        self._tokenizer: LLTokenizer | None = None

    def prepare(self) -> None:
        """Begin to read a large tokenizer: nobody is served yet, and nobody waits for it now."""
        try:
            if (self._model_dir / "tokenizer.json").stat().st_size >= PREPARE_BYTES:
                self._compiler().submit(self._prepare)
        except OSError:
            return  # the first grammar gets the error

    def compile(self, spec: GrammarSpec, work: Begin) -> Future[None]:
        """Have `work` done with a fresh matcher of the grammar and the ids that it takes for ends of text, in the
        thread that compiles. The future raises what that raises, InputError if the grammar cannot be used, ModelError
        if the tokenizer cannot."""
        return self._compiler().submit(partial(self._compile, spec, work))

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Have a mask made."""
        if self._masking is None:
            threads = min(MASK_THREADS, os.cpu_count() or 1)
            self._masking = ThreadPoolExecutor(threads, thread_name_prefix="masks")
        return self._masking.submit(work)

    def _compiler(self) -> ThreadPoolExecutor:
        if self._compiling is None:
            self._compiling = deep_executor("grammars")
        return self._compiling

    def _prepare(self) -> None:
        try:
            self._read_tokenizer()
        except MeshError as exc:
            _log.warning("no grammars for this model: %s", exc)

    def _compile(self, spec: GrammarSpec, work: Begin) -> None:
        tokenizer = self._read_tokenizer()
        from llguidance import LLMatcher

        from exo_mesh.text.grammars import compile_limits, lark_text, reason

        matcher = LLMatcher(tokenizer, lark_text(spec), log_level=0, limits=compile_limits())
        if matcher.is_error():
            raise InputError(reason(spec, matcher.get_error()))
        work(matcher, frozenset(tokenizer.eos_tokens))

    def _read_tokenizer(self) -> LLTokenizer:
        """In the thread that compiles. Raises ModelError."""
        if self._tokenizer is None:
            start = time.perf_counter()
            self._tokenizer = read_tokenizer(self._model_dir)
            _log.info("read the tokenizer for grammars in %.2f s", time.perf_counter() - start)
        return self._tokenizer


def read_tokenizer(model_dir: Path) -> LLTokenizer:
    """The model's tokens as grammars need them. It blocks. Raises ModelError."""
    from llguidance import LLTokenizer

    path = model_dir / "tokenizer.json"
    try:
        text = read_model_file(path, MAX_TOKENIZER_BYTES).decode()
        if _CUTS.search(text):
            text = _uncut(text)
        return LLTokenizer(text)
    except FileNotFoundError as exc:
        raise ModelError(f"{named(path)}: there is no such file, and grammars need one") from exc
    except BaseException as exc:
        # The library raises ValueError for a fault of the file, and panics at some.
        if isinstance(exc, MeshError) or not (isinstance(exc, Exception) or is_panic(exc)):
            raise
        raise ModelError(f"{named(path)}: cannot be used for grammars: {one_line(str(exc))}") from exc


_CUTS = re.compile(r'"(truncation|padding)"\s*:\s*\{')


def _uncut(text: str) -> str:
    """Without truncation and padding, which would end in the tokens that a grammar forces."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return str(tokenizer.to_str())
