"""Models that a command names by a path: a GGUF file, or a folder with the files of a model."""

from __future__ import annotations

from pathlib import Path

from exo_mesh.errors import UnknownModelError
from exo_mesh.models.names import is_name
from exo_mesh.weights.gguf import SUFFIX
from exo_mesh.weights.gguf_table import is_model_file
from exo_mesh.weights.gguf_views import has_only_gguf
from exo_mesh.weights.store import model_dir_of


def model_name(text: str) -> str:
    """Makes the path of a model absolute, since the node may run elsewhere; returns other names unchanged.

    A path begins with ./, ../ or ~, or names a GGUF file or a directory that no model's name could mean, such as that
    of a snapshot in a Hugging Face cache. Raises UnknownModelError if nothing is there.
    """
    path = Path(text)
    if text.startswith(("./", "../", "~")) or is_gguf(path) or (path.is_dir() and not is_name(text)):
        return str(existing_path(text))
    return text


def path_hint(text: str) -> str:
    """What to add to the refusal of an unknown name that was perhaps meant as a path; "" if it was not."""
    if Path(text).is_dir() and is_name(text):
        return f"; for the directory {text} write ./{text}"
    if text.endswith(SUFFIX) and not Path(text).exists():
        return f"; there is no file {text} here"
    return ""


def is_path(text: str) -> bool:
    """Whether a text names a place on the disk, be it there or not, and not a model by its name."""
    return text.startswith(("/", "./", "../", "~")) or text.endswith(SUFFIX) or Path(text).is_dir()


def existing_path(text: str) -> Path:
    """The absolute path of a model. Raises UnknownModelError if it is neither a directory nor a GGUF file."""
    path = Path(text).expanduser().absolute()
    if not path.is_dir() and not is_gguf(path):
        what = "is neither a directory nor a GGUF file" if path.exists() else "does not exist"
        raise UnknownModelError(f"{text} {what} ({path})", param="model")
    return path


def models_dir_for(path: Path) -> Path:
    """The models directory with which a node has the model at an absolute path. Raises UnknownModelError."""
    if is_gguf(path):
        return path.parent
    if not path.is_dir():
        existing_path(str(path))
    return path if has_only_gguf(path) else model_dir_of(str(path))


def is_gguf(path: Path) -> bool:
    return is_model_file(path.name) and path.is_file()
