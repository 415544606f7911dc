"""The library of llama-cpp-python is used with the structures that the package declares.

The package here is made for each test: the library of the installed wheel, and declarations of its structures.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from exo_mesh_llamacpp import library, library_file, provider
from exo_mesh_llamacpp.declared import MAX_BYTES, declared_layout
from exo_mesh_llamacpp.layouts import (
    ContextParams,
    LlamaBatch,
    ModelParams,
    ShortContextParams,
    layout_of,
    layout_of_classes,
)
from exo_mesh_llamacpp.library_file import chosen_library, packaged_library

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageInput
from exo_mesh.errors import EngineError
from tests.support.checkpoints import TinyModel, write_checkpoint

needs_library = pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed")

HEAD = """
import ctypes
from elsewhere import everything

raise RuntimeError("this source is read, not run")

llama_pos = ctypes.c_int32
progress = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)
"""
WORDS = {
    ctypes.c_void_p: "ctypes.POINTER(ctypes.c_int8)",
    ctypes.c_int32: "ctypes.c_int",
    ctypes.c_uint32: "ctypes.c_uint32",
    ctypes.c_size_t: "ctypes.c_size_t",
    ctypes.c_float: "ctypes.c_float",
    ctypes.c_bool: "ctypes.c_bool",
}


def source(
    model: type[ctypes.Structure] = ModelParams,
    context: type[ctypes.Structure] = ContextParams,
    batch: type[ctypes.Structure] = LlamaBatch,
) -> str:
    """A module that declares these structures."""
    parts = [HEAD]
    for name, structure in (("llama_model_params", model), ("llama_context_params", context), ("llama_batch", batch)):
        fields = "".join(f'        ("{field[0]}", {WORDS[field[1]]}),\n' for field in structure._fields_)
        parts.append(f'class {name}(ctypes.Structure):\n    """Words."""\n\n    _fields_ = [\n{fields}    ]\n')
    return "\n\n".join(parts)


Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs llama-cpp-python with a source of its structures, and with the library of the installed wheel."""
    site = tmp_path / "site"
    packaged = packaged_library()
    assert packaged is not None

    def make(declarations: str) -> None:
        (site / "llama_cpp" / "lib").mkdir(parents=True)
        (site / "llama_cpp" / "__init__.py").write_text('raise RuntimeError("nobody imports this")\n')
        (site / "llama_cpp" / "llama_cpp.py").write_text(declarations)
        (site / "llama_cpp" / "lib" / "libllama.so").symlink_to(packaged.path)
        info = site / "llama_cpp_python-0.3.36.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.36\n")
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()

    opened_before = dict(library._opened)
    monkeypatch.setattr(library, "_opened", {})
    packaged_library.cache_clear()
    yield make
    packaged_library.cache_clear()
    for one in opened_before.values():
        one.call.llama_log_set(one._log, None)  # the same file was opened again, and must not call what is gone
    assert "llama_cpp" not in sys.modules


def logits(directory: Path, **options: str) -> np.ndarray:
    stage = provider.create()
    try:
        stage.load(LoadRequest(Shard("tiny", 0, 2, 2), directory, 64, {"threads": "1", **options}), lambda *_: None)
        stage.insert(0, 16)
        output = stage.forward(StageInput((Row(0, 0, 5, 5),), (1, 2, 3, 4, 5), {}))
        assert output.logits is not None
        return output.logits.copy()
    finally:
        stage.close()


@needs_library
def test_its_library_computes_what_that_of_the_wheel_computes(install: Install, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", TinyModel(layers=2))
    want = logits(directory)
    install(source())
    found = chosen_library({"library": "llama_cpp"})
    assert found is not None and found.version == "llama-cpp-python 0.3.36"
    assert np.array_equal(logits(directory, library="llama_cpp"), want)


@needs_library
def test_it_is_used_where_the_wheel_is_not_installed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_file, "_of_wheel", lambda: None)
    packaged_library.cache_clear()
    assert not provider.availability().available
    install(source())
    packaged_library.cache_clear()
    look = provider.availability()
    assert look.available and look.reason.startswith("llama-cpp-python 0.3.36")


@needs_library
def test_the_wheel_goes_before_it(install: Install) -> None:
    install(source())
    found = packaged_library()
    assert found is not None and found.version.startswith("xllamacpp")


class Unshifted(ctypes.Structure):
    """Parameters of a context with a word between others."""

    _fields_ = [*ContextParams._fields_[:9], ("between", ctypes.c_int32), *ContextParams._fields_[9:]]


class OtherModel(ctypes.Structure):
    """Parameters of a model as they were before load_mode."""

    _fields_ = [field for field in ModelParams._fields_ if field[0] != "load_mode"]


class OtherBatch(ctypes.Structure):
    """A batch with other fields."""

    _fields_ = LlamaBatch._fields_[:-1]


@needs_library
@pytest.mark.parametrize("context", [ShortContextParams, Unshifted])
def test_a_library_that_does_not_have_the_declared_layout_is_refused(
    install: Install, tmp_path: Path, context: type[ctypes.Structure]
) -> None:
    directory = write_checkpoint(tmp_path / "model", TinyModel(layers=2))
    install(source(context=context))
    with pytest.raises(EngineError, match=r"llama-cpp-python 0\.3\.36: unknown layout of llama_context_params"):
        logits(directory, library="llama_cpp")


@needs_library
@pytest.mark.parametrize(
    ("declarations", "says"),
    [
        (source(model=OtherModel), "llama_model_params has no load_mode"),
        (source(batch=OtherBatch), "a llama_batch that this engine does not know"),
        ("import ctypes", "declares no llama_model_params"),
        ("class", "cannot be read"),
        ("\0", "cannot be read"),
        (source().replace('("devices", ctypes.POINTER(ctypes.c_int8))', '("devices", Handle)'), "not known: Handle"),
        (source().replace('("devices", ctypes.POINTER(ctypes.c_int8))', "*others"), "is not a name and a type"),
        (source().replace("_fields_ = [", "_fields_ = list() or ["), "declares no fields of llama_model_params"),
        ("#" * (MAX_BYTES + 1), "is larger than"),
    ],
)
def test_what_declares_no_usable_structures_makes_the_engine_unavailable(
    install: Install, declarations: str, says: str
) -> None:
    install(declarations)
    look = provider.configured({"library": "llama_cpp"}).availability()
    assert not look.available and says in look.reason


def test_names_of_types_are_followed(tmp_path: Path) -> None:
    text = (
        source().replace('("n_ctx", ctypes.c_uint32)', '("n_ctx", second)')
        + "\nfirst = ctypes.c_uint32\nsecond = first"
    )
    (tmp_path / "good.py").write_text(text)
    found = declared_layout(tmp_path / "good.py")
    assert layout_of_classes(found.context) == layout_of_classes(ContextParams)
    (tmp_path / "loop.py").write_text(text.replace("first = ctypes.c_uint32", "first = second"))
    with pytest.raises(EngineError, match=r"llama_context_params\.n_ctx has a type that is not known"):
        declared_layout(tmp_path / "loop.py")


class Functions:
    """A library that returns the given bytes as its default parameters."""

    def __init__(self, model: bytes, context: bytes) -> None:
        opened = library.open_library(packaged_library())
        self.llama_model_default_params = Returned(model)
        self.llama_context_default_params = Returned(context)
        self.ggml_get_type_traits = opened.call.ggml_get_type_traits


class Returned:
    """A function that returns bytes."""

    def __init__(self, held: bytes) -> None:
        self._held, self.restype = held, ctypes.Structure

    def __call__(self) -> ctypes.Structure:
        return self.restype.from_buffer_copy(self._held.ljust(ctypes.sizeof(self.restype), b"\xaa"))


@needs_library
def test_the_layout_without_the_reserved_word_is_known() -> None:
    opened = library.open_library(packaged_library())
    model, context = bytes(opened.call.llama_model_default_params()), bytes(opened.call.llama_context_default_params())
    begin = ContextParams.reserved.offset
    short = context[:begin] + context[begin + 8 :]
    assert layout_of(Functions(model, context)).context is ContextParams
    assert layout_of(Functions(model, short)).context is ShortContextParams
    for at in (0, 12, 28, 52, 64, 104, 137):
        wrong = bytearray(context)
        wrong[at] ^= 1
        with pytest.raises(EngineError, match="unknown layout of llama_context_params"):
            layout_of(Functions(model, bytes(wrong)))
    for at in (16, 24, 74):
        wrong = bytearray(model)
        wrong[at] ^= 1
        with pytest.raises(EngineError, match="unknown layout of llama_model_params"):
            layout_of(Functions(bytes(wrong), context))


DEPRECATED = """
    llama_add_bos_token llama_add_eos_token llama_free_model llama_load_model_from_file llama_n_ctx_train llama_n_embd
    llama_n_head llama_n_layer llama_n_vocab llama_new_context_with_model llama_sampler_init_grammar_lazy
    llama_set_warmup llama_token_bos llama_token_cls llama_token_eos llama_token_eot llama_token_fim_mid
    llama_token_fim_pad llama_token_fim_pre llama_token_fim_rep llama_token_fim_sep llama_token_fim_suf
    llama_token_get_attr llama_token_get_score llama_token_get_text llama_token_is_control llama_token_is_eog
    llama_token_nl llama_token_pad llama_token_sep llama_vocab_cls
"""
"""What llama.h of version 0.5 marks as deprecated; 1.0 has none of it."""


def test_no_function_that_llama_cpp_removes_is_called() -> None:
    assert not {*DEPRECATED.split()} & {*library._SIGNATURES, *library._ASKED}
    named = re.compile(rf"\b({'|'.join(DEPRECATED.split())})\b")
    sources = Path(library.__file__).parent.rglob("*.py")
    assert [f"{path.name}: {found[0]}" for path in sources if (found := named.search(path.read_text()))] == []
