"""The model families that this engine takes from safetensors: llama.cpp's names of their tensors. Pure.

A stage computes with llama.cpp's own code for `arch`. What is here says how a tensor of a checkpoint becomes one of
llama.cpp's: its name, its shape, and how its values change.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Change = Literal["", "rotary q", "rotary k", "plus one"]
"""How values change. rotary: the rows of a head are reordered, because llama.cpp's `llama` rotates neighbouring pairs,
and checkpoints rotate halves. plus one: norms of Gemma, which checkpoints store without the 1."""


class TensorPart(msgspec.Struct, frozen=True):
    """A tensor of a layer. name, source: in llama.cpp and in the checkpoint. shape: names of sizes (see Sizes), rows
    first. per_expert: one tensor per expert in the checkpoint (`{}` in source), one for all in llama.cpp."""

    name: str
    source: str
    shape: tuple[str, ...]
    change: Change = ""
    optional: bool = False
    per_expert: bool = False


class HfFamily(msgspec.Struct, frozen=True):
    """A `model_type`.

    own_head: llama.cpp's model code does not take the embedding as head. cut_every: a stage may begin only at multiples
    of it. windows: how the config marks layers with windowed attention; "refused" refuses a window that is shorter than
    the context. scalars: numbers of the config, and llama.cpp's names of them.
    """

    arch: str
    parts: tuple[TensorPart, ...]
    rotary_pairs: bool = False
    theta: float = 10000.0
    activation: tuple[str, ...] = ("silu", "swish")
    cut_every: int = 1
    plus_one: bool = False
    scaled_embedding: bool = False
    windows: Literal["none", "refused", "layers"] = "none"
    experts: bool = False
    own_head: bool = False
    scalars: tuple[tuple[str, str], ...] = ()


def _linear(name: str, source: str, rows: str, columns: str, change: Change = "") -> tuple[TensorPart, TensorPart]:
    return (
        TensorPart(f"{name}.weight", f"{source}.weight", (rows, columns), change),
        TensorPart(f"{name}.bias", f"{source}.bias", (rows,), change, optional=True),
    )


def _norm(name: str, source: str, size: str = "hidden", change: Change = "") -> TensorPart:
    return TensorPart(f"{name}.weight", f"{source}.weight", (size,), change)


def _attention(pairs: bool = False) -> tuple[TensorPart, ...]:
    return (
        *_linear("attn_q", "self_attn.q_proj", "q", "hidden", "rotary q" if pairs else ""),
        *_linear("attn_k", "self_attn.k_proj", "kv", "hidden", "rotary k" if pairs else ""),
        *_linear("attn_v", "self_attn.v_proj", "kv", "hidden"),
        *_linear("attn_output", "self_attn.o_proj", "hidden", "q"),
    )


_NORMS = (_norm("attn_norm", "input_layernorm"), _norm("ffn_norm", "post_attention_layernorm"))
_HEAD_NORMS = (
    _norm("attn_q_norm", "self_attn.q_norm", "head_dim"),
    _norm("attn_k_norm", "self_attn.k_norm", "head_dim"),
)
_MLP = (
    *_linear("ffn_gate", "mlp.gate_proj", "mlp", "hidden"),
    *_linear("ffn_up", "mlp.up_proj", "mlp", "hidden"),
    *_linear("ffn_down", "mlp.down_proj", "hidden", "mlp"),
)


def _experts(router: str, gate: str, up: str, down: str) -> tuple[TensorPart, ...]:
    return (
        TensorPart("ffn_gate_inp.weight", router, ("experts", "hidden")),
        TensorPart("ffn_gate_exps.weight", gate, ("expert_mlp", "hidden"), per_expert=True),
        TensorPart("ffn_up_exps.weight", up, ("expert_mlp", "hidden"), per_expert=True),
        TensorPart("ffn_down_exps.weight", down, ("hidden", "expert_mlp"), per_expert=True),
    )


_QWEN_EXPERTS = _experts(
    "mlp.gate.weight",
    "mlp.experts.{}.gate_proj.weight",
    "mlp.experts.{}.up_proj.weight",
    "mlp.experts.{}.down_proj.weight",
)
_MIXTRAL_EXPERTS = _experts(
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{}.w1.weight",
    "block_sparse_moe.experts.{}.w3.weight",
    "block_sparse_moe.experts.{}.w2.weight",
)
_GEMMA_NORMS = tuple(
    _norm(name, source, change="plus one")
    for name, source in (
        ("attn_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    )
)
_GEMMA_HEAD_NORMS = tuple(
    _norm(name, source, "head_dim", "plus one")
    for name, source in (("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm"))
)
_OLMO2_NORMS = (
    _norm("post_attention_norm", "post_attention_layernorm"),
    _norm("post_ffw_norm", "post_feedforward_layernorm"),
    _norm("attn_q_norm", "self_attn.q_norm", "q"),
    _norm("attn_k_norm", "self_attn.k_norm", "kv"),
)
_LLAMA_PARTS = (*_NORMS, *_attention(pairs=True), *_MLP)

FAMILIES = {
    "llama": HfFamily("llama", _LLAMA_PARTS, rotary_pairs=True),
    "mistral": HfFamily("llama", _LLAMA_PARTS, rotary_pairs=True, windows="refused"),
    "mixtral": HfFamily(
        "llama",
        (*_NORMS, *_attention(pairs=True), *_MIXTRAL_EXPERTS),
        rotary_pairs=True,
        theta=1000000.0,
        windows="refused",
        experts=True,
    ),
    "granite": HfFamily(
        "granite",
        _LLAMA_PARTS,
        rotary_pairs=True,
        scalars=(
            ("residual_multiplier", "residual_scale"),
            ("attention_multiplier", "attention.scale"),
            ("logits_scaling", "logit_scale"),
        ),
    ),
    "qwen2": HfFamily("qwen2", (*_NORMS, *_attention(), *_MLP), windows="refused"),
    "qwen3": HfFamily("qwen3", (*_NORMS, *_attention(), *_HEAD_NORMS, *_MLP), windows="refused"),
    "qwen3_moe": HfFamily(
        "qwen3moe", (*_NORMS, *_attention(), *_HEAD_NORMS, *_QWEN_EXPERTS), windows="refused", experts=True
    ),
    "olmo2": HfFamily("olmo2", (*_OLMO2_NORMS, *_attention(), *_MLP), theta=500000.0, own_head=True),
    "gemma3_text": HfFamily(
        "gemma3",
        (*_GEMMA_NORMS, *_attention(), *_GEMMA_HEAD_NORMS, *_MLP),
        theta=1000000.0,
        activation=("gelu_pytorch_tanh",),
        plus_one=True,
        scaled_embedding=True,
        windows="layers",
    ),
}
