"""Headers of GGUF files are read exactly, every defect is named, and what is unusual in size is refused early."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.errors import ModelError
from exo_mesh.weights import gguf as gguf_module
from exo_mesh.weights.gguf import (
    BLOCKS,
    GgufArray,
    IncompleteHeaderError,
    num_bytes_of,
    parse_gguf,
    read_gguf,
)
from tests.support.gguf_bytes import ARRAY, BOOL, F32, I32, TEXT, U32, U64, RawTensor, gguf_bytes, text, value

F32_TENSOR, Q8_0 = 0, 8
FOUR = RawTensor("t", [4], F32_TENSOR, b"abcdefghijklmnop")


def parsed(raw: bytes) -> Any:
    return parse_gguf(raw, Path("m/x.gguf"), len(raw))


def test_metadata_of_every_kind_is_read() -> None:
    header = parsed(
        gguf_bytes(
            {
                "general.architecture": value(TEXT, "llama"),
                "n": value(U32, 7),
                "big": value(U64, 2**40),
                "less": value(I32, -3),
                "eps": value(F32, 0.5),
                "yes": value(BOOL, True),
                "tokens": value(ARRAY, (TEXT, ["a", "", "▁b"])),
                "scores": value(ARRAY, (F32, [0.5, -1.0])),
            }
        )
    )
    assert header.architecture == "llama"
    assert (header.integer("n"), header.integer("big"), header.integer("less")) == (7, 2**40, -3)
    assert header.number("eps") == 0.5 and header.flag("yes") is True
    assert list(header.array("tokens").texts()) == ["a", "", "▁b"]
    assert header.array("scores").numbers() == (0.5, -1.0)
    assert header.integer("absent") is None and header.text("absent") == "" and header.array("absent") is None


def test_a_value_of_another_type_is_refused_by_its_key() -> None:
    header = parsed(gguf_bytes({"n": value(U32, 7), "t": value(TEXT, "x"), "a": value(ARRAY, (U32, [1]))}))
    for key, reader in (("n", header.text), ("t", header.integer), ("t", header.number), ("n", header.flag)):
        with pytest.raises(ModelError, match=f"^{key} is "):
            reader(key)
    with pytest.raises(ModelError, match=r"^t is .*, not an array"):
        header.array("t")
    with pytest.raises(ModelError, match="a holds numbers"):
        list(header.array("a").texts())


def test_tensors_are_placed_from_the_start_of_the_file(tmp_path: Path) -> None:
    second = RawTensor("q", [32, 2, 3], Q8_0, bytes(range(204)))
    raw = gguf_bytes({}, [FOUR, second])
    (tmp_path / "x.gguf").write_bytes(raw)
    table = read_gguf(tmp_path / "x.gguf").table
    assert raw[table["t"].start : table["t"].stop] == FOUR.data
    assert raw[table["q"].start : table["q"].stop] == second.data
    assert table["q"].shape == (3, 2, 32) and table["q"].dtype == "Q8_0"
    assert table["t"].file == tmp_path / "x.gguf"


def test_the_alignment_of_the_metadata_is_used() -> None:
    entries = {"general.alignment": value(U32, 256)}
    raw = gguf_bytes(entries, [FOUR, RawTensor("u", [1], F32_TENSOR, b"wxyz")], alignment=256)
    header = parsed(raw)
    assert header.table["u"].start % 256 == 0 and raw[header.table["u"].start :][:4] == b"wxyz"
    assert header.num_bytes == header.table["t"].start


def test_the_table_agrees_with_the_reference_reader(tmp_path: Path) -> None:
    reference = pytest.importorskip("gguf")
    from tests.support.tiny_gguf import write_tiny_gguf

    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    header, reader = read_gguf(file), reference.GGUFReader(file)
    assert list(header.table) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.table[tensor.name]
        assert info.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert (info.start, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)
    for key, own in header.metadata.items():
        theirs = reader.fields[key].contents()
        mine = own if not isinstance(own, GgufArray) else list(own.texts() if own.is_text else own.numbers())
        assert mine == theirs, key


def test_block_sizes_are_those_of_the_reference() -> None:
    reference = pytest.importorskip("gguf")
    for kind, (elements, num_bytes) in reference.GGML_QUANT_SIZES.items():
        assert BLOCKS[int(kind)] == (kind.name, elements, num_bytes)


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [("F32", (), 4), ("F16", (3,), 6), ("Q4_0", (2, 64), 72), ("Q4_K", (3, 256), 432), ("Q6_K", (0, 256), 0)],
)
def test_bytes_of_a_tensor_follow_from_its_blocks(dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
    assert num_bytes_of(dtype, shape) == num_bytes


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "it ends in its header"),
        (b"GGUF", "it ends in its header"),
        (gguf_bytes(magic=b"PK\3\4"), "not a GGUF file"),
        (gguf_bytes(version=1), "version 1 of GGUF"),
        (gguf_bytes(version=0x03000000), "big-endian"),
        (gguf_bytes(num_tensors=2**63), "tensors, more than"),
        (gguf_bytes(num_entries=2**63), "entries, more than"),
        (gguf_bytes(num_tensors=1)[:24], "ends in its header"),
        (gguf_bytes(num_entries=1)[:24], "ends in its header"),
        (gguf_bytes([("k", value(U32, 1)), ("k", value(U32, 1))]), "two entries k"),
        (gguf_bytes({"": value(U32, 1)}), "a key that cannot be used"),
        (gguf_bytes({"a\nb": value(U32, 1)}), "a key that cannot be used"),
        (gguf_bytes({"k" * 2000: value(U32, 1)}), "a key of its metadata has 2000 bytes"),
        (gguf_bytes({"k": struct.pack("<I", 13)}), "k has the unknown type 13"),
        (gguf_bytes({"k": struct.pack("<I", TEXT) + text(b"\xff\xfe")}), "k is not UTF-8"),
        (gguf_bytes({"k": struct.pack("<I", TEXT) + text("", 2**62)}), "k has 4611686018427387904 bytes"),
        (gguf_bytes({"k": struct.pack("<IIQ", ARRAY, U32, 2**60)}), "k has 1152921504606846976 elements"),
        (gguf_bytes({"k": struct.pack("<IIQ", ARRAY, ARRAY, 1)}), "k is an array of arrays"),
        (gguf_bytes({"k": struct.pack("<IIQ", ARRAY, 99, 1)}), "k has elements of the unknown type 99"),
        (gguf_bytes({"k": struct.pack("<IIQ", ARRAY, TEXT, 1) + text("", 2**40)}), "k has a text of"),
        (gguf_bytes({"k": struct.pack("<IIQ", ARRAY, TEXT, 2) + text("a")})[:-21], "ends in its header"),
        (gguf_bytes({"general.alignment": value(U32, 0)}), "general.alignment is 0"),
        (gguf_bytes({"general.alignment": value(U32, 48)}), "general.alignment is 48"),
        (gguf_bytes({"general.alignment": value(U32, 2**31)}), "general.alignment is 2147483648"),
        (gguf_bytes({"general.alignment": value(BOOL, True)}), "general.alignment is true"),
        (gguf_bytes((), [FOUR, FOUR]), "two tensors called t"),
        (gguf_bytes((), [RawTensor("", [4], 0, b"")]), "a tensor whose name cannot be used"),
        (gguf_bytes((), [RawTensor("a\0b", [4], 0, b"")]), "a tensor whose name cannot be used"),
        (gguf_bytes((), [RawTensor("t" * 200, [4], 0, b"")]), "the name of a tensor has 200 bytes"),
        (gguf_bytes((), [RawTensor("t", [1] * 5, 0, b"")]), "t has 5 dimensions"),
        (gguf_bytes((), [RawTensor("t", [2**40, 2**40], 0, b"")]), "t has the impossible shape"),
        (gguf_bytes((), [RawTensor("t", [0, 2**64 - 1], 0, b"")]), "t has the impossible shape"),
        (gguf_bytes((), [RawTensor("t", [4], 77, b"")]), "t has the unknown type 77"),
        (gguf_bytes((), [RawTensor("t", [4], 4, b"")]), "t has the unknown type 4"),
        (gguf_bytes((), [RawTensor("t", [33], Q8_0, b"")]), "t: its width of 33 is not made of blocks of 32"),
        (gguf_bytes((), [RawTensor("t", [], Q8_0, b"")]), "t: its width of 1 is not made of blocks"),
        (gguf_bytes((), [RawTensor("t", [4], 0, b"a" * 16, 32)]), "t starts at byte 32, expected 0"),
        (gguf_bytes((), [FOUR, RawTensor("u", [4], 0, b"a" * 16, 0)]), "u starts at byte 0, expected 32"),
        (gguf_bytes((), [RawTensor("t", [400], 0, b"a" * 16)]), "t ends at byte .* cut short"),
    ],
)
def test_a_defect_of_a_gguf_file_is_named(tmp_path: Path, raw: bytes, says: str) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(raw)
    with pytest.raises(ModelError, match=says) as caught:
        read_gguf(file)
    assert str(caught.value).startswith(f"{tmp_path.name}: bad.gguf")
    assert str(tmp_path) not in str(caught.value) and not isinstance(caught.value, IncompleteHeaderError)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        read_gguf(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(ModelError, match="is a directory"):
        read_gguf(tmp_path / "x.gguf")


def test_every_beginning_of_a_header_asks_for_more_and_the_whole_one_is_enough() -> None:
    raw = gguf_bytes({"n": value(U32, 7), "tokens": value(ARRAY, (TEXT, ["a", "b"]))}, [FOUR])
    header = parsed(raw)
    for length in range(header.num_bytes - 32):
        with pytest.raises(IncompleteHeaderError):
            parse_gguf(raw[:length], Path("m/x.gguf"), len(raw))
    assert parse_gguf(raw[: header.num_bytes], Path("m/x.gguf"), len(raw)).table == header.table


def test_a_header_longer_than_the_first_read_is_read_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "FIRST_READ_BYTES", 64)
    raw = gguf_bytes({"tokens": value(ARRAY, (TEXT, [f"token {i}" for i in range(500)]))}, [FOUR])
    (tmp_path / "x.gguf").write_bytes(raw)
    header = read_gguf(tmp_path / "x.gguf")
    assert list(header.array("tokens").texts())[-1] == "token 499" and "t" in header.table  # type: ignore[union-attr]


def test_a_header_above_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "FIRST_READ_BYTES", 64)
    monkeypatch.setattr(gguf_module, "MAX_HEADER_BYTES", 1000)
    raw = gguf_bytes({"tokens": value(ARRAY, (TEXT, [f"token {i}" for i in range(500)]))}, [FOUR])
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match="its header has more than 1000 bytes"):
        read_gguf(tmp_path / "x.gguf")


def test_a_part_is_read_under_the_name_of_the_whole_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf.part").write_bytes(gguf_bytes({}, [FOUR]))
    assert read_gguf(tmp_path / "x.gguf").table["t"].num_bytes == 16


@given(st.binary(max_size=200), st.integers(0, 400))
def test_damaged_bytes_are_read_or_refused_but_never_crash(noise: bytes, place: int) -> None:
    entries = {"n": value(U32, 7), "tokens": value(ARRAY, (TEXT, ["a", "b"])), "a": value(ARRAY, (F32, [1, 2]))}
    raw = bytearray(gguf_bytes(entries, [FOUR, RawTensor("q", [32], Q8_0, bytes(34))]))
    raw[place : place + len(noise)] = noise
    try:
        header = parsed(bytes(raw))
    except ModelError:
        return
    assert all(info.stop <= len(raw) for info in header.table.values())


def test_numbers_of_an_array_are_those_that_numpy_reads() -> None:
    values = np.random.default_rng(0).standard_normal(100).astype("<f4")
    header = parsed(gguf_bytes({"a": value(ARRAY, (F32, values.tolist()))}))
    assert header.array("a").numbers() == tuple(values.tolist())
