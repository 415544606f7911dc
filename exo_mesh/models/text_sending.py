"""Reads the text files of a model here in chunks, for a peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from exo_mesh.weights.card import IMAGE_FILES, LATER_TEXT_FILES, TEXT_FILES, text_file_limit
from exo_mesh.weights.model_files import place_of, read_model_file

CHUNK_BYTES = 1024 * 1024


async def text_files(model_dir: Path, *, images: bool, later: bool) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yields the text files of a model, each in chunks with its name; an empty file is one empty chunk. images, later:
    also the files that older versions do not take.

    Only regular files inside the model's directory are sent, whatever links it has. Raises ModelError.
    """
    image_files = IMAGE_FILES if images else ()
    later_files = LATER_TEXT_FILES if later else ()
    for name in (*TEXT_FILES, *image_files, *later_files):
        try:
            data = await asyncio.to_thread(read_model_file, place_of(model_dir, name), text_file_limit(name))
        except FileNotFoundError:
            continue
        for start in range(0, max(1, len(data)), CHUNK_BYTES):
            yield name, data[start : start + CHUNK_BYTES]
