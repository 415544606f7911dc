"""Chooses the files of a repository that make a runnable model; refuses others before anything large is fetched."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from exo_mesh.base.printable import quoted
from exo_mesh.errors import FetchError
from exo_mesh.models.fetcher.conversion import older_form
from exo_mesh.models.file_server.listing import FileInfo
from exo_mesh.weights.gguf_table import is_model_file
from exo_mesh.weights.model_files import FOLDER_FILES, MAX_JSON_BYTES, MAX_TOKENIZER_BYTES
from exo_mesh.weights.names import CODE_SUFFIX, is_text_file, suffix_of
from exo_mesh.weights.safetensors import INDEX_FILE, MAX_INDEX_BYTES, SINGLE_FILE

MAX_TEXT_FILES = 64
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

DEFAULTS = (
    *("Q4_K_M", "UD-Q4_K_XL", "Q4_K_L", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *("Q5_K_M", "UD-Q5_K_XL", "Q5_K_L", "Q5_K_S", "Q5_1", "Q5_0"),
    *("Q6_K", "UD-Q6_K_XL", "Q6_K_L", "Q8_0", "UD-Q8_K_XL", "BF16", "F16", "F32"),
)
"""Quantisations of GGUF files, the preferred first: that with the best known ratio of quality to size, then larger
ones. Smaller ones must be asked for, because answers become worse."""

_INDEXES = re.compile(r".*\.index\.json")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")
_QUANTISATION = re.compile(r"(?<![A-Za-z0-9])(UD-)?(I?Q\d\w*|T?BF16|F16|F32|MXFP4\w*)(?=[.\-/])", re.IGNORECASE)
_BESIDE_GGUF = ("tokenizer.json", "generation_config.json", "LICENSE")
_LIMITS = {"tokenizer.json": MAX_TOKENIZER_BYTES, "tekken.json": MAX_TOKENIZER_BYTES, INDEX_FILE: MAX_INDEX_BYTES}


def require_runnable(name: str, files: Mapping[str, FileInfo], *, is_peer: bool = False) -> None:
    """Raises FetchError, with a remedy, if these files do not make a model that an engine could load. is_peer: a peer
    has them, which has chosen one of several GGUF models, and made the texts of it."""
    is_gguf = is_peer and any(map(is_model_file, files))
    if SINGLE_FILE not in files and INDEX_FILE not in files and not is_gguf:
        raise _without_weights(name, files)
    if "config.json" not in files:
        raise FetchError(
            f"{name} has no config.json, so it cannot be run",
            remedy="choose a repository in the layout of transformers, with config.json and tokenizer.json",
            is_final=True,
        )
    if "tokenizer.json" not in files and not older_form(files):
        raise FetchError(
            f"{name} has no tokenizer.json, which exo-mesh needs to turn text into tokens, and no file to make it from",
            remedy="choose another repository of the same model that has one (most conversions do), or make one: "
            f'`AutoTokenizer.from_pretrained("{name}").save_pretrained(DIR)` of transformers writes it; put it beside '
            "the weights in a directory below --models-dir",
            is_final=True,
        )


def text_files(files: Mapping[str, FileInfo], *, with_code: bool) -> dict[str, FileInfo]:
    """Chooses config, tokenizer and template files, and the index of the weights. with_code: Python files too."""
    chosen = {
        name: info
        for name, info in files.items()
        if (is_text_file(name) or name in FOLDER_FILES or (with_code and suffix_of(name) == CODE_SUFFIX))
        and (name == INDEX_FILE or not _INDEXES.fullmatch(name))
        and (name != INDEX_FILE or SINGLE_FILE not in files)
    }
    needed = (*_LIMITS, "config.json")
    fitting = [name for name, info in chosen.items() if info.size <= _LIMITS.get(name, MAX_JSON_BYTES)]
    too_large = next((name for name in needed if name in chosen and name not in fitting), None)
    if too_large is not None:
        raise FetchError(f"{too_large} has {chosen[too_large].size} bytes, more than the limit", is_final=True)
    return {name: files[name] for name in sorted(fitting, key=lambda name: (name not in needed, name))[:MAX_TEXT_FILES]}


def gguf_texts(files: Mapping[str, FileInfo]) -> dict[str, FileInfo]:
    """Chooses the texts of a GGUF repository that are used beside the texts made from the metadata."""
    return {name: info for name, info in text_files(files, with_code=False).items() if name in _BESIDE_GGUF}


def weight_files(name: str, files: Mapping[str, FileInfo], named: Collection[str]) -> dict[str, FileInfo]:
    """Chooses the files that hold the tensors. named: those in the index. Raises FetchError if one is missing."""
    if SINGLE_FILE not in files and not named:
        return {file: files[file] for file in sorted(files) if file.endswith(".gguf")}
    wanted = [SINGLE_FILE] if SINGLE_FILE in files else sorted(named)
    missing = next((file for file in wanted if file not in files), None)
    if missing is not None:
        raise FetchError(f"{name} has no {missing}, but its {INDEX_FILE} names it", is_final=True)
    return {file: files[file] for file in wanted}


def default_quantisation(files: Mapping[str, FileInfo]) -> str:
    """Chooses a quantisation of a repository that has only GGUF weights: the first of DEFAULTS that it has.

    Returns "" if it has none of them, or other weights.
    """
    if any(name.endswith(".safetensors") for name in files):
        return ""
    found = {one.upper() for one in _quantisations(name for name in files if is_model_file(name.rpartition("/")[2]))}
    return next((one for one in DEFAULTS if one in found), "")


def gguf_files(name: str, files: Mapping[str, FileInfo], quantisation: str) -> dict[str, FileInfo]:
    """Chooses the GGUF file of a quantisation (`Q4_K_M`), or all its shards; by base name, because some are in folders.

    Raises FetchError that lists the available quantisations.
    """
    pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quantisation)}(?![A-Za-z0-9_])", re.IGNORECASE)
    models: dict[str, list[str]] = {}
    for path in files:
        base = path.rpartition("/")[2]
        if suffix_of(base) == "gguf" and not base.startswith("mmproj"):
            models.setdefault(_SHARD.sub("", path), []).append(path)
    fitting = sorted((model for model in models if pattern.search(model.rpartition("/")[2])), key=len)
    if not fitting:
        known = _quantisations(models)
        what = f"it has {', '.join(known[:40])}" if known else "it has no GGUF files"
        raise FetchError(f"{name} has no GGUF file of {quoted(quantisation, 40)}; {what}", is_final=True)
    shards = sorted(models[fitting[0]])
    total = _SHARD.search(shards[0])
    if total is not None and int(total[1]) != len(shards):
        raise FetchError(
            f"{name} has {len(shards)} of the {int(total[1])} shards of {quantisation}: choose another quantisation",
            is_final=True,
        )
    return {path.rpartition("/")[2]: files[path] for path in shards}


def _quantisations(names: Iterable[str]) -> list[str]:
    """Returns the quantisations in the names of GGUF files, sorted."""
    return sorted({found[0] for name in names for found in [_QUANTISATION.search(name)] if found})


def _without_weights(name: str, files: Mapping[str, FileInfo]) -> FetchError:
    gguf = next((file for file in sorted(files) if file.endswith(".gguf")), None)
    if gguf is not None:
        return FetchError(
            f"{name} has its weights as GGUF only ({gguf}), perhaps in several quantisations",
            remedy="say which one: " + " or ".join(f"{name}:{one}" for one in _quantisations(files)[:4] or ["Q4_K_M"]),
            is_final=True,
        )
    pickle = next((file for file in sorted(files) if file.endswith(PICKLES)), None)
    if pickle is not None:
        return FetchError(
            f"{name} has its weights only as pickle ({pickle}), which can run any code when it is loaded",
            remedy="choose a repository with .safetensors files, or convert it on a machine where you trust it: "
            "`save_pretrained` of transformers writes them",
            is_final=True,
        )
    other = next((file for file in sorted(files) if file.endswith(".safetensors")), None)
    found = f"its weights ({other}) are not in {SINGLE_FILE} or {INDEX_FILE}" if other else "it has no weights"
    return FetchError(
        f"{name} cannot be run: {found}",
        remedy="choose a repository in the layout of transformers or MLX",
        is_final=True,
    )
