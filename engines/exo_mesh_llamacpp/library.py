"""Opens the llama.cpp library, and declares the functions that this engine calls. Used in a runner only."""

from __future__ import annotations

import ctypes
import logging
import os
from collections import deque
from ctypes import c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

from exo_mesh.errors import EngineError
from exo_mesh_llamacpp.declared import declared_layout
from exo_mesh_llamacpp.devices import BackendDevice, list_devices
from exo_mesh_llamacpp.layouts import (
    KNOWN_LAYOUTS,
    ContextParams,
    LlamaBatch,
    LogCallback,
    ModelParams,
    StructLayout,
    TypeTraits,
    layout_of,
    layout_of_classes,
)
from exo_mesh_llamacpp.library_file import REMEDY, LibraryFile

logger = logging.getLogger(__name__)

_KEPT_LINES = 40
"""Last lines of the library's log, from which errors take their reason."""

_WARNING = 3
"""GGML_LOG_LEVEL_WARN; errors are 4."""

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LogCallback, c_void_p]),
    "llama_version": (c_char_p, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
    "llama_model_load_from_file_ptr": (c_void_p, [c_void_p, ModelParams]),
    "llama_model_free": (None, [c_void_p]),
    "llama_model_size": (ctypes.c_uint64, [c_void_p]),
    "llama_model_n_embd": (c_int32, [c_void_p]),
    "llama_model_n_embd_inp": (c_int32, [c_void_p]),
    "llama_model_n_head": (c_int32, [c_void_p]),
    "llama_model_n_layer": (c_int32, [c_void_p]),
    "llama_model_rope_type": (c_int, [c_void_p]),
    "llama_model_n_swa": (c_int32, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_model_is_recurrent": (c_bool, [c_void_p]),
    "llama_model_is_hybrid": (c_bool, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextParams]),
    "llama_free": (None, [c_void_p]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, LlamaBatch]),
    "llama_synchronize": (None, [c_void_p]),
    "llama_get_logits": (c_void_p, [c_void_p]),
    "llama_set_embeddings": (None, [c_void_p, c_bool]),
    "llama_get_embeddings": (ctypes.POINTER(c_float), [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_memory_seq_cp": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_pos_max": (c_int32, [c_void_p, c_int32]),
    "llama_state_seq_get_size": (c_size_t, [c_void_p, c_int32]),
    "llama_state_seq_get_data": (c_size_t, [c_void_p, c_void_p, c_size_t, c_int32]),
    "llama_state_seq_set_data": (c_size_t, [c_void_p, c_void_p, c_size_t, c_int32]),
    "ggml_get_name": (c_char_p, [c_void_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_backend_dev_get": (c_void_p, [c_size_t]),
    "ggml_backend_dev_name": (c_char_p, [c_void_p]),
    "ggml_backend_dev_description": (c_char_p, [c_void_p]),
    "ggml_backend_dev_type": (c_int, [c_void_p]),
    "ggml_backend_dev_memory": (None, [c_void_p, ctypes.POINTER(c_size_t), ctypes.POINTER(c_size_t)]),
}

_PARTS: dict[str, tuple[Any, list[Any]]] = {
    "llama_state_seq_get_size_ext": (c_size_t, [c_void_p, c_int32, c_uint32]),
    "llama_state_seq_get_data_ext": (c_size_t, [c_void_p, c_void_p, c_size_t, c_int32, c_uint32]),
    "llama_state_seq_set_data_ext": (c_size_t, [c_void_p, c_void_p, c_size_t, c_int32, c_uint32]),
}
"""Functions that save and restore only what cannot be cut back. Some builds lack them."""

_ASKED = ("llama_model_default_params", "llama_context_default_params", "ggml_get_type_traits")
"""Functions from which the layout is found before they are declared."""

_opened: dict[str, Library] = {}


class Library:
    """An opened library whose layout is known. `call` has the declared functions as attributes; its parameters have at
    least the fields of ModelParams and ContextParams that are set here."""

    def __init__(self, file: LibraryFile) -> None:
        """Raises EngineError if the file is no such library, or one of an unknown layout."""
        # without this, a failed assertion of the library starts a debugger before it ends the process
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        try:
            self.call: Any = ctypes.CDLL(str(file.path))
            for name in (*_SIGNATURES, *_ASKED):
                getattr(self.call, name)
        except OSError as exc:
            raise EngineError(f"{file.path} is not a library that can be opened here: {exc}") from exc
        except AttributeError as exc:
            raise EngineError(f"{file.path} does not export what this engine needs: {exc}") from exc
        try:
            layout = layout_of(self.call, declared_layout(file.structures) if file.structures else None)
        except EngineError as exc:
            raise EngineError(f"{file.version}: {exc}; {REMEDY} installs a version that is known") from exc
        self.saves_parts = all(hasattr(self.call, name) for name in _PARTS)
        _declare(self.call, layout, _SIGNATURES | (_PARTS if self.saves_parts else {}))
        # without giving up Python's lock, which takes longer than the function
        self.get_name: Any = ctypes.PYFUNCTYPE(c_char_p, c_void_p)(("ggml_get_name", self.call))
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log = LogCallback(self._take_line)
        self.call.llama_log_set(self._log, None)
        _load_backends(self.call, file)
        self.call.llama_backend_init()
        self.fingerprint = str(file.path)
        """What tells this library from others in this process."""
        self.build = f"{file.version} ({self.call.llama_version().decode(errors='replace')})"

    def forget_log(self) -> None:
        """Forget what the library has logged so far."""
        self._lines.clear()

    def last_error(self) -> str:
        """The library's last warnings and errors since `forget_log`, in one line; "" if there are none."""
        return "; ".join(self._lines)

    def to_float(self, type_number: int, source: int, target: int, count: int) -> None:
        """Dequantise `count` values at address `source` into float32 at address `target`."""
        traits: TypeTraits = self.call.ggml_get_type_traits(type_number).contents
        traits.to_float(source, target, count)

    def devices(self) -> tuple[BackendDevice, ...]:
        """The devices that the library computes on, with their memory now."""
        return list_devices(self.call)

    def has_gpu(self) -> bool:
        """Whether the library has a device of its own besides the CPU."""
        return any(device.is_gpu for device in self.devices())

    def _take_line(self, level: int, text: bytes, _user: int | None) -> None:
        line = text.decode(errors="replace").strip()
        if not line:
            return
        if level >= _WARNING:
            self._lines.append(line)
        logger.debug("%s", line)


def _declare(call: Any, layout: StructLayout, signatures: dict[str, tuple[Any, list[Any]]]) -> None:
    """Declare the functions with the structures of a layout."""
    classes = {ModelParams: layout.model, ContextParams: layout.context}
    for name, (result, arguments) in signatures.items():
        function = getattr(call, name)
        function.restype, function.argtypes = result, [classes.get(kind, kind) for kind in arguments]
    call.llama_model_default_params.restype = layout.model
    call.llama_context_default_params.restype = layout.context
    known = [layout_of_classes(one.model) + layout_of_classes(one.context) for one in KNOWN_LAYOUTS]
    if layout_of_classes(layout.model) + layout_of_classes(layout.context) not in known:
        logger.info("%s declares a layout of its own, which this version of exo-mesh does not know", layout.name)


def _load_backends(call: Any, file: LibraryFile) -> None:
    """Load the backends that lie beside a library as files of their own. Such a library begins without any device."""
    if call.ggml_backend_dev_count() or not hasattr(call, "ggml_backend_load_all_from_path"):
        return
    call.ggml_backend_load_all_from_path.restype = None
    call.ggml_backend_load_all_from_path.argtypes = [c_char_p]
    call.ggml_backend_load_all_from_path(os.fsencode(file.path.parent))


def open_library(file: LibraryFile | None) -> Library:
    """The library of a file, opened once per process. Raises EngineError."""
    if file is None:
        raise EngineError(f"llama.cpp is not installed; {REMEDY}")
    key = str(file.path)
    if key not in _opened:
        _opened[key] = Library(file)
    return _opened[key]
