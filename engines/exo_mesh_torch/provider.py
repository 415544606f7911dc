"""The provider of the torch engine, for the node. Reads files and package metadata, and imports no torch."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from exo_mesh.domain.embedding import ENCODERS
from exo_mesh.engine.contract import Availability, Compute, ModelSurvey, StageEngine
from exo_mesh.engine.floors import too_old, upgrade
from exo_mesh.weights.gguf import QUANT_METHOD
from exo_mesh.weights.packed.settings import METHODS
from exo_mesh_torch.families import TEXT_OF_FAMILIES, VISION_FAMILIES
from exo_mesh_torch.options import check_options

_REMEDY = 'pip install "exo-mesh[torch]"'

_PREFERENCE: dict[Compute, int] = {"cuda": 60, "rocm": 60, "xpu": 60, "metal": 20, "cpu": 30}
"""Between the MLX engine's preferences on Apple silicon (100) and on a Linux CPU (10), where torch is faster."""

_NODES: dict[Compute, tuple[str, ...]] = {
    "cuda": ("nvidia0", "dxg", "nvhost-gpu"),
    "rocm": ("kfd",),
    "xpu": ("dri",),
}
"""Device files below /dev without which a GPU cannot be used: of a card, of WSL, of a Jetson."""

_OWN_CACHE = frozenset({"longcat_flash", "minimax", "recurrent_gemma", "reformer", "rwkv", "xlm", "xlnet", "xlstm"})
_NO_DECODER = frozenset(
    {
        "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert",
        "data2vec-text", "electra", "ernie", "git", "marian", "mbart", "megatron-bert", "mllama", "moshi", "musicgen",
        "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "rembert", "roberta", "roberta-prelayernorm",
        "roc_bert", "roformer", "trocr", "whisper", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
"""Models in transformers' list of causal language models that are halves of other models, or have caches unlike all
others (in longcat_flash two to a layer)."""


class TorchProvider:
    name = "torch"
    kind: Literal["stage", "whole-model"] = "stage"
    quant_methods = (*METHODS, QUANT_METHOD)
    """See NamesQuantisations."""

    def availability(self) -> Availability:
        missing = [package for package in ("torch", "transformers") if util.find_spec(package) is None]
        if missing:
            return Availability(False, f"{' and '.join(missing)} not installed", _REMEDY)
        if old := too_old("torch"):
            return Availability(False, old, upgrade("torch"))
        compute, reason = find_compute(_version("torch"), _library_names(), _device_names())
        return Availability(True, reason, compute=compute, preference=_PREFERENCE[compute])

    def supports(self, architecture: str) -> bool:
        """Whether transformers has a causal language model or a supported encoder for this `model_type`, or a vision
        model that this engine runs."""
        if architecture in ENCODERS:
            return _has_family(architecture)
        if architecture in VISION_FAMILIES | TEXT_OF_FAMILIES:
            return bool(_causal_models())
        return architecture in _causal_models() and architecture not in _OWN_CACHE | _NO_DECODER

    def check_options(self, options: Mapping[str, str]) -> None:
        """See ChecksOptions."""
        check_options(options)

    def version(self) -> str:
        torch, transformers = _version("torch"), _version("transformers")
        return f"torch {torch}, transformers {transformers}" if torch and transformers else ""

    def create(self) -> StageEngine:
        from exo_mesh_torch.engine import TorchStage

        return TorchStage()

    def survey(self, model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
        """See Surveyor; uses a run on the meta device that reads headers only."""
        from exo_mesh_torch.survey import survey

        return survey(model_dir, options)


def find_compute(version: str, libraries: Iterable[str], devices: Iterable[str]) -> tuple[Compute, str]:
    """The device that torch would use, and the reason: a GPU if the wheel was built for it and its device file is
    there."""
    built, present = _wheel(version, frozenset(libraries)), frozenset(devices)
    if built == "cpu":
        return "cpu", f"torch {version} is built for CPUs"
    if built == "metal":
        return "metal", "Apple silicon"
    found = next((name for name in _NODES[built] if name in present), None)
    if found is None:
        expected = " or ".join(f"/dev/{name}" for name in _NODES[built])
        return "cpu", f"torch {version} is built for {built}, but there is no {expected}"
    return built, f"torch {version}, /dev/{found}"


def _wheel(version: str, libraries: frozenset[str]) -> Compute:
    """The device of a wheel: by the version's local part, which wheels from PyPI lack; then by the libraries in the
    wheel."""
    tag = version.partition("+")[2]
    tests: list[tuple[Compute, Callable[[str], bool], str]] = [
        ("cuda", lambda tag: tag.startswith("cu"), "torch_cuda"),
        ("rocm", lambda tag: tag.startswith("rocm"), "torch_hip"),
        ("xpu", lambda tag: tag.startswith("xpu"), "torch_xpu"),
    ]
    for compute, tagged, library in tests:
        if tagged(tag) or (not tag and any(library in name for name in libraries)):
            return compute
    return "metal" if sys.platform == "darwin" and platform.machine() == "arm64" else "cpu"


def _library_names() -> list[str]:
    root = _package_dir("torch")
    return [file.name for file in (root / "lib").iterdir()] if root and (root / "lib").is_dir() else []


def _device_names() -> list[str]:
    try:
        return [file.name for file in Path("/dev").iterdir()]
    except OSError:
        return []


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _package_dir(package: str) -> Path | None:
    spec = util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def _has_family(architecture: str) -> bool:
    """Whether transformers has a folder for a family; its name has underscores."""
    root = _package_dir("transformers")
    return root is not None and (root / "models" / architecture.replace("-", "_")).is_dir()


@cache
def _causal_models() -> frozenset[str]:
    """transformers' list of causal language models, read from its source because importing it takes seconds."""
    root = _package_dir("transformers")
    file = root / "models" / "auto" / "modeling_auto.py" if root else None
    if file is None or not file.is_file():
        return frozenset()
    table = re.search(
        r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\(\n(.*?)^\)", file.read_text(encoding="utf-8"), re.M | re.S
    )
    return frozenset(re.findall(r'\(\s*"([\w\-]+)",\s*"\w+"', table[1])) if table else frozenset()
