"""Each way to name a model, and what a wrong name is answered with."""

from __future__ import annotations

import pytest

from exo_mesh.errors import UnknownModelError
from exo_mesh.models.names import KnownNames, ModelReference, find_reference, is_name, near_names

QWEN = "Qwen/Qwen3-0.6B"
KNOWN = KnownNames(
    local=("exo-mesh-demo", "my-model", "org/tiny", "Org2/Mixed-Case", "org/tiny@v2"),
    peers=("far/away", "one/twin", "two/twin"),
    cards={"qwen/qwen3-0.6b": QWEN, "qwen3:0.6b": QWEN, "qwen3": QWEN, "tiny": "card/tiny", "card/tiny": "card/tiny"},
)


@pytest.mark.parametrize(
    ("text", "name", "repo", "revision", "quant"),
    [
        ("exo-mesh-demo", "exo-mesh-demo", "", "", ""),
        ("my-model", "my-model", "", "", ""),
        ("MY-MODEL:latest", "my-model", "", "", ""),
        ("org/tiny", "org/tiny", "org/tiny", "", ""),
        ("org2/mixed-case", "Org2/Mixed-Case", "Org2/Mixed-Case", "", ""),
        ("away", "far/away", "far/away", "", ""),
        (QWEN, QWEN, QWEN, "", ""),
        ("qwen/qwen3-0.6b", QWEN, QWEN, "", ""),
        ("Qwen3-0.6B", QWEN, QWEN, "", ""),
        ("qwen3:0.6b", QWEN, QWEN, "", ""),
        ("Qwen3:0.6B", QWEN, QWEN, "", ""),
        ("qwen3", QWEN, QWEN, "", ""),
        ("qwen3:latest", QWEN, QWEN, "", ""),
        ("hf.co/Qwen/Qwen3-0.6B", QWEN, QWEN, "", ""),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", QWEN, QWEN, "", ""),
        ("Qwen/Qwen3-0.6B@abc123", f"{QWEN}@abc123", QWEN, "abc123", ""),
        ("qwen3@abc123", f"{QWEN}@abc123", QWEN, "abc123", ""),
        ("org/tiny@main", "org/tiny", "org/tiny", "", ""),
        ("org/tiny@v2", "org/tiny@v2", "org/tiny", "v2", ""),
        ("nobody/knows-it", "nobody/knows-it", "nobody/knows-it", "", ""),
        ("nobody/knows-it:latest", "nobody/knows-it", "nobody/knows-it", "", ""),
        ("nobody/it-GGUF:Q4_K_M", "nobody/it-GGUF", "nobody/it-GGUF", "", "Q4_K_M"),
        ("hf.co/nobody/it-GGUF@v1:ud-iq2_xxs", "nobody/it-GGUF@v1", "nobody/it-GGUF", "v1", "UD-IQ2_XXS"),
        ("nobody/it-GGUF:bf16", "nobody/it-GGUF", "nobody/it-GGUF", "", "BF16"),
        ("tiny", "card/tiny", "card/tiny", "", ""),
        ("gpt2", "gpt2", "gpt2", "", ""),
        ("gpt2@v1", "gpt2@v1", "gpt2", "v1", ""),
        ("hf.co/distilgpt2:latest", "distilgpt2", "distilgpt2", "", ""),
    ],
)
def test_a_name_stands_for_a_model(text: str, name: str, repo: str, revision: str, quant: str) -> None:
    assert find_reference(text, KNOWN) == ModelReference(name, repo, revision, quant)


@pytest.mark.parametrize(
    "text", ["tiny.Q4_1.gguf", "tiny:Q4_1", "tiny.Q4_1", "tiny:q4_1", "tiny.Q4_1-00001-of-00002.gguf"]
)
@pytest.mark.parametrize("where", ["local", "peers"])
def test_a_file_can_be_named_as_it_is_called_on_the_disk(text: str, where: str) -> None:
    assert find_reference(text, KnownNames(**{where: ("tiny.Q4_1", "tiny")})).name == "tiny.Q4_1"
    assert find_reference("tiny-7b.gguf", KnownNames(local=("tiny-7b.gguf", "tiny-7b"))).name == "tiny-7b.gguf"


def test_a_model_that_is_here_wins_over_an_alias_of_a_card() -> None:
    assert find_reference("qwen3", KnownNames(local=("qwen3",), cards=KNOWN.cards)).name == "qwen3"


@pytest.mark.parametrize(
    "text", ["", "/", "/etc/passwd", "../x", "a/b/c", "a//b", "qwen3:7b", "x@", "x:", ":latest", "@main", "a b", "é/x",
             "org/tiny:wrong", "x/y\nz", "x/" + 300 * "y"]
)  # fmt: skip
def test_what_is_no_name_is_unknown(text: str) -> None:
    with pytest.raises(UnknownModelError) as caught:
        find_reference(text, KNOWN)
    assert caught.value.param == "model" and len(str(caught.value)) < 500


def test_a_wrong_name_gets_the_three_nearest() -> None:
    with pytest.raises(UnknownModelError, match=r'no peer has a model "qwen3:0.6c"; near: qwen3:0.6b, .*Qwen3-0.6B'):
        find_reference("qwen3:0.6c", KNOWN)
    assert len(near_names("twin", KNOWN.every)) == 3
    assert near_names("zzzzzzzz", KNOWN.every) == []


def test_a_name_without_organisation_must_be_one_models() -> None:
    with pytest.raises(UnknownModelError, match=r"may be one of several models: one/twin, two/twin"):
        find_reference("twin", KNOWN)


def test_a_name_has_one_form_everywhere() -> None:
    for name in ("m", "org/m", "org/m@v1.0", "qwen3:0.6b", "org/m-GGUF:Q4_K_M", "https://huggingface.co/org/m"):
        assert is_name(name), name
    for text in ("", " ", "a b", "../../etc", "/etc", "org/m@", "a/b/c", "m\0", "m" * 201):
        assert not is_name(text), text


def test_a_name_of_megabytes_is_unknown_at_once() -> None:
    for text in ("a" * 10**7, "https://hf.co/" * 10**6, " " * 10**7):
        with pytest.raises(UnknownModelError) as found:
            find_reference(text, KNOWN)
        assert len(str(found.value)) < 1000
