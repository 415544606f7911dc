"""Writes a Hugging Face checkpoint directory from trained weights: `python -m tools.demo_model.export`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tools.demo_model.tokenizer import END_OF_TEXT, TURN_END, build_tokenizer, tokenizer_config

if TYPE_CHECKING:
    from torch import Tensor

    from tools.demo_model.model import Shape

SHIPPED = Path(__file__).resolve().parents[2] / "exo_mesh" / "weights" / "shipped" / "exo-mesh-demo"
CONTEXT = 8192


def model_config(shape: Shape, end: int, pad: int) -> dict[str, object]:
    """The content of `config.json`, in the form found on the hub."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Writes readable JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(weights: dict[str, Tensor], shape: Shape, target: Path) -> None:
    """Writes config, weights (float32), tokenizer and generation defaults into `target`."""
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    end, pad = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    write_json(target / "config.json", model_config(shape, end, pad))
    generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad, "max_new_tokens": 1024}
    write_json(target / "generation_config.json", generation)
    write_json(target / "tokenizer_config.json", tokenizer_config())
    tokenizer.save(str(target / "tokenizer.json"))
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in weights.items()}
    partial = target / "model.safetensors.partial"
    save_file(tensors, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(target / "model.safetensors")


def main() -> None:
    """Exports the averaged weights of a training checkpoint."""
    import torch

    from tools.demo_model.model import Shape

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/demo_model/checkpoint.pt"))
    parser.add_argument("--target", type=Path, default=SHIPPED)
    options = parser.parse_args()
    state = torch.load(options.checkpoint, weights_only=True)
    export(state["average"], Shape(), options.target)
    print(f"{options.target}: exported after {state['seconds'] / 60:.0f} minutes, {state['tokens']} tokens")


if __name__ == "__main__":
    main()
