"""What must change in the metadata of an architecture when only some of its layers are loaded. Pure.

llama.cpp decides some things by the number of a layer or by the number of layers, and most mistakes there are silent:
the model loads and computes something else. So only architectures in RULES run, and the tool that tries all of the
library's architectures (`python -m tools.llamacpp_architectures`) keeps that list honest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArchRules:
    """How an architecture is cut.

    own_head: llama.cpp's model code does not take the embedding as head. sqrt_scale: rows of the embedding are
    multiplied by the root of the width where tokens come in, and only there. scale_key: the same with a number of the
    metadata, which is switched off in stages. every: a stage may begin only at multiples of it. counted: keys with a
    number of layers from the beginning, which is less in later stages. windows: keys whose default is a window in some
    layers, with the number of layers after which the pattern repeats; written as one flag per layer. last_full: the
    last layer of a period attends to everything (otherwise the first one). recurrent: states of constant size in some
    layers. refused_layers: numbers of layers for which llama.cpp computes with other constants.
    """

    own_head: bool = False
    sqrt_scale: bool = False
    scale_key: str = ""
    every: int = 1
    counted: tuple[str, ...] = ()
    window_period: int = 0
    recurrent: bool = False
    refused_layers: tuple[int, ...] = ()


_DENSE_FIRST = ("leading_dense_block_count",)

RULES: dict[str, ArchRules] = {
    "llama": ArchRules(),
    "qwen2": ArchRules(),
    "qwen3": ArchRules(),
    "qwen3moe": ArchRules(),
    "gemma3": ArchRules(sqrt_scale=True, window_period=6, refused_layers=(62,)),
    "granite": ArchRules(scale_key="embedding_scale"),
    "olmo2": ArchRules(own_head=True, window_period=4),
    "smollm3": ArchRules(every=4),
}
