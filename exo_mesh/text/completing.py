"""Adds to a tokenizer what a model's other files say about it, as transformers does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import msgspec

from exo_mesh.text.text_files import AddedToken, TextFiles, check_added_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def complete(tokenizer: Tokenizer, files: TextFiles) -> bool:
    """Add the tokens that tokenizer.json lacks, and set the space before a text; in place. Returns whether anything
    changed. Raises as the tokenizers library, and as check_added_ids.

    A token without a row in the embedding is not added: the model could not compute it. Unknown ids below that of an
    added token get placeholders, because the library numbers tokens in order.
    """
    from tokenizers import AddedToken as LibraryToken

    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    next_id = max([tokenizer.get_vocab_size(with_added_tokens=False), *(i + 1 for i in _added_ids(tokenizer))])
    check_added_ids(files, next_id)
    fresh: list[Any] = []
    for token in files.added:
        made = LibraryToken(token.content, special=token.special, **_flags(token))
        before = known.get(token.content)
        if before is not None:
            if token.token_id is not None and repr(before) != repr(made):
                fresh.append(made)  # the flags of the newer file win
        elif tokenizer.token_to_id(token.content) is not None:
            fresh.append(made)
        elif (wanted := next_id if token.token_id is None else token.token_id) >= next_id and wanted < files.num_ids:
            fresh += [LibraryToken(f"<|reserved_token_{i}|>", special=True) for i in range(next_id, wanted)]
            fresh.append(made)
            next_id = wanted + 1
    if fresh:
        tokenizer.add_tokens(fresh)
    return _set_prefix_space(tokenizer, files.add_prefix_space) or bool(fresh)


class _File(msgspec.Struct):
    added_tokens: list[dict[str, Any]] = []
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"")


def may_change(text: str, files: TextFiles) -> bool:
    """Whether `complete` may change the tokenizer of this text; much faster than to make the tokenizer."""
    found = msgspec.json.decode(text, type=_File)
    known = {one.get("content"): one for one in found.added_tokens}
    for token in files.added:
        entry = known.get(token.content)
        if entry is None:
            return True
        wanted = {"special": token.special, **_flags(token)}
        if token.token_id is not None and any(entry.get(name, False) != value for name, value in wanted.items()):
            return True
    spaces = {one == b"true" for one in _PREFIX_SPACE.findall(bytes(found.pre_tokenizer))}
    return files.add_prefix_space is not None and bool(spaces - {files.add_prefix_space})


_PREFIX_SPACE = re.compile(rb'"add_prefix_space"\s*:\s*(true|false)')


def _added_ids(tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.get_added_tokens_decoder())


def _flags(token: AddedToken) -> dict[str, bool]:
    return {"normalized": not token.special, **token.flags}


def _set_prefix_space(tokenizer: Tokenizer, wanted: bool | None) -> bool:
    """Set whether a text begins as if there were a space before it, in every byte-level part."""
    from tokenizers.pre_tokenizers import ByteLevel, Sequence

    if wanted is None:
        return False
    whole: Any = tokenizer.pre_tokenizer
    parts: list[Any] = [whole]
    if isinstance(whole, Sequence):
        parts = [whole[i] for i in range(len(cast(list[Any], whole)))]
    odd = [part for part in parts if isinstance(part, ByteLevel) and part.add_prefix_space != wanted]
    for part in odd:
        part.add_prefix_space = wanted
    return bool(odd)
