"""Reads the structures of llama.cpp's functions from the source of a Python package that ships the library.

The package declares them for ctypes. Its source is read and not imported: an import would run the package and all that
it needs.
"""

from __future__ import annotations

import ast
import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from exo_mesh.errors import EngineError
from exo_mesh_llamacpp.layouts import ContextParams, LlamaBatch, ModelParams, StructLayout, layout_of_classes, unusable

MAX_BYTES = 4 * 2**20
"""Largest source that is read; llama-cpp-python 0.3.36 has 189 kB."""

_MAX_ALIASES = 8
"""Longest chain of names for one type."""

_SCALARS = {
    name: getattr(ctypes, name)
    for name in (
        *("c_bool", "c_int8", "c_uint8", "c_int16", "c_uint16", "c_int32", "c_uint32", "c_int64", "c_uint64"),
        *("c_int", "c_uint", "c_long", "c_ulong", "c_longlong", "c_ulonglong", "c_size_t", "c_ssize_t"),
        *("c_float", "c_double", "c_void_p", "c_char_p"),
    )
}
_POINTERS = ("POINTER", "CFUNCTYPE", "WINFUNCTYPE")

_NAMES = {"llama_model_params": ModelParams, "llama_context_params": ContextParams, "llama_batch": LlamaBatch}


@cache
def declared_layout(source: Path) -> StructLayout:
    """The layout that a source declares. Raises EngineError if it declares none that this engine can use."""
    try:
        if source.stat().st_size > MAX_BYTES:
            raise EngineError(f"{source} is larger than {MAX_BYTES} bytes")
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError) as exc:
        raise EngineError(f"{source} cannot be read: {exc}") from exc
    types = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in _NAMES}
    made = {}
    for name in _NAMES:
        if name not in classes:
            raise EngineError(f"{source} declares no {name}")
        made[name] = type(name, (ctypes.Structure,), {"_fields_": _fields(classes[name], types, source)})
    if layout_of_classes(made["llama_batch"]) != layout_of_classes(LlamaBatch):
        raise EngineError(f"{source} declares a llama_batch that this engine does not know")
    layout = StructLayout(str(source), made["llama_model_params"], made["llama_context_params"])
    if why := unusable(layout):
        raise EngineError(f"{source}: {why}")
    return layout


def _fields(declared: ast.ClassDef, types: dict[str, ast.expr], source: Path) -> list[tuple[str, Any]]:
    """The fields of a class with a literal `_fields_`."""
    for node in declared.body:
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "_fields_":
            continue
        found: list[tuple[str, Any]] = []
        for item in node.value.elts if isinstance(node.value, ast.List) else ():
            match item:
                case ast.Tuple(elts=[ast.Constant(value=str(name)), kind]):
                    found.append((name, _type(kind, types, f"{source}: {declared.name}.{name}")))
                case _:
                    raise EngineError(f"{source}: a field of {declared.name} is not a name and a type")
        if len({name for name, _ in found}) == len(found) > 0:
            return found
    raise EngineError(f"{source} declares no fields of {declared.name}")


def _type(kind: ast.expr, types: dict[str, ast.expr], where: str) -> Any:
    """The type of a field; all pointers are c_void_p."""
    for _ in range(_MAX_ALIASES):
        match kind:
            case ast.Attribute(value=ast.Name(id="ctypes"), attr=name) if name in _SCALARS:
                return _SCALARS[name]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="ctypes"), attr=name)) if name in _POINTERS:
                return ctypes.c_void_p
            case ast.Name(id=name) if name in types:
                kind = types[name]
            case _:
                break
    raise EngineError(f"{where} has a type that is not known: {ast.unparse(kind)[:80]}")
