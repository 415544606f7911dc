"""Estimates the size of a model that no peer has, from its card: the parameters and bits that its id names. Pure."""

from __future__ import annotations

import re

from exo_mesh.models.cards.toml_card import TomlCard

_COUNT = re.compile(r"(?<![\dA-Za-z.])r?(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z\d])", re.IGNORECASE)
"""A number of parameters in an id: 0.6B, 135M, 8x7B, r7b. Not A3B, which a token uses, and not E2B, which are in
memory."""

_EXPERTS = re.compile(r"-\d+E(-|$)", re.IGNORECASE)
"""Beside a number of experts, as in 17B-16E, the id names the parameters that a token uses."""

_SHARED = 0.82
"""Parameters of NxMB models, as a part of N times M: the experts share attention and embeddings."""

_BITS = (
    ("mxfp4", 4.25), ("mxfp8", 8.25), ("nvfp4", 4.5), ("fp8", 8.0), ("bf16", 16.0), ("fp16", 16.0), ("f16", 16.0),
    ("1bit", 1.5), ("2bit", 2.5), ("3bit", 3.5), ("4bit", 4.5), ("5bit", 5.5), ("6bit", 6.5), ("8bit", 8.5),
    ("awq", 4.5), ("gptq", 4.5), ("int4", 4.5), ("int8", 8.0),
)  # fmt: skip
"""Bits of a weight by the words of ids and cards; MLX adds a scale and an offset of 16 bits for each 64 weights."""

_PLAIN_BITS = 16.0
_OF_ARCHITECTURE = {
    "gpt_oss": 4.25, "deepseek_v3": 8.0, "deepseek_v32": 8.0, "deepseek_v4": 4.5, "kimi_k2": 8.0, "kimi_k25": 4.5,
    "minimax_m2": 8.0,
}  # fmt: skip
"""Bits of families whose publishers quantise them, for cards that do not say it."""


def estimated_bytes(card: TomlCard) -> int:
    """About how many bytes the weights have; 0 if neither the card nor its id says it."""
    if card.storage_size is not None:
        return card.storage_size
    parameters = card.parameters_billions or _named(card.id) or _named(card.base_model or "")
    return round(parameters * 1e9 * _bits(card) / 8)


def _named(model: str) -> float:
    """The billions of parameters that an id names; 0 if it names none."""
    name = model.rpartition("/")[2]
    found = [] if _EXPERTS.search(name) else _COUNT.findall(name)
    sizes = [
        float(number) * (int(times) * _SHARED if times else 1) / (1000 if unit in "mM" else 1)
        for times, number, unit in found
    ]
    return max(sizes, default=0.0)


def _bits(card: TomlCard) -> float:
    words = f"{card.quantization or ''} {card.id}".lower()
    found = next((bits for word, bits in _BITS if word in words), None)
    return found if found is not None else _OF_ARCHITECTURE.get(card.architecture or "", _PLAIN_BITS)
