"""Reads a model's text files: its tokenizer, chat template, special tokens and sampling defaults."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace

from exo_mesh.base.printable import quoted, random_digits
from exo_mesh.errors import ContextLengthError, InputError, ModelError
from exo_mesh.text.built_in_templates import built_in_template
from exo_mesh.text.completing import complete, may_change
from exo_mesh.text.control_text import ChatPrompt, ControlTexts
from exo_mesh.text.detokenizer import CleaningDetokenizer, Detokenizer, is_panic
from exo_mesh.text.output.formats import PLAIN, OutputFormat, format_of
from exo_mesh.text.template import ChatTemplate
from exo_mesh.text.text_files import MAX_IDS, SamplingDefaults, TextFiles, read_bounds
from exo_mesh.text.text_guard import TextGuard
from exo_mesh.text.token_table import TokenTable
from exo_mesh.text.tokenizer_bounds import NODE_GROWN_LENGTH, TokenizerBounds
from exo_mesh.text.vision import VisionSpec, read_vision
from exo_mesh.weights.model_files import named, one_line, read_tokenizer_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from exo_mesh.text.template_wire import TokenizerMethod

Elsewhere = Callable[["TokenizerMethod", str, list[Any]], Any]
"""Calls a method of this text model in another process, with the text and the other arguments. It blocks, and must not
be called on an event loop. Raises the errors of the method, and ModelError if the tokenizer exceeds its limits."""

NO_VISION = "its files are not in the mesh"

SLICE_LENGTH = 1 << 16
"""Characters whose tokens are counted at a time; encoding this many takes 25 MB."""


class TextModel(msgspec.Struct, frozen=True):
    """The text side of one model: encodes prompts and decodes output. Immutable; safe to use from several threads."""

    name: str
    tokenizer: Tokenizer | TokenTable
    """A table for a large vocabulary, with which only other processes encode."""
    template: ChatTemplate | None
    special_tokens: Mapping[str, str]
    """The special tokens by the names that templates use, such as bos_token and eos_token."""
    eos_ids: frozenset[int]
    hidden_ids: frozenset[int]
    defaults: SamplingDefaults
    byte_of_character: Mapping[str, int] | None
    """For byte-level vocabularies: the byte that each character of a token stands for; else None."""
    output: OutputFormat
    """How the model marks thoughts and tool calls."""
    vision: VisionSpec | str = NO_VISION
    """How its prompts take images, or the reason why they do not."""
    cleans_spaces: bool = False
    """Whether spaces before punctuation are left out of its text. For BPE they never are, as in transformers."""
    controls: ControlTexts | None = None
    """Its control tokens; None if it has no chat template."""
    bounds: TokenizerBounds | None = None
    """Bounds of the tokenizer's effect on a text; None for an empty vocabulary."""
    num_ids: int = MAX_IDS
    """Token ids that the model can compute, by its config; tokens of the tokenizer may have others."""
    elsewhere: Elsewhere | None = None
    """Runs the methods that take a text in another process, for texts that may take long; None: they run here."""
    nearby: Elsewhere | None = None
    """The same for short texts, if the tokenizer is a table. It takes no longer than the method itself would take."""

    @classmethod
    def open(cls, directory: Path) -> TextModel:
        """Read a model's text files. It blocks, up to a second for a large vocabulary. Raises ModelError."""
        files = TextFiles.read(directory)
        return cls.of(directory, files, *read_tokenizer(directory, files))

    @classmethod
    def of(
        cls, directory: Path, files: TextFiles, tokenizer: Tokenizer | TokenTable, bounds: TokenizerBounds
    ) -> TextModel:
        """The text model of these files. It blocks. Raises ModelError."""
        special_tokens = {**_tokens_by_id(tokenizer, files.ids), **files.special_tokens}
        eos_ids = files.stop_ids
        if (eos := special_tokens.get("eos_token")) is not None and (eos_id := tokenizer.token_to_id(eos)) is not None:
            eos_ids |= {eos_id}
        added = tokenizer.get_added_tokens_decoder()
        template = files.template or built_in_template(files.architecture)
        markers = {token.content: token_id for token_id, token in added.items()}
        made = cls(
            name=directory.name,
            tokenizer=tokenizer,
            template=template,
            special_tokens=special_tokens,
            eos_ids=eos_ids,
            hidden_ids=frozenset(token_id for token_id, token in added.items() if token.special),
            defaults=files.defaults,
            byte_of_character=_byte_of_character() if _decodes_bytes(tokenizer) else None,
            output=format_of(template.sources if template else None, files.architecture, markers),
            vision=read_vision(directory, tokenizer.id_to_token),
            cleans_spaces=files.cleans_spaces and _kind_of(tokenizer) != "BPE",
            bounds=bounds,
            num_ids=files.num_ids,
        )
        return made if template is None else made.with_template(template)

    def with_template(self, template: ChatTemplate) -> TextModel:
        """The same with a tried template: its output shows which tokens are control tokens."""
        markers = {token for token, _ in self.output.tokens}
        return replace(self, template=template, controls=ControlTexts(self.tokenizer, markers, template.written))

    @classmethod
    def without_vocabulary(cls, name: str) -> TextModel:
        """The text side of a model whose server has the tokenizer: it has no tokens, no template and no defaults."""
        from tokenizers import Tokenizer  # late, as in _read_tokenizer
        from tokenizers.models import BPE

        return cls(
            name=name,
            tokenizer=Tokenizer(BPE()),
            template=None,
            special_tokens={},
            eos_ids=frozenset(),
            hidden_ids=frozenset(),
            defaults=SamplingDefaults(),
            byte_of_character=None,
            output=PLAIN,
        )

    @property
    def chat_template(self) -> ChatTemplate:
        """The template of its conversations. Raises InputError if it has none."""
        if self.template is None:
            text = f"the model {self.name} has no chat template; use /v1/completions with a plain prompt"
            raise InputError(text, param="messages")
        return self.template

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the tokenizer knows; the model's logits may be padded beyond it."""
        return int(self.tokenizer.get_vocab_size())

    def _away(self, text: str) -> Elsewhere | None:
        """What runs a method with this text in another process; None if the text is short and its tokens are cheap.
        Raises InputError if the text must not be encoded here, and nothing else can."""
        if self.bounds is None:
            return None
        away = self.nearby if self.bounds.is_light(text) else self.elsewhere
        if away is None and isinstance(self.tokenizer, TokenTable):
            raise InputError(f"the tokenizer of {self.name} cannot be used here")
        return away

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text, with the special tokens that the model expects around it. It blocks. Raises InputError,
        and ModelError for a token that the model does not have, as the other methods that encode."""
        if (away := self._away(text)) is not None:
            return self._computable(away("encode_text", text, []))
        return self._computable(self._encode(text, add_special_tokens=True))

    def encode_prompt(self, prompt: str) -> list[int]:
        """Encode a prompt from a chat template, which already has its special tokens. It blocks. Raises InputError."""
        if (away := self._away(prompt)) is not None:
            return self._computable(away("encode_prompt", prompt, []))
        return self._computable(self._encode(prompt, add_special_tokens=False))

    def has_id(self, token_id: int) -> bool:
        """Whether the tokenizer has this token, and the model can compute it."""
        return 0 <= token_id < self.num_ids and self.tokenizer.id_to_token(token_id) is not None

    def _computable(self, token_ids: list[int]) -> list[int]:
        """Returns the ids. Raises ModelError if the model has no token with one of them; the id of an image may be any,
        because it only says where the image is."""
        if max(token_ids, default=0) < self.num_ids:
            return token_ids
        image_id = self.vision.image_id if isinstance(self.vision, VisionSpec) else None
        for token_id in token_ids:
            if token_id >= self.num_ids and token_id != image_id:
                token = quoted(self.tokenizer.id_to_token(token_id) or "")
                raise ModelError(
                    f"{self.name}: its tokenizer makes the token {token} with the id {token_id} of this text, but the "
                    f"model has only {self.num_ids} token ids (vocab_size in config.json)"
                )
        return token_ids

    def guard(self) -> TextGuard:
        """A guard for the texts of one request: see control_text."""
        if self.controls is None:
            return TextGuard()
        allowed = () if self.output.is_harmony else self.output.markers(has_tools=True)
        return TextGuard(self.marked, random_digits(), allowed)

    def marked(self, text: str, mark: str, allowed: Collection[str]) -> str:
        """The text with the mark in every control token that it spells: see ControlTexts.marked. It blocks. Raises
        InputError."""
        assert self.controls is not None
        if not self.controls.may_spell(text):
            return self.controls.marked_apart(text, mark)
        away = self._away(text)
        if away is not None and len(text) * (1 + len(mark)) > NODE_GROWN_LENGTH:
            away = self.elsewhere  # it may become long
        if away is None:
            with _encoding_errors():
                most = sys.maxsize if self.elsewhere is None else NODE_GROWN_LENGTH
                made = self.controls.marked_within(most, text, mark, allowed)
            if made is not None:
                return made
        away = away or self.elsewhere
        assert away is not None
        return cast(str, away("marked", text, [mark, list(allowed)]))

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Encode a prompt in which control tokens that texts spell are marked. It blocks. Raises InputError."""
        if not prompt.mark or self.controls is None:
            return self.encode_prompt(prompt.marked)
        if (away := self._away(prompt.marked)) is not None:
            return self._computable(away("encode_chat", prompt.marked, [prompt.mark]))
        with _encoding_errors():
            return self._computable(self.controls.encode(prompt))

    def encode_for_vector(self, text: str, pair: str | None = None, limit: int | None = None) -> tuple[list[int], int]:
        """(tokens, where the second text begins) of a text or a pair of texts, with the special tokens around them; the
        second number is 0 if the model does not mark second texts. limit: cut the longer text until so many tokens are
        left; None: cut nothing. It blocks. Raises InputError."""
        if (away := self._away(text + (pair or ""))) is not None:
            return cast(tuple[list[int], int], away("encode_for_vector", text, [pair, limit]))
        assert not isinstance(self.tokenizer, TokenTable), "see _away"
        with _encoding_errors("input"):
            first = self.tokenizer.encode(text, add_special_tokens=False)
            second = None if pair is None else self.tokenizer.encode(pair, add_special_tokens=False)
            if limit is not None:
                room = max(1, limit - self.tokenizer.num_special_tokens_to_add(second is not None))
                _cut(first, second, room)
            whole = self.tokenizer.post_process(first, second, add_special_tokens=True)
        types = whole.type_ids
        return self._computable(list(whole.ids)), types.index(1) if pair is not None and 1 in types else 0

    def check_length(self, text: str, limit: int, param: str) -> None:
        """Raises ContextLengthError for a long text that has more than `limit` tokens, before it is encoded. It blocks.

        The library needs about 400 bytes for each token of a text, so this counts the tokens slice by slice. It refuses
        only well above the limit, because cutting the text can add a few tokens.
        """
        if len(text) <= max(SLICE_LENGTH, 2 * limit):  # short enough to be encoded without a check
            return
        if (away := self._away(text)) is not None:
            away("check_length", text, [limit, param])
            return
        count = 0
        for start in range(0, len(text), SLICE_LENGTH):
            count += len(self._encode(text[start : start + SLICE_LENGTH], add_special_tokens=False))
            if count > 1.5 * limit:
                raise ContextLengthError(
                    f"the prompt has {len(text)} characters and more than {limit} tokens, but {self.name} holds at "
                    f"most {limit} tokens of prompt and output together",
                    param=param,
                )

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not isinstance(self.tokenizer, TokenTable), "see _away"
        with _encoding_errors():
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def detokenizer(self, shown: Collection[str] = ()) -> Detokenizer:
        """A new detokenizer for one output. shown: special tokens to decode as text, for an output parser."""
        ids = frozenset(self.tokenizer.token_to_id(token) for token in shown) if shown else frozenset()
        kind = CleaningDetokenizer if self.cleans_spaces else Detokenizer
        return kind(self.tokenizer, self.hidden_ids - ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens. It blocks."""
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        """For each token, the position in characters where its text begins in the text of all tokens."""
        detokenizer, found, length = self.detokenizer(), [], 0
        for token_id in token_ids:
            found.append(length)
            length += len(detokenizer.push(token_id))
        return found

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that were added to the vocabulary, with their ids: special tokens, and markers such as `<think>`."""
        return {token.content: token_id for token_id, token in self.tokenizer.get_added_tokens_decoder().items()}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, even if they are only part of a character; b"" for an unknown id."""
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.hidden_ids:
            return token.encode()
        if self.byte_of_character is not None and all(c in self.byte_of_character for c in token):
            return bytes(self.byte_of_character[c] for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()


@contextmanager
def _encoding_errors(param: str = "messages") -> Iterator[None]:
    """Turns the errors of the tokenizers library into an InputError. param: the field of the text."""
    try:
        yield
    except UnicodeEncodeError as exc:
        raise InputError("the text contains a lone surrogate (U+D800 to U+DFFF)", param=param) from exc
    except BaseException as exc:
        if not is_panic(exc):
            raise
        raise InputError("the model's tokenizer cannot encode this text", param=param) from exc


def _cut(first: Any, second: Any, room: int) -> None:
    """Cut the longer of two encodings, in place, until both have `room` tokens together; second may be None."""
    if second is None:
        first.truncate(min(room, len(first)))
        return
    surplus = max(0, len(first) + len(second) - room)
    longer, shorter = (first, second) if len(first) > len(second) else (second, first)
    most = min(surplus, len(longer) - len(shorter))
    rest = surplus - most
    longer.truncate(max(0, len(longer) - most - (rest + 1) // 2))
    shorter.truncate(max(0, len(shorter) - rest // 2))


def read_tokenizer(directory: Path, files: TextFiles) -> tuple[Tokenizer, TokenizerBounds]:
    """The tokenizer of a model with the tokens and settings that its other files add, and its bounds. It blocks. Raises
    ModelError, also for a tokenizer beyond the bounds, which is not even read."""
    from tokenizers import Tokenizer  # takes 4 MB and 4 ms, which a node without requests does not need

    path = directory / "tokenizer.json"
    try:
        content = read_tokenizer_text(path).encode()
    except FileNotFoundError as exc:
        raise ModelError(f"{named(path)}: this file is missing, and no other tokenizer format is supported") from exc
    bounds = read_bounds(path, content, files)
    try:
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_padding()
        tokenizer.no_truncation()  # a prompt must never be cut silently
        complete(tokenizer, files)
    except BaseException as exc:
        # The tokenizers library raises a bare Exception for most faults of the file, and panics at some.
        if not isinstance(exc, Exception) and not is_panic(exc):
            raise
        raise ModelError(f"{named(path)}: cannot be read: {one_line(str(exc))}") from exc
    return tokenizer, bounds


def tokenizer_text(directory: Path) -> str:
    """The text of a tokenizer.json with the same tokens as `read_tokenizer`, for another library. The file itself if
    nothing is to be changed, because a large vocabulary takes long to write. It blocks. Raises ModelError."""
    from tokenizers import Tokenizer  # late, as in read_tokenizer

    path = directory / "tokenizer.json"
    files = TextFiles.read(directory)
    try:
        text = read_tokenizer_text(path)
    except FileNotFoundError as exc:
        raise ModelError(f"{named(path)}: the file does not exist, and grammars need it") from exc
    read_bounds(path, text.encode(), files)
    if _CUTS.search(text) or may_change(text, files):
        tokenizer = Tokenizer.from_str(text)
        is_cut = tokenizer.padding is not None or tokenizer.truncation is not None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if complete(tokenizer, files) or is_cut:
            return str(tokenizer.to_str())
    return text


_CUTS = re.compile(r'"(truncation|padding)"\s*:\s*\{')
"""Settings that would add tokens to the tokens that a grammar forces, or leave some out."""


def _kind_of(tokenizer: Tokenizer | TokenTable) -> str:
    """The kind of a tokenizer's model, such as BPE."""
    return tokenizer.kind if isinstance(tokenizer, TokenTable) else type(tokenizer.model).__name__


def _tokens_by_id(tokenizer: Tokenizer | TokenTable, ids: Mapping[str, int]) -> dict[str, str]:
    found = {name: tokenizer.id_to_token(token_id) for name, token_id in ids.items()}
    return {name: text for name, text in found.items() if text is not None}


def _decodes_bytes(tokenizer: Tokenizer | TokenTable) -> bool:
    """Whether the decoder, or a part of it, maps characters back to bytes (GPT-2's byte-level alphabet)."""
    decoder = tokenizer.decoder
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    return any(part.get("type") == "ByteLevel" for part in [state, *state.get("decoders", [])])


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet: a printable byte is its own character, all others are characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
