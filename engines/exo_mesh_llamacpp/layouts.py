"""The structures of llama.cpp's C functions, and the check that a library really uses them.

llama.cpp changes these structures between releases, and a wrong layout would compute nonsense without any error. A
library is accepted only if its default parameters match, byte for byte, a known layout or the layout that its package
declares.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from ctypes import c_bool, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_void_p
from typing import Any

import msgspec

from exo_mesh.errors import EngineError

POINTER_BYTES = 8
_SPARE_BYTES = 512
"""Room for the result of a function whose structure may be longer than expected."""

LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
EvalCallback = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
ToFloat = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)


class ModelParams(ctypes.Structure):
    """llama_model_params."""

    _fields_ = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


class ContextParams(ctypes.Structure):
    """llama_context_params."""

    _fields_ = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("reserved", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]


class ShortContextParams(ctypes.Structure):
    """llama_context_params of releases without the reserved word."""

    _fields_ = [field for field in ContextParams._fields_ if field[0] != "reserved"]


class LlamaBatch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    ]


class TypeTraits(ctypes.Structure):
    """ggml_type_traits."""

    _fields_ = [
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", ToFloat),
    ]


class _Oversized(ctypes.Structure):
    _fields_ = [("raw", c_uint8 * _SPARE_BYTES)]


class StructLayout(msgspec.Struct, frozen=True):
    """The structures of a library's functions. model, context: with at least the fields of ModelParams and
    ShortContextParams that the engine sets."""

    name: str
    model: type[ctypes.Structure]
    context: type[ctypes.Structure]


KNOWN_LAYOUTS = (
    StructLayout("llama.cpp of October 2026", ModelParams, ContextParams),
    StructLayout("llama.cpp of September 2026", ModelParams, ShortContextParams),
)

_MODEL_DEFAULTS = {
    **{"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1},
    **{"vocab_only": 0, "check_tensors": 0, "use_extra_bufts": 1, "no_host": 0, "no_alloc": 0, "load_mtp": 0},
}
_CONTEXT_DEFAULTS = {
    **{"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0},
    **{"n_outputs_max": 0, "n_outputs_max_per_seq": 1, "n_threads": 4, "n_threads_batch": 4},
    **{"ctx_type": 0, "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1, "flash_attn_type": -1},
    **{"rope_freq_base": 0.0, "rope_freq_scale": 0.0, "yarn_ext_factor": -1.0, "yarn_attn_factor": -1.0},
    **{"yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0, "type_k": 1, "type_v": 1},
    **{"embeddings": 0, "offload_kqv": 1, "no_perf": 1, "op_offload": 1, "swa_full": 1, "kv_unified": 0},
}


def layout_of_classes(structure: type[ctypes.Structure]) -> list[tuple[str, int, int]]:
    """The name, offset and size of each field."""
    return [(name, getattr(structure, name).offset, getattr(structure, name).size) for name, *_ in structure._fields_]


def layout_of(functions: Any, declared: StructLayout | None = None) -> StructLayout:
    """The layout of a library. functions: the opened library. declared: the layout that its package declares; without
    one, the known layouts are tried. It must be usable.

    The default parameters must be the expected ones where the layout has its fields. Raises EngineError.
    """
    if struct.calcsize("P") != POINTER_BYTES:
        raise EngineError("only 64-bit machines are supported")
    found = {
        "llama_model_params": _default(functions.llama_model_default_params),
        "llama_context_params": _default(functions.llama_context_default_params),
    }
    defect = ""
    for layout in (declared,) if declared else KNOWN_LAYOUTS:
        defect = defect or _defect(layout, found)
        if not _defect(layout, found):
            _require_traits(functions)
            return layout
    raise EngineError(defect)


def unusable(layout: StructLayout) -> str:
    """The reason why this engine cannot use a layout, or ""."""
    for name, structure, fields in (
        ("llama_model_params", layout.model, (*_MODEL_DEFAULTS, "devices", "tensor_split")),
        ("llama_context_params", layout.context, (*_CONTEXT_DEFAULTS, "cb_eval")),
    ):
        declared = {field[0] for field in structure._fields_}
        if missing := [field for field in fields if field not in declared]:
            return f"{name} has no {', '.join(missing)}"
        if ctypes.sizeof(structure) > _SPARE_BYTES:
            return f"{name} has {ctypes.sizeof(structure)} bytes"
    return ""


def _defect(layout: StructLayout, found: Mapping[str, bytes]) -> str:
    """The reason why bytes of default parameters do not match a layout, or ""."""
    for name, structure, defaults in (
        ("llama_model_params", layout.model, _MODEL_DEFAULTS),
        ("llama_context_params", layout.context, _CONTEXT_DEFAULTS),
    ):
        types: dict[str, Any] = {field[0]: field[1] for field in structure._fields_}
        size = ctypes.sizeof(structure)
        for field, value in defaults.items():
            begin = getattr(structure, field).offset
            want = bytes(types[field](value))
            if found[name][begin : begin + len(want)] != want:
                return f"unknown layout of {name}: its {field} is not {value} ({found[name][:size].hex()})"
    return ""


def _require_traits(functions: Any) -> None:
    """Raises EngineError if types have other numbers than the known ones."""
    functions.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    functions.ggml_get_type_traits.argtypes = [ctypes.c_int]
    for number, expected in ((2, (b"q4_0", 32, 18)), (8, (b"q8_0", 32, 34)), (14, (b"q6_K", 256, 210))):
        traits = functions.ggml_get_type_traits(number).contents
        if (traits.type_name, traits.blck_size, traits.type_size) != expected or not traits.is_quantized:
            raise EngineError(f"unknown layout of ggml_type_traits, or other numbers of types (type {number})")


def _default(function: Any) -> bytes:
    """The result of a function, read into more room than it needs, so that a longer structure does no harm."""
    function.restype = _Oversized
    function.argtypes = []
    return bytes(function().raw)
