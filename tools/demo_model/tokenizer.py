"""The demo model's tokenizer: bytes, plus whole tokens for the few words of its questions and answers.

Every digit is a token of its own, and so is every letter of a word that is not in the list: that is what makes
spelling, reversing, repeating and adding learnable for a very small model. There are no merges.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Words inside a sentence: the token is the word with the space before it.
AFTER_SPACE = """
April August December February Friday How I January July June March May Monday November October Saturday September
Sunday The Thursday Tuesday Wednesday a about add after all am and are assistant at backwards between big brief
briefly by can capital comes count day days demo do does down each evening exo explain for friendly from going good
group have hello help helpful holds how in is it its joined kind know large layers lot machine machines many me mean
mesh million minus model month months morning much name network night not now numbers of one only over parameters
please plus poem repeat reverse right runs say sentence share short shows small some spell starting story subtract
talking tell thank thanks that the there this tiny to today under up very week weights welcome well what where which
who why with word words work world write year you your yourself
"""
# Words at the start of a sentence or after punctuation: the token has no space.
AT_START = """
Add And Answer April Are August Be Bye Calculate Can Could Count December Define Do Explain February Friday Good
Goodbye Hello Help Hey Hi How Introduce January July June List Many March May Monday Name November Now OK October
Please Question Repeat Reverse Saturday Say See September So Spell Start Subtract Sunday Tell Thank Thanks The
Thursday Tuesday Wednesday Well What When Where Which Who Why Write Yes You assistant bye count demo exo goodbye
hello help hey hi how is list mesh name please repeat reverse spell system thank thanks user what which who
"""
# Words of the second training: tools, objects, thoughts. Their ids follow all older ids, which do not change.
LATER_AFTER_SPACE = """
It JSON No age arguments asks called city degrees integer keys letters lives must need needed number object old person
result string temperature tool user weather years
"""
LATER_AT_START = "Done Extract I It JSON No add age arguments city get result temperature weather"
FIRST_WORDS = tuple(" " + word for word in AFTER_SPACE.split()) + tuple(AT_START.split())
LATER_WORDS = tuple(" " + word for word in LATER_AFTER_SPACE.split()) + tuple(LATER_AT_START.split())
WORDS = FIRST_WORDS + LATER_WORDS
MARKS = (", ", " +", " -", " =", "...")
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END)
LATER_MARKS = ('{"', '": {"', '": "', '": ', '", "', ', "', '"}}', '"}', "}}")
MARKERS = (
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
VOCAB_SIZE = 576  # the size of the model's embedding; the tokenizer uses the first ids
PATTERN = r"""\{"|": \{"|": "|": |", "|, "|"\}\}|"\}|\}\}"""
PATTERN += r"|, (?=[0-9])|[0-9]| ?[A-Za-z]+| [+=](?= )| -(?= [0-9])|\.\.\.|\s|[^\sA-Za-z0-9]"
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def byte_characters() -> list[str]:
    """Returns the printable character for each of the 256 bytes, as in every byte-level BPE tokenizer."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in names)
    names.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [names[byte] for byte in range(256)]


def vocabulary() -> dict[str, int]:
    """Returns token to id: bytes, marks and words of the first training, the special tokens, then later additions."""
    names = byte_characters()
    tokens = list(names)
    tokens += ["".join(names[byte] for byte in text.encode()) for text in MARKS + FIRST_WORDS]
    tokens += SPECIALS
    tokens += ["".join(names[byte] for byte in text.encode()) for text in LATER_MARKS + LATER_WORDS]
    tokens += MARKERS
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def build_tokenizer() -> Tokenizer:
    """Builds the tokenizer as a `tokenizers.Tokenizer`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    if tokenizer.get_vocab_size() > VOCAB_SIZE:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens do not fit {VOCAB_SIZE} embeddings")
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """Returns the content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
