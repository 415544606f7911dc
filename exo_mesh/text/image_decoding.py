"""Decodes and resizes image files, which come from strangers. Only a renderer process and tests may import this module.

An image file can make a decoder use any amount of memory and time, or crash it: here that ends one child process.
"""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

from exo_mesh.errors import InputError
from exo_mesh.text.image_wire import MAX_ASPECT, MAX_SOURCE_PIXELS, DecodeImage, ImageDecoded, ImageRecipe

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats that are tried; of an animation the first picture is taken."""


def decode_image(question: DecodeImage) -> ImageDecoded:
    """Decode, turn as the camera was held, and resize. Raises InputError that names the image's place."""
    try:
        from PIL import Image, ImageOps
    except ImportError as exc:
        text = 'this node cannot decode images: Pillow is not installed; pip install "exo-mesh[vision]"'
        raise InputError(text, param=question.where) from exc
    Image.MAX_IMAGE_PIXELS = None  # checked below, with a better sentence
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Any = Image.open(io.BytesIO(question.data), formats=FORMATS)
            _check_size(image.width, image.height, question.where)
            image.load()
            image = ImageOps.exif_transpose(image).convert("RGB")
    except (InputError, MemoryError):
        raise
    except Exception as exc:  # decoders raise anything for broken files
        raise InputError(
            f"{question.where} is not an image that can be read (it must be PNG, JPEG, WebP, GIF or BMP): "
            f"{type(exc).__name__}",
            param=question.where,
        ) from exc
    image = _resized(image, question.recipe)
    return ImageDecoded(image.height, image.width, image.tobytes())


def _check_size(width: int, height: int, where: str) -> None:
    if width * height > MAX_SOURCE_PIXELS:
        text = f"{where} has {width} x {height} pixels; at most {MAX_SOURCE_PIXELS} are allowed"
        raise InputError(text, param=where)
    if max(width, height) > MAX_ASPECT * min(width, height):
        text = f"{where} has {width} x {height} pixels; one side may be at most {MAX_ASPECT} times the other"
        raise InputError(text, param=where)


def _resized(image: Any, recipe: ImageRecipe) -> Any:
    if recipe.kind == "exact":
        return image.resize((recipe.width, recipe.height), recipe.resample)
    if recipe.kind == "grid":
        height, width = grid_size(image.height, image.width, recipe)
        return image.resize((width, height), recipe.resample)
    short, long = sorted(image.size)
    other = int(recipe.shortest * long / short)
    size = (recipe.shortest, other) if image.width <= image.height else (other, recipe.shortest)
    image = image.resize(size, recipe.resample)
    left, top = (image.width - recipe.width) // 2, (image.height - recipe.height) // 2
    return image.crop((left, top, left + recipe.width, top + recipe.height))


def grid_size(height: int, width: int, recipe: ImageRecipe) -> tuple[int, int]:
    """Height and width as multiples of the recipe's factor: the nearest ones, made smaller or larger alike until the
    number of pixels is within the recipe's bounds."""
    factor = recipe.factor
    rows, columns = max(1, round(height / factor)), max(1, round(width / factor))
    if rows * columns * factor**2 > recipe.max_pixels:
        shrink = math.sqrt(height * width / recipe.max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns * factor**2 < recipe.min_pixels:
        grow = math.sqrt(recipe.min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor
