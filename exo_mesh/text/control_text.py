"""Keeps the texts of a request from becoming control tokens, such as `<|im_end|>`, when a prompt is encoded.

A chat template joins texts of the request with control tokens, and a tokenizer sees no difference between the two. So a
control token that a text spells is marked before the template runs: random digits are put into it, and taken out of the
prompt again. In between, the control tokens that the prompt still has are those of the template. They alone are encoded
as control tokens, by a second tokenizer in which these tokens have secret names. All else is as in the first, which
therefore encodes every prompt without marks.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING

import msgspec

from exo_mesh.base.printable import quoted, random_digits
from exo_mesh.errors import InputError
from exo_mesh.text.token_table import AddedEntry, TokenTable

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

SLICE_LENGTH = 1 << 16
"""Characters that are searched at a time."""

MAX_EDGE = 64
"""Longest part of a control token that is looked for at the ends of a text."""

MAX_ROUNDS = 16
"""How often a text is searched again for tokens that appear when others are broken up; usually once."""

MAX_OPENINGS = 64
"""With more beginnings than these, a text is searched at once; the tokenizers of the hub have at most some ten."""

MAX_NAMED = 4
"""Most control tokens that an error names."""

_OPENINGS = ("<|", "<｜")
"""How added tokens begin that are control tokens although the tokenizer does not call them special, as in Qwen."""

_WORD, _EDGE = re.compile(r"\w"), re.compile(r"[^\w\s]")


def _is_marker(content: str) -> bool:
    """Whether this has the form of any marker. What a template writes has other added tokens as well: words, and white
    space. One expression for the whole form would take time in proportion to the square of the length."""
    is_framed = len(content) > 2 and _EDGE.match(content[0]) is not None and _EDGE.match(content[-1]) is not None
    return is_framed and "\n" not in content and _WORD.search(content, 1, len(content) - 1) is not None


class ChatPrompt(msgspec.Struct, frozen=True):
    """A rendered prompt. mark: the digits in control tokens that texts of the request spell; "" if there are none."""

    marked: str
    mark: str = ""

    @property
    def text(self) -> str:
        return self.marked.replace(self.mark, "") if self.mark else self.marked


class ControlTexts:
    """The control tokens of one tokenizer: finds them in texts, and encodes prompts in which some are only text.

    Safe to use from several threads. All methods block.
    """

    def __init__(self, tokenizer: Tokenizer | TokenTable, markers: Collection[str], written: str) -> None:
        """tokenizer: with a table, tokens in texts can be ruled out, but not found. markers: added tokens that the
        output format uses; written: what the chat template writes. An added token
        that is not special is a control token if it is in one of these, or begins like one. Any other is vocabulary,
        such as runs of spaces, words, or tags of HTML in Gemma, and so is a single character."""
        self._tokenizer = tokenizer
        self._added: Mapping[int, AddedToken | AddedEntry] = {
            token_id: token for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.content
        }
        self._controls = {
            token_id: token.content
            for token_id, token in self._added.items()
            if len(token.content) > 1
            and (
                token.special
                or token.content in markers
                or token.content.startswith(_OPENINGS)
                or (_is_marker(token.content) and token.content in written)
            )
        }
        contents = self._controls.values()
        self._longest = max(map(len, contents), default=0)
        self._openings = frozenset(content[:2] for content in contents)
        self._firsts = frozenset(opening[0] for opening in self._openings)
        self._endings = frozenset(content[-2:] for content in contents)
        self._sorted = sorted(content for content in contents if len(content) <= MAX_EDGE)
        self._reversed = sorted(content[::-1] for content in self._sorted)
        has_forms = tokenizer.normalizer is not None and any(self._added[one].normalized for one in self._controls)
        self._is_slow_to_rule_out = has_forms or len(self._openings) > MAX_OPENINGS
        self._lock = Lock()
        self._finder: tuple[Tokenizer, dict[int, str]] | None = None
        self._apart: _Apart | None = None

    def may_spell(self, text: str) -> bool:
        """Whether the text must be searched for control tokens with the tokenizer."""
        if self._is_slow_to_rule_out:
            return True
        if len(text) <= SLICE_LENGTH:
            # single characters are found ten times as fast
            return any(first in text for first in self._firsts) and any(one in text for one in self._openings)
        # a search holds up all other threads of the process, so it is done in parts, which share a character
        starts = range(0, len(text), SLICE_LENGTH - 1)
        return any(self.may_spell(text[start : start + SLICE_LENGTH]) for start in starts)

    def marked_apart(self, text: str, mark: str) -> str:
        """A text that spells no control token, with the mark at an end where it could become one with another text."""
        return self._with_marked_ends(text, mark)

    def marked(self, text: str, mark: str, allowed: Collection[str] = ()) -> str:
        """The text with the mark in every control token that it spells, but for those allowed, and at an end where it
        could become one together with another text. Between two characters there is at most one mark, which bounds the
        length of the result. Raises the errors of the tokenizers library, and InputError if this tokenizer finds the
        tokens in spite of the marks."""
        made = self.marked_within(sys.maxsize, text, mark, allowed)
        assert made is not None
        return made

    def marked_within(self, limit: int, text: str, mark: str, allowed: Collection[str]) -> str | None:
        """Marks a text as `marked` does; returns None if the marks make it longer than `limit` characters."""
        for _ in range(MAX_ROUNDS):
            made = self._with_marks(text, mark, allowed)
            if made == text:
                return self._with_marked_ends(text, mark)
            if len(made) > limit:
                return None
            text = made  # where one token is broken up, another one may appear
        raise _inseparable(content for _, content in self._found(text) if content not in allowed)

    def _with_marks(self, text: str, mark: str, allowed: Collection[str]) -> str:
        if not self.may_spell(text):
            return text
        places: set[int] = set()
        for start in range(0, len(text), SLICE_LENGTH):
            part = text[start : start + SLICE_LENGTH + self._longest]
            found = [(place, content) for place, content in self._found(part) if content not in allowed]
            if whole := [content for place, content in found if len(place) < 2 or _meets(part, place, mark)]:
                raise _inseparable(whole)
            places.update(start + place.start + 1 for place, _ in found)
        pieces, end = [], 0
        for place in sorted(places):
            pieces += [text[end:place], mark]
            end = place
        return "".join([*pieces, text[end:]])

    def encode(self, prompt: ChatPrompt) -> list[int]:
        """Encode a prompt with marks. Raises InputError if this tokenizer cannot keep text and control tokens apart."""
        with self._lock:
            if self._apart is None:
                assert not isinstance(self._tokenizer, TokenTable), "a process encodes with it"
                self._apart = _Apart(self._tokenizer, self._added, self._controls)
        pieces, end, num_found = [], 0, 0
        for place, content in self._found(prompt.marked):
            if _meets(prompt.marked, place, prompt.mark):
                raise _inseparable([content])
            pieces += [prompt.marked[end : place.start], self._apart.secrets[content]]
            end, num_found = place.stop, num_found + 1
        return self._apart.encode("".join([*pieces, prompt.marked[end:]]), prompt.mark, num_found)

    def _found(self, text: str) -> Iterator[tuple[range, str]]:
        """The control tokens in a text as the tokenizer finds them: the place of each, without white space around it,
        and its content. A tokenizer with a normalizer finds some that are written in another way."""
        finder, controls = self._ready_finder()
        encoding = finder.encode(text, add_special_tokens=False)
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if (content := controls.get(token_id)) is not None:
                span = text[start:stop]
                found = content if content in span else span.strip()
                first = start + span.index(found)
                yield range(first, first + len(found)), content

    def _ready_finder(self) -> tuple[Tokenizer, dict[int, str]]:
        """A tokenizer that makes one token of all text between added tokens, and the control tokens by its ids."""
        from tokenizers import Tokenizer, models

        with self._lock:
            if self._finder is None:
                assert not isinstance(self._tokenizer, TokenTable), "a process finds tokens with it"
                finder = Tokenizer(models.WordLevel({"\0": 0}, unk_token="\0"))
                finder.normalizer = self._tokenizer.normalizer
                finder.add_special_tokens(list(self._added.values()))  # one call: each one builds the matcher again
                ids = {_id_in(finder, content): content for content in self._controls.values()}
                self._finder = finder, ids
            return self._finder

    def _with_marked_ends(self, text: str, mark: str) -> str:
        head, tail = text[:MAX_EDGE], text[-MAX_EDGE:]
        sizes = range(2, len(head) + 1)
        ends = ((head, self._endings), (tail, self._openings))
        may_end, may_begin = (any(map(part.__contains__, pairs)) for part, pairs in ends)
        if may_end and any(_begins_one(self._reversed, head[:size][::-1]) for size in sizes):
            text = mark + text
        if may_begin and any(_begins_one(self._sorted, tail[-size:]) for size in sizes):
            text += mark
        return text


class _Apart:
    """A tokenizer with the model of another one, in which control tokens have secret names."""

    def __init__(
        self, tokenizer: Tokenizer, added: Mapping[int, AddedToken | AddedEntry], controls: Mapping[int, str]
    ) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._tokenizer = Tokenizer(tokenizer.model)  # shares the vocabulary, so it is small
        self._tokenizer.normalizer = tokenizer.normalizer
        self._tokenizer.pre_tokenizer = tokenizer.pre_tokenizer
        secret = random_digits()  # one for all: tokens that begin alike take less memory and time
        self.secrets: dict[str, str] = {}
        renamed: dict[int, AddedToken] = {}
        for token_id, token in added.items():
            content = token.content
            if token_id in controls:
                # the same first and last character, which the rules for whole words look at
                content = f"{content[0]}{secret}{len(self.secrets):06}{content[-1]}"
                self.secrets[token.content] = content
            renamed[token_id] = AddedToken(
                content,
                single_word=token.single_word and token_id not in controls,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
        self._tokenizer.add_tokens(list(renamed.values()))  # one call: each one builds the matcher again
        self._ids = {_id_in(self._tokenizer, token.content): token_id for token_id, token in renamed.items()}
        self._controls = controls
        self._vocabulary_ids = controls.keys() - self._ids.keys()  # of control tokens that the model knows as words
        self._renamed = frozenset(_id_in(self._tokenizer, secret) for secret in self.secrets.values())
        self._seam = f"<{random_digits()}>"
        self._tokenizer.add_special_tokens([AddedToken(self._seam, normalized=False, special=True)])
        self._seam_id = _id_in(self._tokenizer, self._seam)

    def encode(self, marked: str, mark: str, num_controls: int) -> list[int]:
        """Encode a prompt whose control tokens have their secret names. num_controls: how many it has."""
        ids = self._encoded(marked.replace(mark, ""))
        if not self._vocabulary_ids.isdisjoint(ids):  # the model itself made a control token of a text, as Unigram may
            ids = self._encoded(marked.replace(mark, self._seam))
        if not self._vocabulary_ids.isdisjoint(ids) or sum(map(self._renamed.__contains__, ids)) != num_controls:
            raise _inseparable(self._controls[token_id] for token_id in ids if token_id in self._vocabulary_ids)
        return [self._ids.get(token_id, token_id) for token_id in ids if token_id != self._seam_id]

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _inseparable(contents: Iterable[str]) -> InputError:
    """The refusal of a text that spells some of these control tokens; none if it is unknown which."""
    named = ", ".join(quoted(content) for content in [*dict.fromkeys(contents)][:MAX_NAMED])
    tokens = f"a control token ({named})" if named else "a control token"
    message = f"a text spells {tokens}, which this model's tokenizer cannot encode as text; remove it from the message"
    return InputError(message, param="messages")


def _meets(text: str, place: range, mark: str) -> bool:
    """Whether a control token has a part of a mark. Marks in marks would make a text longer in each round."""
    return mark in text[max(0, place.start - len(mark) + 1) : place.stop + len(mark) - 1]


def _id_in(tokenizer: Tokenizer, content: str) -> int:
    """The id of a token that was added to a tokenizer."""
    found = tokenizer.token_to_id(content)
    assert found is not None
    return found


def _begins_one(contents: Sequence[str], part: str) -> bool:
    """Whether one of the sorted contents begins with this part and is longer."""
    place = bisect_left(contents, part)
    found = contents[place : place + 2]
    return any(content.startswith(part) and content != part for content in found)
