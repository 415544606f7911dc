"""The readers of tensors whose values are not simply the numbers in a file."""

from __future__ import annotations

from exo_mesh.weights.gguf_lines import GgufLines, needs_conversion
from exo_mesh.weights.packed.lines import PackedLines
from exo_mesh.weights.packed.tensors import PackedTensor
from exo_mesh.weights.safetensors import TensorInfo

LineReader = GgufLines | PackedLines


def line_reader(name: str, info: TensorInfo) -> LineReader | None:
    """The reader of a tensor of a GGUF file, or of a quantised checkpoint; None for plain numbers. Raises ModelError
    naming file and tensor if its type cannot be read."""
    if isinstance(info, PackedTensor):
        return PackedLines(name, info)
    if not needs_conversion(info):
        return None
    reader = GgufLines(name, info)
    reader.check()
    return reader
