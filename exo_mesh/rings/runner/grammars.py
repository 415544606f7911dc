"""The grammars of the requests at one driver: one tokenizer for all of them, and the threads that compile and mask."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from exo_mesh.base.deep_stack import deep_executor
from exo_mesh.errors import InputError, MeshError, ModelError
from exo_mesh.text.detokenizer import is_panic
from exo_mesh.text.recent_failures import RecentFailures
from exo_mesh.text.spelling import TokenBytes
from exo_mesh.weights.model_files import named, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from exo_mesh.domain.request import GrammarSpec

PREPARE_BYTES = 1 << 20
"""Size in bytes from which a tokenizer.json is read while the stage loads: reading stops all Python code of the
process, for 0.7 s with 100,000 tokens. A smaller file is read with the first grammar, in less than 0.1 s."""

MASK_THREADS = 4
"""Most threads that make masks. A grammar with slow masks keeps one thread busy, and the other grammars use the
rest."""

Wake = Callable[[Callable[[], None]], None]
"""Runs a function on the event loop; called from any thread."""

_log = logging.getLogger(__name__)


class Grammars:
    """Compiles grammars and makes masks in threads of its own. Made on the event loop of the driver; costs nothing
    before the first grammar, unless `prepare` was called."""

    def __init__(self, model_dir: Path, wake: Wake) -> None:
        self.wake = wake
        self._model_dir = model_dir
        self._compiling: ThreadPoolExecutor | None = None
        self._masking: ThreadPoolExecutor | None = None
        self._tokenizer: LLTokenizer | None = None
        self._token_bytes: TokenBytes | None = None
        self._failures = RecentFailures()

    def prepare(self) -> None:
        """Start to read a large tokenizer now, while no request is running yet and none waits for it."""
        try:
            if (self._model_dir / "tokenizer.json").stat().st_size >= PREPARE_BYTES:
                self._compiler().submit(self._prepare)
        except OSError:
            return  # the first grammar reports the error

    def begin(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` in the compiling thread, the only thread that may call `matcher` and `token_bytes`. The future
        raises what `work` raises."""
        return self._compiler().submit(work)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run `work`, which makes a mask, in one of the mask threads."""
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
            _log.warning("grammars are not available for this model: %s", exc)

    def matcher(self, spec: GrammarSpec) -> tuple[LLMatcher, frozenset[int]]:
        """A fresh matcher of a grammar, and the ids that the matcher takes for end of text. Raises InputError if the
        grammar cannot be used, ModelError if the tokenizer cannot be used."""
        self._failures.recall(_question(spec))
        tokenizer = self._read_tokenizer()
        from llguidance import LLMatcher

        from exo_mesh.text.grammars import compile_limits, lark_text, reason

        matcher = LLMatcher(tokenizer, lark_text(spec), log_level=0, limits=compile_limits())
        if matcher.is_error():
            error = InputError(reason(spec, matcher.get_error()))
            self.note_failure(spec, error)
            raise error
        return matcher, frozenset(tokenizer.eos_tokens)

    @property
    def num_ids(self) -> int:
        """Token ids that a matcher knows: it breaks at another one."""
        return 0 if self._tokenizer is None else int(self._tokenizer.vocab_size)

    def note_failure(self, spec: GrammarSpec, error: MeshError) -> None:
        """Remember for a minute that a grammar cannot be used at all, so that `matcher` raises this error at once."""
        self._failures.note(_question(spec), error)

    def token_bytes(self) -> TokenBytes:
        """The bytes of the model's tokens: found with the first request that needs them, in 0.3 s for 150,000 tokens.
        Raises ModelError."""
        if self._token_bytes is None:
            tokenizer = self._read_tokenizer()
            ids = range(tokenizer.vocab_size)
            found = [b"" if tokenizer.is_special_token(one) else tokenizer.decode_bytes([one]) for one in ids]
            self._token_bytes = TokenBytes(found)
        return self._token_bytes

    def _read_tokenizer(self) -> LLTokenizer:
        """Read the tokenizer once, in the compiling thread. Raises ModelError."""
        if self._tokenizer is None:
            start = time.perf_counter()
            self._tokenizer = read_tokenizer(self._model_dir)
            _log.info("read the tokenizer for grammars in %.2f s", time.perf_counter() - start)
        return self._tokenizer


def _question(spec: GrammarSpec) -> bytes:
    return f"{spec.kind}:{spec.text}".encode("utf-8", "surrogatepass")


def read_tokenizer(model_dir: Path) -> LLTokenizer:
    """The model's tokens as grammars need them. Blocks. Raises ModelError."""
    from llguidance import LLTokenizer

    from exo_mesh.text.tokenizer import tokenizer_text  # few rings get a grammar

    path = model_dir / "tokenizer.json"
    try:
        return LLTokenizer(tokenizer_text(model_dir))
    except BaseException as exc:
        # The library raises ValueError for a bad file, and panics on some files.
        if isinstance(exc, MeshError) or not (isinstance(exc, Exception) or is_panic(exc)):
            raise
        raise ModelError(f"{named(path)}: cannot be used for grammars: {one_line(str(exc))}") from exc
