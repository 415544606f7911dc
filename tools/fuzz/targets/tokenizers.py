"""Tokenizers that grow: a few characters, or one token, become millions, in each part of tokenizer.json. Added tokens
that overlap, and files of millions of values."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tools.fuzz.models import Edit, ask_all, edit_json, hostile_models
from tools.fuzz.rig import Rig

COUNT, NUM_NODES, CLOSED = 10, 1, False
FLAGS = ("--discovery", "none", "--models-dir", "DIRECTORY/models")

MAX_NODE_SHARE = 1.5

RARE = ("a", " ", "\u0130", "\ufdfa", "\u1e9e", "\U0001f468\u200d\U0001f469", "\u0f77", "\x00", "é")
"""Characters of which some libraries make several, and usual ones."""


def _step(rng: random.Random, char: str, factor: int) -> dict[str, Any]:
    pattern = rng.choice(({"String": char}, {"Regex": "." if rng.random() < 0.3 else "[" + char + "]"}))
    return {"type": "Replace", "pattern": pattern, "content": char * factor}


def _grown(rng: random.Random, char: str) -> list[dict[str, Any]]:
    """Steps that make between 10^4 and 10^10 characters of one."""
    factor = rng.choice((2, 10, 100))
    num_steps = {2: rng.randint(14, 33), 10: rng.randint(4, 10), 100: rng.randint(2, 5)}[factor]
    return [_step(rng, char, factor) for _ in range(num_steps)]


def grown_normalizer(rng: random.Random, model: Path) -> None:
    char = rng.choice(RARE)
    steps = _grown(rng, char)
    steps += rng.choice(([], [{"type": "NFKD"}] * rng.choice((1, 500)), [{"type": "Prepend", "prepend": char * 10**6}]))
    edit_json(model / "tokenizer.json", lambda d: d.update(normalizer={"type": "Sequence", "normalizers": steps}))


def grown_decoder(rng: random.Random, model: Path) -> None:
    steps = [*_grown(rng, rng.choice((" ", "a", "Ġ"))), {"type": "Fuse"}]
    edit_json(model / "tokenizer.json", lambda d: d.update(decoder={"type": "Sequence", "decoders": steps}))


def added_tokens(rng: random.Random, model: Path) -> None:
    number, length = rng.choice(((200_000, 5), (20_000, 500), (3, 5_000_000), (1000, 1)))

    def change(content: dict[str, Any]) -> None:
        flags = {name: rng.random() < 0.5 for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        for index in range(number):
            text = f"{index:x}".rjust(length, rng.choice(RARE[:2]) if length < 100 else "a")
            content["added_tokens"].append({"id": 565 + index, "content": text, **flags})

    edit_json(model / "tokenizer.json", change)


def post_processor(rng: random.Random, model: Path) -> None:
    ids = [rng.choice((505, 2**31, 0))] * rng.choice((10, 1000, 3_000_000))
    special = {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * rng.choice((1, 50)) + [
        {"Sequence": {"id": "A", "type_id": 0}}
    ]
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {"<s>": special}}
    edit_json(model / "tokenizer.json", lambda d: d.update(post_processor=processor))


def merges(rng: random.Random, model: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        inner, char = content["model"], rng.choice("ab0")
        inner["ignore_merges"] = False
        for power in range(rng.choice((4, 12, 20))):  # a, aa, aaaa, ...
            inner["vocab"][char * 2 ** (power + 1)] = 565 + power
            inner["merges"].append([char * 2**power, char * 2**power])
        inner["dropout"] = rng.choice((None, 0.5, 1.0, -1.0))

    edit_json(model / "tokenizer.json", change)


def pre_tokenizer(rng: random.Random, model: Path) -> None:
    regex = rng.choice(("(a|aa)+$", "(.*a){25}$", "(?=(a+))*b", "", "a{1,1000}{1,1000}"))
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": rng.random() < 0.5}
    edit_json(
        model / "tokenizer.json", lambda d: d["pre_tokenizer"].update(pretokenizers=[split] * rng.choice((1, 99)))
    )


def nested(rng: random.Random, model: Path) -> None:
    part, key = rng.choice((("normalizer", "normalizers"), ("decoder", "decoders")))
    depth, text = rng.choice((50, 5000)), f'{{"type":"Sequence","{key}":['
    file = model / "tokenizer.json"
    deep = text * depth + "]}" * depth
    file.write_text(file.read_text().replace(f'"{part}":', f'"{part}":{deep},"{part}_before":', 1))


def truncated(rng: random.Random, model: Path) -> None:
    file = model / "tokenizer.json"
    content = file.read_bytes()
    file.write_bytes(rng.choice((content[: rng.randrange(len(content))], b"[" * 10**6, b"{}", b"null", b"")))


def overlapping(rng: random.Random, model: Path) -> None:
    """Adds tokens that begin one another, are parts of one another, or are of digits, as the marks in texts are; or of
    which the normalizer leaves nothing."""
    chars, most = rng.choice(("a ", " ", "0123456789", "a0", "<|a>")), rng.choice((2, 4, 200, 900))
    drawn = ("".join(rng.choices(chars, k=rng.randint(1, most))) for _ in range(rng.choice((3, 30, 1000))))

    def change(content: dict[str, Any]) -> None:
        for index, text in enumerate(dict.fromkeys(drawn)):
            flags = {name: rng.random() < 0.5 for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            content["added_tokens"].append({"id": 565 + index, "content": text, **flags})
        content["normalizer"] = rng.choice(
            (None, {"type": "NFKC"}, _step(rng, "a", 1), _step(rng, "1", 2), _step(rng, rng.choice("a0 "), 0))
        )

    edit_json(model / "tokenizer.json", change)


def values(rng: random.Random, model: Path) -> None:
    """Adds up to 10 million values that nobody needs: numbers, texts, lists, or names."""
    place, value = rng.choice(("{", '"model": {', '"added_tokens": [{', '"vocab": {')), rng.choice(("0", '""', "[[]]"))
    number = rng.choice((10**5, 10**6, 10**7))
    many = f"[{','.join([value] * number)}]"
    names = "{" + ",".join(f'"{index:x}":0' for index in range(number // 4)) + "}"
    file = model / "tokenizer.json"
    file.write_text(file.read_text().replace(place, f'{place}"more": {rng.choice((many, names))},', 1))


EDITS: dict[str, Edit] = {
    "normalizer": grown_normalizer, "decoder": grown_decoder, "added": added_tokens, "post": post_processor,
    "merges": merges, "pre": pre_tokenizer, "nested": nested, "truncated": truncated,
    "overlapping": overlapping, "values": values,
}  # fmt: skip


def prepared(directory: Path, seed: int, numbers: Sequence[int]) -> AbstractContextManager[dict[str, str]]:
    return hostile_models(directory, seed, numbers, EDITS)


def body(_: str, rng: random.Random) -> dict[str, Any]:
    """Returns a short text of characters that the tokenizers make much of."""
    text = "".join(rng.choice(RARE[:3] + RARE[8:]) for _ in range(rng.choice((1, 20, 300))))
    return {"messages": [{"role": "user", "content": text + "aaaaaaaaaaaaaaaaaaaaaaaaaaaa"}]}


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Asks for each model once."""
    return Counter(await ask_all(rig, body))
