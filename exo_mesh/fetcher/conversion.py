"""Makes the tokenizer.json of models that have older forms only, in a child process with transformers."""

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
from exo_mesh.fetcher.download import Context
from exo_mesh.model_files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES

TOKENIZER = "tokenizer.json"
FORMS = (("tekken.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""Files from which a tokenizer.json can be made: of mistral-common, of SentencePiece or tiktoken, of byte-level BPE."""

PACKAGES = {
    "tekken.json": "transformers mistral-common",
    "tokenizer.model": "transformers sentencepiece protobuf tiktoken",
    "vocab.json": "transformers",
}
"""What reads each form, by its first file, as `pip install` takes it."""

LIMIT_S = 120.0
"""A vocabulary of 256,000 takes about 20 s; most of the rest is the import of transformers."""

_POLL_S = 0.1
_MADE = {TOKENIZER: MAX_TOKENIZER_BYTES, "tokenizer_config.json": MAX_JSON_BYTES, "chat_template.jinja": MAX_JSON_BYTES}
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")


def older_form(files: Collection[str]) -> tuple[str, ...]:
    """The files from which a tokenizer.json can be made; empty if there are none."""
    return next((form for form in FORMS if all(name in files for name in form)), ())


def make_tokenizer(directory: Path, name: str, context: Context) -> tuple[str, ...]:
    """Put tokenizer.json into a model's directory, and other text files that the model lacks; their names.

    Raises FetchError, which says what to install if something is missing.
    """
    form = older_form({file.name for file in directory.iterdir()})
    if not form:
        raise FetchError(f"the tokenizer of {name} is larger than any model needs", is_final=True)
    with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=directory) as scratch:
        _require_converted(_ask(directory, Path(scratch), context), name, form)
        return tuple(sorted(_taken(Path(scratch), directory)))


def _ask(directory: Path, scratch: Path, context: Context) -> dict[str, str]:
    """What the child says; it is ended when the request is cancelled or its time is over."""
    command = [sys.executable, "-m", "exo_mesh.fetcher.tokenizer_child", str(directory), str(scratch)]
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
                    return {"failed": f"it takes more than {LIMIT_S:.0f} s"}
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
    return answer if isinstance(answer, dict) else {"failed": f"the process that converts it ended with {returncode}"}


def _require_converted(answer: dict[str, str], name: str, form: tuple[str, ...]) -> None:
    files = " and ".join(form)
    if "missing" in answer:
        raise FetchError(
            f"{name} has no {TOKENIZER} but {files}, and what converts that is not installed ({answer['missing']})",
            remedy=f"`pip install {PACKAGES[form[0]]}` into the environment of exo-mesh on one machine and ask there "
            f"again, for peers copy what it makes; or choose a repository that has a {TOKENIZER}",
            is_final=True,
        )
    if "failed" in answer:
        raise FetchError(
            f"{name} has no {TOKENIZER}, and {files} cannot be converted into one: {answer['failed']}",
            remedy=f"choose another repository of the same model that has a {TOKENIZER}",
            is_final=True,
        )


def _taken(scratch: Path, directory: Path) -> list[str]:
    """Move what was made to its place; files that the model has itself stay as they are."""
    taken = []
    for name, most in _MADE.items():
        made = scratch / name
        if not made.is_file() or (directory / name).exists():
            continue
        if made.stat().st_size > most:
            raise FetchError(f"the {name} that was made has more than {most} bytes", is_final=True)
        shutil.move(made, directory / name)
        taken.append(name)
    if TOKENIZER not in taken:
        raise FetchError(f"transformers made no {TOKENIZER}", is_final=True)
    return taken
