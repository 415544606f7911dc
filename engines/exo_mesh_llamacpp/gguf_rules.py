"""What must change in the metadata of an architecture when only some of its layers are loaded. Pure.

llama.cpp decides some things by the number of a layer or by the number of layers, and most mistakes there are silent:
the model loads and computes something else. So only architectures in RULES run, and the tool that tries all of the
library's architectures (`python -m tools.architectures llamacpp`) keeps that list honest.
"""

from __future__ import annotations

import msgspec


class ArchRules(msgspec.Struct, frozen=True):
    """How an architecture is cut.

    own_head: llama.cpp's model code does not take the embedding as head. sqrt_scale: rows of the embedding are
    multiplied by the root of the width where tokens come in, and only there. scale_key: the same with a number of the
    metadata, which is switched off in stages. every: a stage may begin only at multiples of it. window_period: number
    of layers after which the pattern of layers with a window repeats, if the file does not say; the last one of a
    period attends to everything. needs_window: every stage must have a layer with a window. recurrent: states of
    constant size in some layers. refused_layers: numbers of layers for which llama.cpp computes with other constants.
    """

    own_head: bool = False
    sqrt_scale: bool = False
    scale_key: str = ""
    every: int = 1
    window_period: int = 0
    needs_window: bool = False
    recurrent: bool = False
    refused_layers: tuple[int, ...] = ()


RULES: dict[str, ArchRules] = {
    "apertus": ArchRules(own_head=True),
    "arcee": ArchRules(),
    "arctic": ArchRules(),
    "baichuan": ArchRules(own_head=True, refused_layers=(40,)),
    "bailingmoe": ArchRules(own_head=True),
    "bailingmoe2": ArchRules(own_head=True),
    "bitnet": ArchRules(),
    "chatglm": ArchRules(),
    "codeshell": ArchRules(own_head=True),
    "cohere2": ArchRules(window_period=4, needs_window=True),
    "cohere2moe": ArchRules(window_period=4, needs_window=True),
    "command-r": ArchRules(),
    "dbrx": ArchRules(own_head=True),
    "deci": ArchRules(),
    "deepseek": ArchRules(),
    "deepseek2": ArchRules(refused_layers=(26, 27, 48)),
    "dots1": ArchRules(own_head=True),
    "ernie4_5": ArchRules(),
    "ernie4_5-moe": ArchRules(),
    "exaone": ArchRules(),
    "exaone-moe": ArchRules(own_head=True, window_period=4, needs_window=True),
    "exaone4": ArchRules(window_period=4, refused_layers=(64,)),
    "falcon": ArchRules(),
    "falcon-h1": ArchRules(recurrent=True),
    "gemma3": ArchRules(sqrt_scale=True, window_period=6, refused_layers=(62,)),
    "gpt-oss": ArchRules(own_head=True, window_period=2, needs_window=True),
    "gpt2": ArchRules(),
    "gptneox": ArchRules(own_head=True),
    "granite": ArchRules(scale_key="embedding_scale"),
    "granite_swa": ArchRules(scale_key="embedding_scale", window_period=4, needs_window=True),
    "granitehybrid": ArchRules(scale_key="embedding_scale", recurrent=True),
    "granitemoe": ArchRules(scale_key="embedding_scale"),
    "grovemoe": ArchRules(),
    "hunyuan-dense": ArchRules(),
    "hunyuan-moe": ArchRules(),
    "hunyuan_vl": ArchRules(),
    "hy_v3": ArchRules(),
    "internlm2": ArchRules(own_head=True),
    "jais": ArchRules(own_head=True),
    "jais2": ArchRules(),
    "jamba": ArchRules(recurrent=True),
    "k2-horizon": ArchRules(),
    "laguna": ArchRules(window_period=4),
    "lfm2": ArchRules(recurrent=True),
    "lfm2moe": ArchRules(recurrent=True),
    "llama": ArchRules(),
    "maincoder": ArchRules(),
    "mamba": ArchRules(recurrent=True),
    "mamba2": ArchRules(recurrent=True),
    "maple": ArchRules(own_head=True, window_period=4, needs_window=True),
    "mellum": ArchRules(own_head=True, window_period=4),
    "minicpm": ArchRules(scale_key="embedding_scale"),
    "minimax-m2": ArchRules(own_head=True),
    "mistral3": ArchRules(),
    "mistral4": ArchRules(),
    "mpt": ArchRules(),
    "nanbeige": ArchRules(),
    "nemotron": ArchRules(own_head=True),
    "olmo": ArchRules(),
    "olmo2": ArchRules(own_head=True, window_period=4),
    "olmoe": ArchRules(own_head=True),
    "openelm": ArchRules(),
    "orion": ArchRules(own_head=True),
    "paddleocr": ArchRules(),
    "pangu-embedded": ArchRules(),
    "phi2": ArchRules(own_head=True),
    "phi3": ArchRules(),
    "phimoe": ArchRules(own_head=True),
    "plamo": ArchRules(own_head=True),
    "plamo3": ArchRules(window_period=8),
    "qwen": ArchRules(own_head=True),
    "qwen2": ArchRules(),
    "qwen2moe": ArchRules(own_head=True),
    "qwen2vl": ArchRules(),
    "qwen3": ArchRules(),
    "qwen35": ArchRules(every=4, recurrent=True),
    "qwen35moe": ArchRules(every=4, recurrent=True),
    "qwen3moe": ArchRules(),
    "qwen3next": ArchRules(every=4, recurrent=True),
    "qwen3vl": ArchRules(),
    "qwen3vlmoe": ArchRules(),
    "refact": ArchRules(),
    "seed_oss": ArchRules(),
    "smallthinker": ArchRules(every=4),
    "smollm3": ArchRules(every=4),
    "spark2_5": ArchRules(window_period=4, needs_window=True),
    "stablelm": ArchRules(own_head=True),
    "starcoder": ArchRules(),
    "starcoder2": ArchRules(),
    "xverse": ArchRules(own_head=True),
}
