"""Texts of a request never become control tokens, and all else is encoded as if there were no guard."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from exo_mesh.base.printable import random_digits
from exo_mesh.errors import InputError
from exo_mesh.text.control_text import SLICE_LENGTH, ChatPrompt, ControlTexts
from exo_mesh.text.detokenizer import is_panic
from exo_mesh.text.rendering import CompiledTemplate
from exo_mesh.text.text_guard import TextGuard
from tests.text.chat_templates import TEMPLATES
from tests.text.text_models import byte_fallback, byte_level, word_piece

CONTROLS = ("<|im_start|>", "<|im_end|>", "</s>", "[INST]", "<think>", "</think>", "<|a|>", "<|a|>b|>")
MARK = "00000000001111111111"


def with_controls(make: Callable[[], Tokenizer], **flags: bool) -> Tokenizer:
    tokenizer = make()
    for content in CONTROLS:
        is_special = "think" not in content
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([AddedToken(content, special=is_special, **{"normalized": False, **flags})])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "   ", "word", "<b>")])
    return tokenizer


def metaspace() -> Tokenizer:
    """As newer conversions of Llama 2: a space before the first word of a prompt only."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def unigram() -> Tokenizer:
    """As T5: control tokens are pieces of the model, too, so a text that spells one becomes it even without the rule
    for added tokens."""
    pieces = [("<unk>", 0.0), *((text, 0.0) for text in CONTROLS), *((c, -5.0) for c in "abdehimnosu_t</>|[INST]§▁x")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def lower_case() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: with_controls(byte_level),
    "strips": lambda: with_controls(byte_level, lstrip=True, rstrip=True),
    "whole words": lambda: with_controls(byte_level, single_word=True),
    "byte fallback": lambda: with_controls(byte_fallback),
    "byte fallback, normalized": lambda: with_controls(byte_fallback, normalized=True),
    "metaspace": lambda: with_controls(metaspace),
    "word piece": lambda: with_controls(word_piece),
    "unigram": lambda: with_controls(unigram),
    "lower case, normalized": lambda: with_controls(lower_case, normalized=True),
}


@cache
def controls_of(name: str) -> tuple[Tokenizer, ControlTexts]:
    tokenizer = TOKENIZERS[name]()
    return tokenizer, ControlTexts(tokenizer, ("<think>", "</think>"), "")


NEIGHBOURS = ("whole words", "byte fallback, normalized")
"""Tokenizers in which what is beside a control token of the template can make it a text."""

TEXTS = st.lists(
    st.sampled_from([*CONTROLS, "<|", "im_end", "|>", "<", ">", "</", "s", "a", " ", "  ", "\n\n", "word", "<b>", "§",
                     "[IN", "ST]", "Hello, world", "é", "🙂", "<|IM_END|>", "＜|im_end|＞", "1"])
    | st.text(max_size=4),
    max_size=8,
).map("".join)  # fmt: skip


def check_equal_without_marks(name: str, text: str) -> None:
    tokenizer, controls = controls_of(name)
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    assert controls.encode(ChatPrompt(text, MARK)) == plain


@cache
def compiled(name: str) -> CompiledTemplate:
    return CompiledTemplate.compile(TEMPLATES[name], name)


def check_a_conversation(name: str, template: str, texts: list[str]) -> None:
    """A template with texts between its control tokens."""
    tokenizer, controls = controls_of(name)
    ids = {tokenizer.token_to_id(content) for content in CONTROLS}
    try:
        marked, mark = rendered(template, texts, TextGuard(controls.marked, random_digits()))
        plain, _ = rendered(template, texts, TextGuard())
    except InputError:
        return
    prompt = ChatPrompt(marked, mark)
    whole = tokenizer.encode(plain, add_special_tokens=False).ids
    made = controls.encode(prompt) if mark else whole
    without, _ = rendered(template, ["x"] * len(texts), TextGuard())
    written = tokenizer.encode(without, add_special_tokens=False).ids
    if name in NEIGHBOURS:
        assert sum(one in ids for one in made) <= sum(without.count(content) for content in CONTROLS)
        return
    assert [one for one in made if one in ids] == [one for one in written if one in ids]
    is_same = prompt.text == plain  # else the template looked for a marker in the text
    if is_same and [one for one in whole if one in ids] == [one for one in written if one in ids]:
        assert made == whole


def rendered(template: str, texts: list[str], guard: TextGuard) -> tuple[str, str]:
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = []
    for index, text in enumerate(texts):
        said = guard.text(text)
        content: Any = [{"type": "text", "text": said}] if "parts" in template else said
        messages.append({"role": roles[index % 2], "content": content})
    return compiled(template).render(messages), guard.mark


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=20, deadline=None)
@given(text=TEXTS)
def test_a_text_without_marks_has_the_ids_of_the_first_tokenizer(name: str, text: str) -> None:
    check_equal_without_marks(name, text)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=15, deadline=None)
@given(template=st.sampled_from(sorted(TEMPLATES)), texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_only_the_template_writes_control_tokens(name: str, template: str, texts: list[str]) -> None:
    check_a_conversation(name, template, texts)


@pytest.mark.extended
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(text=TEXTS, template=st.sampled_from(sorted(TEMPLATES)), texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_the_same_for_many_texts(name: str, text: str, template: str, texts: list[str]) -> None:
    check_equal_without_marks(name, text)
    check_a_conversation(name, template, texts)


def test_a_control_token_that_two_texts_spell_together_is_a_text() -> None:
    tokenizer, controls = controls_of("byte level")
    for cut in range(2, len("<|im_end|>") - 1):
        guard = TextGuard(controls.marked, MARK)
        prompt = ChatPrompt(guard.text("hi <|im_end|>"[: 3 + cut]) + guard.text("<|im_end|> you"[cut:]), guard.mark)
        assert prompt.text == "hi <|im_end|> you"
        assert tokenizer.token_to_id("<|im_end|>") not in controls.encode(prompt)


def test_control_tokens_are_found_wherever_they_are_in_a_long_text() -> None:
    _, controls = controls_of("byte level")
    for place in range(SLICE_LENGTH - 12, SLICE_LENGTH + 3):
        text = "x" * place + "<|im_end|>" + "y" * SLICE_LENGTH
        assert controls.marked(text, MARK) == text.replace("<|im", f"<{MARK}|im")


@pytest.mark.parametrize("text", ["<|a|>", " <|a|> ", "|a|>", "<<|a|>|a|>"])
def test_a_control_token_inside_another_one_is_found_too(text: str) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in ("<|a|>", "|a|>", " <|a|> ", "a|>")])
    controls = ControlTexts(tokenizer, (), "")
    guard = TextGuard(controls.marked, MARK)
    prompt = ChatPrompt("<|im_start|>" + guard.text(text), guard.mark)
    made = controls.encode(prompt)
    assert (
        made[0] == tokenizer.token_to_id("<|im_start|>") and not tokenizer.get_added_tokens_decoder().keys() & made[1:]
    )
    assert controls.encode(ChatPrompt(text, MARK)) == tokenizer.encode(text).ids


def test_a_tokenizer_that_overlooks_the_marks_is_no_reason_to_search_for_ever() -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Replace(Regex(r"\d"), "")
    tokenizer.add_special_tokens([AddedToken("<|a|>", normalized=True)])
    with pytest.raises(InputError, match=r"a control token \(.<\|a\|>.\), which .* cannot encode as text"):
        ControlTexts(tokenizer, (), "").marked("x <|a|>", MARK)


ODD_CONTENTS = st.sampled_from(["a", "b", "0", "1", "7", "<", " ", "\u2474", "é"]).flatmap(
    lambda first: st.text(f"{first}a01 <", max_size=4).map(lambda rest: first + rest)
)
ODD_TOKENS = st.lists(
    st.builds(
        AddedToken,
        ODD_CONTENTS,
        **{flag: st.booleans() for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")},
    ),
    min_size=1,
    max_size=30,
)
ODD_NORMALIZERS = st.sampled_from([
    None, normalizers.NFKC(), normalizers.Replace(Regex(r"\d"), ""), normalizers.Replace("1", "<a0>"),
    normalizers.Replace("a", " "), normalizers.Lowercase(),
])  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(tokens=ODD_TOKENS, normalizer=ODD_NORMALIZERS, text=st.text("ab017<> \u2474é", max_size=40), data=st.data())
def test_a_text_gets_at_most_one_mark_between_two_characters(
    tokens: list[AddedToken], normalizer: Any, text: str, data: st.DataObject
) -> None:
    # the library does not come back from some texts if nothing is left of a token: such tokenizers run in a child
    assume(not (normalizer and any(one.normalized and not normalizer.normalize_str(one.content) for one in tokens)))
    tokenizer = byte_level()
    tokenizer.normalizer = normalizer
    tokenizer.add_tokens(tokens)
    controls = ControlTexts(tokenizer, (), "")
    text += data.draw(st.sampled_from(tokens)).content * 3
    mark = random_digits()
    try:
        marked = controls.marked(text, mark)
        assert len(marked) <= len(text) + (len(text) + 1) * len(mark)
        assert marked.replace(mark, "") == text
        made = controls.encode(ChatPrompt(marked, mark))
    except InputError:
        return
    except BaseException as exc:
        if not is_panic(exc):
            raise
        return  # the library panics at a few tokens that strip or become nothing; see TextModel
    controls_by_id = {
        number
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and len(token.content) > 1
    }
    assert not controls_by_id & {*made}


def test_a_mark_that_spells_control_tokens_is_refused_at_once() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([f"{number:x}" for number in range(1000)])
    controls = ControlTexts(tokenizer, (), "")
    with pytest.raises(InputError, match="cannot encode as text"):
        controls.marked("aaaa" * 8, random_digits())
    with pytest.raises(InputError, match="cannot encode as text"):
        controls.encode(ChatPrompt(f"Hi{MARK}", MARK))
    assert controls.marked("zzzz", MARK) == "zzzz"


def test_a_text_that_marks_make_too_long_is_left_to_a_process() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["aa"])
    controls = ControlTexts(tokenizer, (), "")
    assert controls.marked_within(5000, "aa" * 1000, MARK, ()) is None
    assert controls.marked_within(5000, "b" * 10_000, MARK, ()) == "b" * 10_000
    assert controls.marked("aaa", MARK) == f"a{MARK}a{MARK}a"


def test_the_form_of_a_marker_is_found_in_time_proportional_to_its_length() -> None:
    """2,000 tokens of 1,024 characters took 13 s with one regular expression for the whole form."""
    tokenizer = byte_level()
    tokenizer.add_tokens([f"<{number:05}" + "a" * 1018 for number in range(400)])
    before = time.thread_time()
    ControlTexts(tokenizer, (), "")
    assert time.thread_time() - before < 1, "it took 2.6 s"


def test_words_spaces_and_tags_that_were_added_to_the_vocabulary_are_no_control_tokens() -> None:
    _, controls = controls_of("byte level")
    text = "a word   with\n\nspaces and <b>tags</b>"
    assert controls.marked(text, MARK) == text


@pytest.mark.parametrize(("written", "number"), [("", 0), ("user\n<end_of_turn>\n", 1)])
def test_an_added_token_that_the_template_writes_is_a_control_token(written: str, number: int) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<end_of_turn>", "user", "\n"])
    assert ControlTexts(tokenizer, (), written).marked("user\n<end_of_turn>", MARK).count(MARK) == number


class CountsAdding:
    """A tokenizer that counts the calls that add tokens."""

    calls = 0

    def __init__(self, model: Any) -> None:
        self.__dict__["made"] = Tokenizer(model)

    def __getattr__(self, name: str) -> Any:
        CountsAdding.calls += name.startswith("add_")
        return getattr(self.__dict__["made"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["made"], name, value)


def test_thousands_of_added_tokens_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call builds the library's matcher again, so a call for each token of Gemma took minutes."""
    tokenizer = with_controls(byte_level)
    added = [AddedToken(f"<unused{i}>", special=i % 2 == 0, normalized=False) for i in range(6400)]
    tokenizer.add_tokens(added)
    monkeypatch.setattr(CountsAdding, "calls", 0)
    monkeypatch.setattr(tokenizers, "Tokenizer", CountsAdding)
    controls = ControlTexts(tokenizer, (), "")
    text = controls.marked("<unused6398><unused6399>", MARK)
    ids = controls.encode(ChatPrompt(f"<unused0>{text}<unused1><|im_end|>", MARK))
    assert CountsAdding.calls <= 3
    number = tokenizer.token_to_id
    assert (ids[0], ids[-3:]) == (
        number("<unused0>"),
        [number(f"<unused{i}>") for i in (6399, 1)] + [number("<|im_end|>")],
    )
    assert number("<unused6398>") not in ids
