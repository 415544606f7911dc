"""Tiny random models that take images, one of each family, and what transformers alone makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from exo_mesh.domain.images import Picture, PictureSpec, digest_of
from exo_mesh.weights.random_checkpoint import TinyModel, tokenizer_json

VOCAB = 320
IMAGE_ID, BEGIN_ID, END_ID, VIDEO_ID = 300, 301, 302, 303
MARKS = {IMAGE_ID: "<image>", BEGIN_ID: "<begin>", END_ID: "<end>", VIDEO_ID: "<video>", VOCAB - 1: "<|end|>"}
NUM_LAYERS = 6
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": VOCAB - 1, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_QWEN_IDS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": VIDEO_ID,
    "vision_start_token_id": BEGIN_ID,
    "vision_end_token_id": END_ID,
}
_DEPTH = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_token_index": IMAGE_ID,
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {
            "model_type": "clip_vision_model", **_TOWER, "image_size": 16, "patch_size": 4, "projection_dim": 16
        },
    },
    "gemma3": {
        "image_token_index": IMAGE_ID,
        "boi_token_index": BEGIN_ID,
        "eoi_token_index": END_ID,
        "mm_tokens_per_image": 4,
        "text_config": {
            "model_type": "gemma3_text", **_TEXT, "sliding_window": 16, "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 8,
        },
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "image_size": 16, "patch_size": 4},
    },
    "qwen2_vl": {
        **_QWEN_IDS,
        "text_config": {"model_type": "qwen2_vl_text", **_TEXT, "rope_parameters": _MROPE},
        "vision_config": {"model_type": "qwen2_vl", **_DEPTH, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        **_QWEN_IDS,
        "text_config": {"model_type": "qwen2_5_vl_text", **_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            "model_type": "qwen2_5_vl", **_DEPTH, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32,
            "fullatt_block_indexes": [1], "window_size": 16,
        },
    },
    "qwen3_vl": {
        **_QWEN_IDS,
        "text_config": {
            "model_type": "qwen3_vl_text", **_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}
        },
        "vision_config": {
            "model_type": "qwen3_vl", **_DEPTH, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32,
            "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64,
        },
    },
}  # fmt: skip

SIZES = {"llava": [(16, 16), (16, 16)], "gemma3": [(16, 16), (16, 16)]}
"""Height and width of the two images of a prompt; other families take any."""


@dataclass(frozen=True)
class TinyVision:
    """A checkpoint and a prompt with two images."""

    directory: Path
    family: str
    ids: np.ndarray
    pictures: tuple[Picture, ...]


def write_vision_model(directory: Path, family: str) -> Path:
    """Writes a checkpoint with transformers, float32, with noise on every parameter."""
    torch.manual_seed(5)
    settings = {"model_type": family, **CONFIGS[family]}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = VOCAB - 1
    model.save_pretrained(directory)
    _write_text_files(directory, family)
    return directory


def _write_text_files(directory: Path, family: str) -> None:
    """A byte-level tokenizer with the marks of images, a template that reads parts, and how images are resized."""
    tokenizer = tokenizer_json(TinyModel(vocab=VOCAB))
    words = tokenizer["model"]["vocab"]
    for token_id, text in MARKS.items():
        words.pop(f"<|unused{token_id}|>", None)
        words[text] = token_id
    (end,) = tokenizer["added_tokens"]
    tokenizer["added_tokens"] = [{**end, "id": token_id, "content": text} for token_id, text in MARKS.items()]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    marker = "<begin>" if family == "gemma3" else "<image>"
    template = TEMPLATE.replace("MARKER", marker)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSORS.get(family, PROCESSORS["qwen2_vl"])))


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}MARKER{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}assistant:"
)
PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
    "gemma3": {"size": {"height": 16, "width": 16}, "image_mean": MEAN, "image_std": STD},
    "qwen2_vl": {
        "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 1024}, "image_mean": MEAN, "image_std": STD,
    },
}  # fmt: skip


def tiny_prompt(directory: Path, family: str, seed: int = 0) -> TinyVision:
    """A prompt of text, image, text, image, text, and 8 more tokens."""
    draw = np.random.default_rng(seed)
    ids: list[int] = draw.integers(3, 250, 9).tolist()
    pictures = []
    for height, width in SIZES.get(family, [(16, 24), (24, 8)]):
        rows, columns = _grid(family, height, width)
        num_tokens = 4 if family == "gemma3" else rows * columns
        pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8).tobytes()
        spec = PictureSpec(
            len(ids), num_tokens, rows, columns, height, width, MEAN, STD, digest_of(pixels), family == "gemma3"
        )
        pictures.append(Picture(spec, pixels))
        ids += [IMAGE_ID] * num_tokens
        ids += draw.integers(3, 250, 7).tolist()
    ids += draw.integers(3, 250, 8).tolist()
    return TinyVision(directory, family, np.array(ids), tuple(pictures))


def _grid(family: str, height: int, width: int) -> tuple[int, int]:
    size = {"llava": 4, "gemma3": 8}.get(family, 8)
    return height // size, width // size


def pixel_values(pictures: Sequence[Picture], family: str) -> dict[str, torch.Tensor]:
    """What the model's own processor gives it."""
    raw = [np.frombuffer(one.pixels, np.uint8).reshape(one.spec.height, one.spec.width, 3) for one in pictures]
    if family in ("llava", "gemma3"):
        mean, std = (np.array(value, np.float32)[:, None, None] for value in (MEAN, STD))
        images = [(one.transpose(2, 0, 1).astype(np.float32) / 255 - mean) / std for one in raw]
        return {"pixel_values": torch.from_numpy(np.stack(images))}
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, do_resize=False, image_mean=MEAN, image_std=STD
    )
    return dict(processor([Image.fromarray(one) for one in raw], return_tensors="pt"))


def whole_logits(prompt: TinyVision) -> np.ndarray:
    """Logits of every position by transformers' own whole model, in one forward."""
    model = AutoModelForImageTextToText.from_pretrained(prompt.directory, dtype=torch.float32).eval()
    ids = torch.from_numpy(prompt.ids[None].astype(np.int64))
    with torch.inference_mode():
        images = pixel_values(prompt.pictures, prompt.family)
        result: np.ndarray = model(input_ids=ids, **images, **_types(prompt.family, ids)).logits[0].float().numpy()
    return result


def _types(family: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Which tokens are of images, by the name that the family's model has for it."""
    types = (ids == IMAGE_ID).long()
    return {"gemma3": {"token_type_ids": types}, "llava": {}}.get(family, {"mm_token_type_ids": types})


def library_answer(directory: Path, family: str, question: str, images: Sequence[Any], num_tokens: int) -> str:
    """What transformers' whole model answers greedily, with transformers' own preparation of Pillow images, to
    `question` with "{}" where an image goes. Asserts that no step is a close call."""
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    kind = {"llava": LlavaImageProcessorPil, "gemma3": Gemma3ImageProcessorPil}.get(family, Qwen2VLImageProcessorPil)
    inputs = dict(kind(**settings)(list(images), return_tensors="pt"))
    inputs.pop("num_crops", None)
    grids = inputs.get("image_grid_thw")
    counts = [{"llava": 16, "gemma3": 4}.get(family, 0)] * len(images) if grids is None else (grids.prod(1) // 4)
    marks = ["<image>" * int(count) for count in counts]
    if family == "gemma3":
        marks = [f"\n\n<begin>{mark}<end>\n\n" for mark in marks]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(question.format(*marks), add_special_tokens=False).ids
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    made: list[int] = []
    with torch.inference_mode():
        for _ in range(num_tokens):
            whole = torch.tensor([[*ids, *made]])
            logits = model(input_ids=whole, **inputs, **_types(family, whole), use_cache=False).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-3, "a close call"
            made.append(int(logits.argmax()))
    return str(tokenizer.decode(made))
