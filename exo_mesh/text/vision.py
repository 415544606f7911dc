"""How a model's prompts take images: the marks in the text, the size of the pixels, and the number of tokens.

All of it is read from config.json and preprocessor_config.json. The vision tower that computes the tokens is the
engine's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.domain.images import MAX_PIXELS, Picture, PictureSpec, digest_of
from exo_mesh.errors import InputError, ModelError
from exo_mesh.text.image_wire import ImageRecipe
from exo_mesh.weights.model_files import read_json_if_there

FAMILIES = ("gemma3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
"""Values of `model_type` whose images are supported."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""The files that say how a model's images are resized and normalised; the second has it under `image_processor`."""

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_BICUBIC, _BILINEAR = 3, 2
_RESCALE, _RESCALE_ERROR = 1 / 255, 1e-6

Channels = tuple[float, float, float]


class _UnusableError(Exception):
    """A setting with which this version takes no images; the message names it."""


class VisionSpec(msgspec.Struct, frozen=True):
    """How the prompts of one model take images.

    marker: the text that the chat template writes for an image; spread: the text that takes its place, with one
    image_id. That token is then repeated, once for each row of the tower. patch: side of the square of pixels of one
    token, in a model that counts positions by row and column; 0 in others, whose images all have num_tokens.
    """

    image_id: int
    marker: str
    spread: str
    recipe: ImageRecipe
    mean: Channels
    std: Channels
    num_tokens: int = 0
    patch: int = 0
    is_whole: bool = False

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the tokens of an image."""
        return (height // self.patch, width // self.patch) if self.patch else (1, self.num_tokens)

    def spread_markers(self, prompt: str, num_images: int) -> str:
        """The prompt with the text around each image. Raises InputError unless there is one marker for each image."""
        found = prompt.count(self.marker)
        if found != num_images:
            raise InputError(
                f"the prompt has {found} image marks ({self.marker}) for {num_images} images: no text may contain this "
                "mark, and the model's chat template must write one for each image",
                param="messages",
            )
        return prompt.replace(self.marker, self.spread)

    def place(self, ids: Sequence[int], images: Sequence[tuple[int, int, bytes]]) -> tuple[list[int], list[Picture]]:
        """The prompt's ids with as many placeholders as each image has tokens, and the images at their positions.
        images: (height, width, pixels) in order. Raises InputError unless there is one placeholder for each."""
        if ids.count(self.image_id) != len(images):
            raise InputError("the model's tokenizer does not keep the mark of an image as one token", param="messages")
        placed: list[int] = []
        pictures: list[Picture] = []
        left = iter(images)
        for token_id in ids:
            if token_id != self.image_id:
                placed.append(token_id)
                continue
            height, width, pixels = next(left)
            rows, columns = self.grid(height, width)
            spec = PictureSpec(
                len(placed), rows * columns, rows, columns, height, width, self.mean, self.std, digest_of(pixels),
                self.is_whole,
            )  # fmt: skip
            pictures.append(Picture(spec, pixels))
            placed += [token_id] * spec.num_tokens
        return placed, pictures


def read_vision(directory: Path, token_of: Callable[[int], str | None]) -> VisionSpec | str:
    """How the model in `directory` takes images, or the reason why it does not. token_of: the text of a token id."""
    try:
        config = read_json_if_there(directory / "config.json")
        family = config.get("model_type")
        if not isinstance(config.get("vision_config"), dict):
            return "it has no vision tower (vision_config in config.json)"
        if family not in FAMILIES:
            return f"images are supported for the families {', '.join(FAMILIES)}, and it is of the family {family}"
        settings = _processor_settings(directory)
        _check_settings(settings)
        return _READERS[str(family)](config, settings, token_of)
    except (ModelError, _UnusableError, KeyError, TypeError, ValueError) as exc:
        return f"its vision settings cannot be used: {type(exc).__name__ if not str(exc) else exc}"


def _processor_settings(directory: Path) -> dict[str, Any]:
    settings = read_json_if_there(directory / PROCESSOR_FILES[0])
    if not settings:
        nested = read_json_if_there(directory / PROCESSOR_FILES[1]).get("image_processor")
        settings = nested if isinstance(nested, dict) else {}
    if not settings:
        raise _UnusableError(f"{PROCESSOR_FILES[0]} is missing")
    return settings


def _check_settings(settings: Mapping[str, Any]) -> None:
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if settings.get(name) is False:
            raise _UnusableError(f"{name} is false in {PROCESSOR_FILES[0]}")
    for name in ("do_pad", "do_pan_and_scan"):
        if settings.get(name):
            raise _UnusableError(f"{name} is true in {PROCESSOR_FILES[0]}")
    if abs(float(settings.get("rescale_factor") or _RESCALE) - _RESCALE) > _RESCALE_ERROR:
        raise _UnusableError(f"rescale_factor in {PROCESSOR_FILES[0]} is not 1/255")


def _channels(value: Any, default: Channels) -> Channels:
    if value is None:
        return default
    red, green, blue = value
    return float(red), float(green), float(blue)


def _token(token_of: Callable[[int], str | None], token_id: Any, name: str) -> str:
    text = token_of(token_id) if isinstance(token_id, int) and 0 <= token_id < 2**31 else None
    if not text:
        raise _UnusableError(f"{name} of config.json is not a token of the tokenizer")
    return text


def _image_id(config: Mapping[str, Any]) -> Any:
    return config.get("image_token_id", config.get("image_token_index"))


def _size(value: Any) -> int:
    if not isinstance(value, int) or not 0 < value <= 1 << 16:
        raise _UnusableError(f"{value!r} is not a size of an image")
    return value


def _llava(config: Mapping[str, Any], settings: Mapping[str, Any], token_of: Callable[[int], str | None]) -> VisionSpec:
    vision = config["vision_config"]
    kind = vision.get("model_type", "clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise _UnusableError(f"the vision tower is a {kind}; supported are clip_vision_model and siglip_vision_model")
    side = _size(vision.get("image_size", 224))
    num_tokens = (side // _size(vision.get("patch_size", 32))) ** 2
    strategy = config.get("vision_feature_select_strategy", "default")
    has_class_token = kind == "clip_vision_model"
    num_tokens += has_class_token if strategy == "full" else has_class_token - 1
    size, crop = settings.get("size") or {"shortest_edge": 224}, settings.get("crop_size") or {}
    if isinstance(size, dict) and "height" in size:
        recipe = ImageRecipe("exact", _size(size["height"]), _size(size["width"]))
    else:
        crop = crop if isinstance(crop, dict) else {"height": crop, "width": crop}
        shortest = size.get("shortest_edge") if isinstance(size, dict) else size
        recipe = ImageRecipe(
            "crop", _size(crop.get("height", side)), _size(crop.get("width", side)), shortest=_size(shortest)
        )
    if (recipe.height, recipe.width) != (side, side):
        raise _UnusableError(f"images get {recipe.width} x {recipe.height} pixels, but the tower takes {side} x {side}")
    image_id = _image_id(config)
    marker = _token(token_of, image_id, "image_token_index")
    recipe = recipe.with_filter(settings.get("resample", _BICUBIC))
    mean, std = _channels(settings.get("image_mean"), _CLIP_MEAN), _channels(settings.get("image_std"), _CLIP_STD)
    return VisionSpec(image_id, marker, marker, recipe, mean, std, num_tokens)


def _gemma(config: Mapping[str, Any], settings: Mapping[str, Any], token_of: Callable[[int], str | None]) -> VisionSpec:
    size = settings.get("size") or {"height": 224, "width": 224}
    image_id = _image_id(config)
    image = _token(token_of, image_id, "image_token_index")
    begin = _token(token_of, config.get("boi_token_index"), "boi_token_index")
    end = _token(token_of, config.get("eoi_token_index"), "eoi_token_index")
    recipe = ImageRecipe("exact", _size(size["height"]), _size(size["width"]))
    recipe = recipe.with_filter(settings.get("resample", _BILINEAR))
    mean = _channels(settings.get("image_mean"), (0.5, 0.5, 0.5))
    std = _channels(settings.get("image_std"), (0.5, 0.5, 0.5))
    spread = f"\n\n{begin}{image}{end}\n\n"
    num_tokens = _size(config.get("mm_tokens_per_image", 256))
    return VisionSpec(image_id, begin, spread, recipe, mean, std, num_tokens, is_whole=True)


def _qwen(config: Mapping[str, Any], settings: Mapping[str, Any], token_of: Callable[[int], str | None]) -> VisionSpec:
    vision = config["vision_config"]
    patch = _size(vision.get("patch_size", 14)) * _size(vision.get("spatial_merge_size", 2))
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 56 * 56
    most = settings.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280
    image_id = _image_id(config)
    marker = _token(token_of, image_id, "image_token_id")
    recipe = ImageRecipe("grid", factor=patch, min_pixels=int(least), max_pixels=min(int(most), MAX_PIXELS))
    recipe = recipe.with_filter(settings.get("resample", _BICUBIC))
    mean, std = _channels(settings.get("image_mean"), _CLIP_MEAN), _channels(settings.get("image_std"), _CLIP_STD)
    return VisionSpec(image_id, marker, marker, recipe, mean, std, patch=patch)


_READERS = {"gemma3": _gemma, "llava": _llava, "qwen2_5_vl": _qwen, "qwen2_vl": _qwen, "qwen3_vl": _qwen}
