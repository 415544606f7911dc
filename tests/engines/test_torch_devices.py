"""What the torch engine chooses on machines that differ."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from exo_mesh_torch import devices
from exo_mesh_torch.devices import choose_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16", "bf16"])
def test_a_cpu_that_multiplies_bfloat16_keeps_it(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset({"fma", flag}))
    assert choose_dtype({}, "bfloat16", CPU) is torch.bfloat16
    assert choose_dtype({}, "float16", CPU) is torch.float32


def test_other_cpus_compute_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset({"fma", "avx512f"}))
    assert choose_dtype({}, "bfloat16", CPU) is torch.float32
    assert choose_dtype({"dtype": "bf16"}, "bfloat16", CPU) is torch.bfloat16, "what the user asks for"
    assert choose_dtype({}, "bfloat16", torch.device("cuda")) is torch.bfloat16, "a GPU keeps the checkpoint's"
