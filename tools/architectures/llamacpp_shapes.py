"""Asks the library for the tensors of an architecture, by a model from metadata alone, and writes a random one."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from collections.abc import Mapping
from ctypes import c_bool, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from exo_mesh_llamacpp.canary_models import write_random
from exo_mesh_llamacpp.container import Value, lay_out
from exo_mesh_llamacpp.layouts import ModelParams
from exo_mesh_llamacpp.library import Library

FILE = "model.gguf"
MAX_LOADS = 40
"""Times that the library may name a tensor that is missing."""

_OPTIONAL = re.compile(r"\.(scale|input_scale)$|^rope_f|\.rope_f|nextn|(?<!ssm_conv1d)\.bias$|_sinks|^cls\b|^mtp")
_ABSENT = re.compile(r"(?:tensor '([^']+)' not found|missing tensor '([^']+)')")

MAX_TRIES = 60
"""Keys that an architecture may ask for one after the other."""

_MISSING_KEY = re.compile(r"key not found in model: ([\w.\-]+)")
_SHAPE_OFFSET = 16
"""Bytes before `ne` in ggml_tensor: type, padding and buffer."""

_SetData = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)


class _GgufInit(ctypes.Structure):
    _fields_ = [("no_alloc", c_bool), ("ctx", c_void_p)]


@dataclass(frozen=True)
class Asked:
    """The result: metadata with the keys that turned out to be needed, and the shape of every tensor that the
    architecture may have (the length of a row first)."""

    metadata: dict[str, Value]
    shapes: dict[str, tuple[int, ...]]


class ShapesError(Exception):
    """The library makes no model from this metadata; its reason."""


def ask_shapes(library: Library, metadata: Mapping[str, Value], defaults: Mapping[str, Value]) -> Asked:
    """defaults: values of keys, without the architecture, that are added when the library asks for them."""
    arch = str(metadata["general.architecture"])
    known = dict(metadata)
    for _ in range(MAX_TRIES):
        library.forget_log()
        shapes: dict[str, tuple[int, ...]] = {}
        model = _create(library, known, shapes)
        if model:
            library.call.llama_model_free(model)
            return Asked(known, shapes)
        reason = library.last_error()
        missing = _MISSING_KEY.search(reason)
        if missing is None or missing[1] in known:
            raise ShapesError(reason or "no reason given")
        name = missing[1].removeprefix(f"{arch}.")  # a few keys have no prefix
        if name not in defaults:
            raise ShapesError(f"it needs {missing[1]}")
        known[missing[1]] = defaults[name]
    raise ShapesError(f"it asks for more than {MAX_TRIES} keys")


def _create(library: Library, metadata: Mapping[str, Value], shapes: dict[str, tuple[int, ...]]) -> int:
    call = library.call
    call.gguf_init_from_file.restype, call.gguf_init_from_file.argtypes = c_void_p, [ctypes.c_char_p, _GgufInit]
    call.llama_model_init_from_user.restype = c_void_p
    call.llama_model_init_from_user.argtypes = [c_void_p, _SetData, c_void_p, ModelParams]
    call.ggml_nelements.restype, call.ggml_nelements.argtypes = c_int64, [c_void_p]
    call.gguf_free.restype, call.gguf_free.argtypes = None, [c_void_p]

    def take(tensor: int, _user: int | None) -> None:
        shape = tuple((c_int64 * 4).from_address(tensor + _SHAPE_OFFSET))
        while len(shape) > 1 and shape[-1] == 1:
            shape = shape[:-1]
        assert math.prod(shape) == call.ggml_nelements(tensor), "ggml_tensor has another layout"
        shapes[call.ggml_get_name(tensor).decode()] = shape

    head, _, _ = lay_out(metadata, [])
    descriptor = os.memfd_create("metadata")
    try:
        os.write(descriptor, head)
        context = call.gguf_init_from_file(f"/proc/self/fd/{descriptor}".encode(), _GgufInit(True, None))
    finally:
        os.close(descriptor)
    assert context, "the metadata is well formed"
    try:
        return int(
            call.llama_model_init_from_user(context, _SetData(take), None, call.llama_model_default_params()) or 0
        )
    finally:
        call.gguf_free(context)
        sys.stderr.flush()


def write_model(library: Library, asked: Asked, directory: Path) -> dict[str, tuple[int, ...]]:
    """Write the model, with as few optional tensors as the library accepts; returns the shapes of its tensors.

    Raises ShapesError with the library's reason.
    """
    chosen = {name: shape for name, shape in asked.shapes.items() if not _OPTIONAL.search(name)}
    file = directory / FILE
    for _ in range(MAX_LOADS):
        write_random(file, asked.metadata, chosen)
        library.forget_log()
        handle = library.call.llama_model_load_from_file(str(file).encode(), library.call.llama_model_default_params())
        if handle:
            library.call.llama_model_free(handle)
            return chosen
        reason = library.last_error()
        absent = _ABSENT.search(reason)
        name = (absent[1] or absent[2]) if absent else ""
        if not name or name in chosen or name not in asked.shapes:
            raise ShapesError(reason or "no reason given")
        suffix = re.sub(r"^blk\.\d+\.", "", name)
        chosen |= {other: shape for other, shape in asked.shapes.items() if re.sub(r"^blk\.\d+\.", "", other) == suffix}
    raise ShapesError(f"more than {MAX_LOADS} tensors are missing")
