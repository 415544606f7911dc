"""Reads what the small files beside tokenizer.json say about a model's text, in each place where transformers looks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.domain.model_settings import text_config, token_ids
from exo_mesh.errors import ModelError
from exo_mesh.text.template import ChatTemplate, find_template
from exo_mesh.text.tokenizer_bounds import TokenizerBounds, TokenizerFile, TokenPart, bounds_of, check_values
from exo_mesh.weights.model_files import (
    ADDED_TOKENS_FILE,
    MAX_TOKENIZER_BYTES,
    as_text,
    named,
    read_json_if_there,
    read_model_file,
    shown,
    without_mark,
)

MAX_NUMBER = 2**31 - 1
"""Largest sampling value that is accepted in generation_config.json."""

_RANGES = {
    "temperature": (MAX_NUMBER, 0),
    "top_p": (1, 0),
    "top_k": (MAX_NUMBER, 1),
    "min_p": (1, 1),
    "repetition_penalty": (MAX_NUMBER, 1),
}
"""Sampling values: the largest, and whether 0 is a value (0) or turns it off (1), as everything below 0 does."""

_NAMED_BY_ID = ("bos_token", "eos_token", "pad_token")
"""Tokens that configs name by their ids, too."""

MAX_IDS = 1 << 20
"""Most token ids, whatever config.json says; the largest vocabularies have 300,000."""

MAX_PLACEHOLDERS = 10_000
"""Most unknown ids between the ids of tokenizer.json and added tokens; each becomes a token that takes memory."""


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Sampling values of generation_config.json; None if it has none. `do_sample: false` means temperature 0."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class AddedToken(msgspec.Struct, frozen=True):
    """A token beside the tokens of tokenizer.json. token_id: None if no file gives one. The others: as in the
    tokenizers library."""

    content: str
    token_id: int | None = None
    special: bool = True
    flags: Mapping[str, bool] = msgspec.field(default_factory=dict)


class TextFiles(msgspec.Struct, frozen=True):
    """The text settings of one model. special_tokens: by the names that templates use. ids: from configs, for tokens
    without a text here. added: in the order of their ids. add_prefix_space: None: as tokenizer.json says. num_ids: rows
    of the embedding; no further token can be added."""

    architecture: str
    special_tokens: Mapping[str, str]
    ids: Mapping[str, int]
    added: tuple[AddedToken, ...]
    stop_ids: frozenset[int]
    defaults: SamplingDefaults
    template: ChatTemplate | None
    add_prefix_space: bool | None
    cleans_spaces: bool
    num_ids: int

    @classmethod
    def read(cls, directory: Path) -> TextFiles:
        """Read the files of a model; tokenizer.json is not one of them. Raises ModelError that names the file."""
        config = read_json_if_there(directory / "config.json")
        generation_file = directory / "generation_config.json"
        generation = read_json_if_there(generation_file)
        settings_file = directory / "tokenizer_config.json"
        settings = read_json_if_there(settings_file)
        named_tokens = _named_tokens(directory, settings)
        special_tokens = {name: text for name, text in named_tokens.items() if text is not None}
        try:
            ids = {name: token_ids(f"{name}_id", generation, config) for name in _NAMED_BY_ID}
        except ValueError as exc:
            raise ModelError(f"{named(generation_file)}: {exc}") from exc
        return cls(
            architecture=str(config.get("model_type", "")),
            special_tokens=special_tokens,
            ids={name: found[0] for name, found in ids.items() if found and name not in named_tokens},
            added=tuple(_added_tokens(directory, settings, special_tokens)),
            stop_ids=frozenset(ids["eos_token"]),
            defaults=_sampling_defaults(generation, generation_file),
            template=find_template(directory, settings),
            add_prefix_space=_prefix_space(settings),
            cleans_spaces=settings.get("clean_up_tokenization_spaces") is True,
            num_ids=_num_ids(config),
        )


def check_text_files(directory: Path) -> None:
    """Raises ModelError, naming file and cause, if a model's text files cannot be used. It blocks; the vocabulary is
    only parsed, so this takes some 20 ms for a large one."""
    files = TextFiles.read(directory)
    file = directory / "tokenizer.json"
    try:
        data = read_model_file(file, MAX_TOKENIZER_BYTES)
    except FileNotFoundError as exc:
        raise ModelError(f"{named(file)}: there is no such file") from exc
    read_bounds(file, data, files)


def read_bounds(file: Path, data: bytes, files: TextFiles) -> TokenizerBounds:
    """The bounds of a tokenizer.json with this content. files: the others of the model. Raises ModelError, naming the
    file, if a node cannot use it."""
    try:
        check_values(data)
        found = msgspec.json.decode(without_mark(data), type=TokenizerFile)  # not as a str: that would be a copy
        if any((token.token_id or 0) > MAX_PLACEHOLDERS for token in files.added):
            check_added_ids(files, found.next_id())
        return bounds_of(found, map(_part_of, files.added))
    except ModelError as exc:
        raise ModelError(f"{named(file)}: {exc}") from exc
    except msgspec.ValidationError as exc:
        raise ModelError(f"{named(file)} is not a tokenizer: {exc}") from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        as_text(file, data)
        raise ModelError(f"{named(file)} is not valid JSON, or is cut short: {exc}; download it again") from exc


def _part_of(token: AddedToken) -> TokenPart:
    flags = {"normalized": not token.special, **token.flags}
    return TokenPart(token.token_id or 0, token.content, **{name: flags[name] for name in _FLAGS if name in flags})


_FLAGS = ("normalized", "lstrip", "rstrip")


def check_added_ids(files: TextFiles, next_id: int) -> None:
    """Raises ModelError if added tokens leave too many ids without a token. next_id: the first that tokenizer.json does
    not have."""
    further = {token.token_id for token in files.added if next_id <= (token.token_id or 0) < files.num_ids}
    last = max(filter(None, further), default=next_id)
    if (missing := last + 1 - next_id - len(further)) > MAX_PLACEHOLDERS:
        raise ModelError(
            f"an added token has the id {last}, and no file has a token for {missing} of the ids from {next_id} on; at "
            f"most {MAX_PLACEHOLDERS} may be missing; download the model again"
        )


def _num_ids(config: Mapping[str, Any]) -> int:
    size = text_config(config).get("vocab_size")
    return min(size, MAX_IDS) if type(size) is int and size > 0 else MAX_IDS


def _text_of(value: Any) -> str | None:
    """The text of a token, which is a string, or an object with its text under "content"."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _named_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str | None]:
    """Every `…_token` that the files name; None where a file says that the model has none.

    special_tokens_map.json wins over tokenizer_config.json, except in newer checkpoints, whose tokenizer_config.json
    has the table `added_tokens_decoder`; there it only fills gaps.
    """
    mapped = read_json_if_there(directory / "special_tokens_map.json")
    extra = settings.get("extra_special_tokens")
    of_model = extra if isinstance(extra, dict) else {}
    pairs = {**mapped, **settings} if "added_tokens_decoder" in settings else {**settings, **mapped}
    return {
        name: _text_of(value)
        for name, value in {**pairs, **of_model}.items()
        if name.endswith("_token") and not isinstance(value, bool)
    }


def _added_tokens(directory: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> Iterator[AddedToken]:
    """The tokens of `added_tokens_decoder`, else of added_tokens.json, then tokens that are only named."""
    lists = (settings.get("extra_special_tokens"), settings.get("additional_special_tokens"))
    others = [text for one in lists if isinstance(one, list) for text in map(_text_of, one) if text]
    names = dict.fromkeys([*special.values(), *others])
    table = settings.get("added_tokens_decoder")
    if isinstance(table, dict):
        found = [_of_table(number, entry) for number, entry in table.items()]
    else:
        numbers = read_json_if_there(directory / ADDED_TOKENS_FILE).items()
        found = [
            AddedToken(text, _id(number), text in names, {"normalized": text not in names}) for text, number in numbers
        ]
    known = [token for token in found if token is not None and token.content and token.token_id is not None]
    yield from sorted(known, key=lambda token: token.token_id or 0)
    contents = {token.content for token in known}
    yield from (AddedToken(text) for text in names if text and text not in contents)


def _of_table(number: str, entry: Any) -> AddedToken | None:
    text = _text_of(entry)
    if text is None or not isinstance(entry, dict) or not number.isdecimal():
        return None
    flags = {name: entry[name] for name in ("lstrip", "rstrip", "single_word", "normalized") if name in entry}
    return AddedToken(
        text, _id(int(number[:11])), entry.get("special") is True, {name: flag is True for name, flag in flags.items()}
    )


def _id(number: Any) -> int | None:
    return number if type(number) is int and 0 <= number <= MAX_NUMBER else None


def _prefix_space(settings: Mapping[str, Any]) -> bool | None:
    """The setting of tokenizer classes that have it; of a general class, tokenizer.json alone counts."""
    kind, value = settings.get("tokenizer_class"), settings.get("add_prefix_space")
    is_general = not isinstance(kind, str) or kind.startswith(("PreTrained", "Tokenizers", "Llama"))
    return value if isinstance(value, bool) and not is_general else None


def _sampling_defaults(generation: Mapping[str, Any], where: Path) -> SamplingDefaults:
    """The values; None where a value turns something off."""
    values: dict[str, Any] = {}
    for name, (most, least) in _RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not value <= most or (name == "top_k" and value > 0 and value != int(value)):
            raise ModelError(f"{named(where)}: {name} is {shown(value)}, which is not a valid value")
        if value > 0 or (least == 0 and value == 0):
            values[name] = int(value) if name == "top_k" else float(value)
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    return SamplingDefaults(**values)
