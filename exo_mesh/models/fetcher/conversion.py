"""Makes the tokenizer.json of models with older tokenizer files only, in a child process with transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from exo_mesh.errors import FetchError
from exo_mesh.models.fetcher.download import Context
from exo_mesh.weights.model_files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES

TOKENIZER = "tokenizer.json"
FORMS = (("tekken.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""Files from which a tokenizer.json can be made: of mistral-common, of SentencePiece or tiktoken, of byte-level BPE."""

PACKAGES = {
    "tekken.json": "transformers mistral-common",
    "tokenizer.model": "transformers sentencepiece protobuf tiktoken",
    "vocab.json": "transformers",
}
"""The packages that read each form, by its first file, as arguments of `pip install`."""

LIMIT_S = 120.0
"""Time limit. A vocabulary of 256,000 takes about 20 s; most of the rest is the import of transformers."""

_POLL_S = 0.1
_MADE = {TOKENIZER: MAX_TOKENIZER_BYTES, "tokenizer_config.json": MAX_JSON_BYTES, "chat_template.jinja": MAX_JSON_BYTES}
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")


def older_form(files: Collection[str]) -> tuple[str, ...]:
    """Returns the files from which a tokenizer.json can be made; empty if there are none."""
    return next((form for form in FORMS if all(name in files for name in form)), ())


def make_tokenizer(directory: Path, name: str, context: Context) -> tuple[str, ...]:
    """Puts tokenizer.json and other missing text files into a model's directory; returns their names.

    Raises FetchError, which says what to install if a package is missing.
    """
    form = older_form({file.name for file in directory.iterdir()})
    if not form:
        raise FetchError(f"the tokenizer files of {name} are larger than their limit", is_final=True)
    with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=directory) as scratch:
        _require_converted(_ask(directory, Path(scratch), context), name, form)
        return tuple(sorted(_taken(Path(scratch), directory)))


def _ask(directory: Path, scratch: Path, context: Context) -> dict[str, str]:
    """Returns the child's answer; the child is killed when the request is cancelled or takes too long."""
    command = [sys.executable, "-m", "exo_mesh.models.fetcher.tokenizer_child", str(directory), str(scratch)]
    environ = {key: value for key, value in os.environ.items() if key not in _SECRETS}
    environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    end = time.monotonic() + LIMIT_S
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, env=environ
        )
        try:
            while child.poll() is None:
                context.pause(_POLL_S)
                if time.monotonic() > end:
                    return {"failed": f"the conversion took more than {LIMIT_S:.0f} s"}
        finally:
            child.kill()
            child.wait()
        output.seek(0)
        return _answer(output.read(10_000), child.returncode)


def _answer(text: bytes, returncode: int) -> dict[str, str]:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"failed": f"the conversion ended with exit code {returncode}"}


def _require_converted(answer: dict[str, str], name: str, form: tuple[str, ...]) -> None:
    files = " and ".join(form)
    if "missing" in answer:
        raise FetchError(
            f"{name} has {files} instead of a {TOKENIZER}, and the package that converts them is not installed "
            f"({answer['missing']})",
            remedy=f"`pip install {PACKAGES[form[0]]}` into the environment of exo-mesh on one machine and pull "
            f"the model there again (peers copy the result), or choose a repository that has a {TOKENIZER}",
            is_final=True,
        )
    if "failed" in answer:
        raise FetchError(
            f"{name} has no {TOKENIZER}, and its {files} cannot be converted: {answer['failed']}",
            remedy=f"choose another repository of the same model that has a {TOKENIZER}",
            is_final=True,
        )


def _taken(scratch: Path, directory: Path) -> list[str]:
    """Moves the converted files to their place; files that the model itself has stay as they are."""
    taken = []
    for name, most in _MADE.items():
        made = scratch / name
        if not made.is_file() or (directory / name).exists():
            continue
        if made.stat().st_size > most:
            raise FetchError(f"the converted {name} has more than {most} bytes", is_final=True)
        shutil.move(made, directory / name)
        taken.append(name)
    if TOKENIZER not in taken:
        raise FetchError(f"transformers made no {TOKENIZER}", is_final=True)
    return taken
