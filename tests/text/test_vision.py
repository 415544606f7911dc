"""How prompts take images is read from a model's files; whatever is not supported is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.errors import InputError
from exo_mesh.text.vision import VisionSpec, read_vision

TOKENS = {5: "<image>", 6: "<begin>", 7: "<end>"}
QWEN = {"model_type": "qwen2_5_vl", "image_token_id": 5, "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
GEMMA = {
    "model_type": "gemma3", "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7,
    "mm_tokens_per_image": 3, "vision_config": {"image_size": 896},
}  # fmt: skip
LLAVA = {
    "model_type": "llava", "image_token_index": 5,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
}  # fmt: skip
SQUARE = {"size": {"height": 896, "width": 896}}
CROP = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


def read(tmp_path: Path, config: dict[str, Any], settings: dict[str, Any] | None) -> VisionSpec | str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if settings is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    return read_vision(tmp_path, TOKENS.get)


def usable(tmp_path: Path, config: dict[str, Any], settings: dict[str, Any]) -> VisionSpec:
    found = read(tmp_path, config, settings)
    assert isinstance(found, VisionSpec), found
    return found


def test_a_prompt_gets_as_many_placeholders_as_each_image_has_tokens(tmp_path: Path) -> None:
    spec = usable(tmp_path, QWEN, {"min_pixels": 3136, "max_pixels": 1003520})
    pixels = bytes(56 * 84 * 3)
    ids, pictures = spec.place([1, 5, 2, 5, 3], [(56, 84, pixels), (28, 28, bytes(28 * 28 * 3))])
    assert ids == [1, *[5] * 6, 2, 5, 3]
    assert [(one.spec.start, one.spec.stop, one.spec.rows, one.spec.columns) for one in pictures] == [
        (1, 7, 2, 3),
        (8, 9, 1, 1),
    ]
    assert pictures[0].spec.digest != pictures[1].spec.digest


def test_the_text_around_an_image_of_gemma_is_written_out(tmp_path: Path) -> None:
    spec = usable(tmp_path, GEMMA, SQUARE)
    assert spec.spread_markers("a<begin>b", 1) == "a\n\n<begin><image><end>\n\nb"
    assert spec.is_whole and spec.grid(896, 896) == (1, 3)


def test_a_llava_tower_counts_its_patches(tmp_path: Path) -> None:
    assert usable(tmp_path, LLAVA, CROP).num_tokens == 4
    assert usable(tmp_path, {**LLAVA, "vision_feature_select_strategy": "full"}, CROP).num_tokens == 5


@pytest.mark.parametrize("prompt", ["no mark", "<image><image>"])
def test_a_mark_in_the_text_of_a_message_is_refused(tmp_path: Path, prompt: str) -> None:
    with pytest.raises(InputError, match="image marks"):
        usable(tmp_path, QWEN, {"min_pixels": 4}).spread_markers(prompt, 1)


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ({"model_type": "llama"}, CROP, "no vision tower"),
        ({"model_type": "mllama", "vision_config": {}}, CROP, "of the family mllama"),
        (QWEN, None, "preprocessor_config.json is missing"),
        ({**QWEN, "image_token_id": 9}, CROP, "not a token of the tokenizer"),
        (GEMMA, {**SQUARE, "do_pan_and_scan": True}, "do_pan_and_scan is true"),
        (GEMMA, {**SQUARE, "rescale_factor": 1}, "rescale_factor"),
        (LLAVA, {"size": {"shortest_edge": 14}, "crop_size": {"height": 14, "width": 14}}, "the tower takes 28 x 28"),
        ({**LLAVA, "vision_config": {"model_type": "pixtral"}}, CROP, "supported are clip_vision_model"),
        (QWEN, {"image_mean": [1, 2]}, "vision settings cannot be used"),
        (QWEN, {"resample": 77}, "not a filter"),
    ],
)
def test_the_reason_why_a_model_takes_no_images_is_named(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any] | None, words: str
) -> None:
    found = read(tmp_path, config, settings)
    assert isinstance(found, str) and words in found


def test_newer_checkpoints_say_it_in_another_file(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": SQUARE}))
    assert isinstance(read(tmp_path, GEMMA, None), VisionSpec)
