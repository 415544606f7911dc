"""The command line of a supervised llama-server, by the options of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from exo_mesh_openai.argv import command_line
from exo_mesh_openai.options import read_options

ALWAYS = ["/bin/true", "--host", "127.0.0.1", "--port", "4711", "--model", "/models/m.gguf", "--jinja"]


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, []),
        ({"context": "4096"}, ["--ctx-size", "4096"]),
        ({"slots": "3"}, ["--parallel", "3"]),
        ({"context": "4096", "slots": "3"}, ["--ctx-size", "12288", "--parallel", "3"]),
        ({"backends": "cpu"}, ["--device", "none"]),
        ({"backends": "CUDA, cpu"}, []),
        ({"spec_type": "ngram"}, ["--spec-type", "ngram-simple"]),
        ({"spec_type": "draft_mtp", "spec_n_max": "3"}, ["--spec-type", "draft-mtp", "--spec-draft-n-max", "3"]),
        (
            {"spec_type": "draft_simple", "draft_model": "/d.gguf", "spec_n_max": "8"},
            ["--spec-type", "draft-simple", "--spec-draft-n-max", "8", "--model-draft", "/d.gguf"],
        ),
        (
            {"spec_type": "draft_eagle3", "draft_model": "/d.gguf"},
            ["--spec-type", "draft-eagle3", "--model-draft", "/d.gguf"],
        ),
        ({"spec_type": "draft_eagle3", "draft_model": "/d.gguf", "no_spec": "true"}, []),
        ({"spec_type": "draft_simple", "no_spec": "1"}, []),
    ],
    ids=str,
)
def test_the_options_become_flags(options: dict[str, str], more: list[str]) -> None:
    own = read_options({"binary": "/bin/true", "model": "/models/m.gguf", **options}).own
    assert own is not None
    assert command_line(own.binary, Path("/models/m.gguf"), 4711, own.flags) == [*ALWAYS, *more]
