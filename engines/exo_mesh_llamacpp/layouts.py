"""The structures of llama.cpp's C functions, and the check that a library really uses them.

llama.cpp changes these structures between releases, and a wrong layout would compute nonsense without any error. A
library is used only if the bytes of its default parameters are those of a known layout.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_bool, c_char_p, c_float, c_int8, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_void_p
from typing import Any

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


assert ctypes.sizeof(c_int8) == 1


def layout_defect(functions: Any) -> str:
    """The reason why the structures above are not those of a library, or "". functions: the opened library.

    Both default results are read into more room than they need, so that a longer structure does no harm.
    """
    if struct.calcsize("P") != POINTER_BYTES:
        return "only 64-bit machines are supported"
    model = _default(functions.llama_model_default_params)
    words = struct.unpack_from("<4i", model, 16)
    if words != (-1, 1, -1, 1) or model[72:78] != bytes((0, 0, 1, 0, 0, 0)):
        return f"unknown layout of llama_model_params ({model[:80].hex()})"
    context = _default(functions.llama_context_default_params)
    counts = struct.unpack_from("<9I", context, 0)
    kinds = struct.unpack_from("<5i", context, 36)
    floats = struct.unpack_from("<6f", context, 56)
    types = struct.unpack_from("<2i", context, 104)
    if counts != (512, 2048, 512, 1, 0, 0, 1, 4, 4) or kinds != (0, -1, -1, -1, -1):
        return f"unknown layout of llama_context_params ({context[:56].hex()})"
    if floats != (0.0, 0.0, -1.0, -1.0, -1.0, -1.0) or types != (1, 1) or context[136:142] != bytes((0, 1, 1, 1, 1, 0)):
        return f"unknown layout of llama_context_params ({context[56:168].hex()})"
    return _traits_defect(functions)


def _traits_defect(functions: Any) -> str:
    functions.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    functions.ggml_get_type_traits.argtypes = [ctypes.c_int]
    for number, expected in ((2, (b"q4_0", 32, 18)), (8, (b"q8_0", 32, 34)), (14, (b"q6_K", 256, 210))):
        traits = functions.ggml_get_type_traits(number).contents
        if (traits.type_name, traits.blck_size, traits.type_size) != expected or not traits.is_quantized:
            return f"unknown layout of ggml_type_traits, or other numbers of types (type {number})"
    return ""


def _default(function: Any) -> bytes:
    function.restype = _Oversized
    function.argtypes = []
    return bytes(function().raw)
