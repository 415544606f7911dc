"""Names of models and files, as strangers give them."""

from __future__ import annotations

import pytest

from exo_mesh.weights.names import is_model_name, is_text_file, suffix_of


@pytest.mark.parametrize(
    ("name", "fits"),
    [("m", True), ("org/m-1.5+x@v1", True), ("../m", False), ("org/../m", False), (".m", False), ("a/b/c", False),
     ("m" * 201, False), ("org/m@", False), ("", False)],
)  # fmt: skip
def test_a_name_of_a_model_cannot_lead_out_of_the_directory_of_models(name: str, fits: bool) -> None:
    assert is_model_name(name) is fits


def test_texts_are_told_from_weights_and_from_what_is_no_file_of_a_model() -> None:
    assert all(map(is_text_file, ("config.json", "tokenizer.model", "LICENSE", "LICENSE.md", "chat_template.jinja")))
    assert not any(map(is_text_file, ("a.safetensors", "code.py", ".env.json", "../x.json", "folder/x.json", "README")))
    assert [suffix_of(name) for name in ("a-1-of-2.gguf", "README", ".json", "a/b.gguf")] == ["gguf", "", "", ""]
