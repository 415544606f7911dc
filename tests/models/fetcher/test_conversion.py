"""Models without tokenizer.json: it is made of older forms, or refused before any weights are fetched."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from exo_mesh.models.fetcher.conversion import TOKENIZER, older_form
from exo_mesh.models.fetcher.wire import Resolve, Source
from exo_mesh.weights.card import read_card
from exo_mesh.weights.fetched import read_manifest
from tests.support.checkpoints import TinyModel, write_checkpoint, write_json
from tests.support.fetcher_child import FetcherChild, FetchFailed, fetcher_environ
from tests.support.file_servers import serving
from tests.support.hub import LoopbackHub

REPO = "org/slow"
NONE = "raise ImportError('not here', name='transformers')"
FAILING = """
class AutoTokenizer:
    def from_pretrained(*args, **settings):
        raise ValueError("merges.txt is\\n no such thing")
"""
TEXT = "the quick brown fox, the lazy dog & the 42nd café\n  the end of the quick story"


def trained() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT] * 5, BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def slow_repository(directory: Path) -> Tokenizer:
    """A repository with vocab.json and merges.txt, as older ones have it; answers its tokenizer."""
    write_checkpoint(directory, TinyModel(layers=2, vocab=300))
    (directory / TOKENIZER).unlink()
    tokenizer = trained()
    tokenizer.model.save(str(directory))
    write_json(
        directory / "vocab.json",
        json.loads((directory / "vocab.json").read_text()) | {"<|end|>": tokenizer.token_to_id("<|end|>")},
    )
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|end|>",
        "unk_token": "<|end|>",
        "bos_token": "<|end|>",
    }
    write_json(directory / "tokenizer_config.json", settings)
    return tokenizer


def with_transformers(directory: Path, code: str) -> dict[str, str]:
    """What a process needs in its environment in order to find this in place of transformers."""
    directory.mkdir(exist_ok=True)
    (directory / "transformers.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])}


def test_which_files_a_tokenizer_can_be_made_of() -> None:
    assert older_form({"vocab.json", "merges.txt", "config.json"}) == ("vocab.json", "merges.txt")
    assert older_form({"tokenizer.model", "vocab.json", "merges.txt"}) == ("tokenizer.model",)
    assert older_form({"tekken.json", "tokenizer.model"}) == ("tekken.json",)
    assert older_form({"vocab.json", "config.json"}) == ()


@pytest.mark.slow
def test_what_is_made_gives_the_same_ids_and_is_copied_by_peers_as_it_is(tmp_path: Path) -> None:
    original = slow_repository(tmp_path / "hub")
    model_dir, copy = tmp_path / "models" / "m", tmp_path / "other" / "m"
    with LoopbackHub() as hub:
        hub.add(REPO, tmp_path / "hub")
        with FetcherChild(fetcher_environ(hub, tmp_path / "hf")) as fetcher:
            answer = fetcher.resolve(REPO, model_dir)
        assert not isinstance(answer, FetchFailed), answer
        made, manifest = Tokenizer.from_file(str(model_dir / TOKENIZER)), read_manifest(model_dir)
        for text in (TEXT, "", "Ünïcode 世界 <|end|> x"):
            assert made.encode(text, add_special_tokens=False).ids == original.encode(text).ids
            assert made.decode(made.encode(text).ids) == original.decode(original.encode(text).ids)
        assert manifest is not None and manifest.made == [TOKENIZER]
        assert sorted(file.name for file in model_dir.parent.iterdir()) == ["m"]
        assert not [file.name for file in model_dir.iterdir() if file.is_dir()]
        card, files_sent = read_card(model_dir, REPO), hub.sent_bytes
        with contextlib.ExitStack() as stack:
            served = stack.enter_context(serving(model_dir))
            served.dirs[REPO] = (model_dir, card.digest)
            environ = fetcher_environ(hub, tmp_path / "hf", **with_transformers(tmp_path / "none", NONE))
            peer = stack.enter_context(FetcherChild(environ))
            peer.send(Resolve(9, REPO, REPO, "main", str(copy), (served.source(), Source())))
            answer = peer.answer()
        assert not isinstance(answer, FetchFailed), answer
        assert (copy / TOKENIZER).read_bytes() == (model_dir / TOKENIZER).read_bytes()
        assert read_card(copy, REPO) == card and hub.sent_bytes == files_sent
        copied = read_manifest(copy)
        assert copied is not None and copied.made == [TOKENIZER]


def test_without_transformers_it_is_said_what_to_install(tmp_path: Path) -> None:
    slow_repository(tmp_path / "hub")
    with LoopbackHub() as hub:
        hub.add(REPO, tmp_path / "hub")
        environ = fetcher_environ(hub, tmp_path / "hf", **with_transformers(tmp_path / "none", NONE))
        with FetcherChild(environ) as fetcher:
            answer = fetcher.resolve(REPO, tmp_path / "models" / "m")
        assert isinstance(answer, FetchFailed) and answer.is_final
        assert f"{REPO} has vocab.json and merges.txt instead of a tokenizer.json" in answer.message
        assert "not installed (transformers)" in answer.message and "`pip install transformers`" in answer.remedy
        assert hub.sent_of(".safetensors") == 0 and not list((tmp_path / "models").iterdir())


@pytest.mark.slow
def test_the_tokenizer_of_mistral_is_converted_too(tmp_path: Path) -> None:
    directory = tmp_path / "hub"
    write_checkpoint(directory, TinyModel(layers=2, vocab=300))
    for name in (TOKENIZER, "tokenizer_config.json"):
        (directory / name).unlink()
    pieces = [bytes([value]) for value in range(256)] + [b"th", b"the", b" the"]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
             for rank, piece in enumerate(pieces)]  # fmt: skip
    specials = [{"rank": rank, "token_str": text, "is_control": True}
                for rank, text in enumerate(("<unk>", "<s>", "</s>", "<pad>"))]  # fmt: skip
    config = {"pattern": r"\s?\w+|\s?[^\s\w]+|\s+", "num_vocab_tokens": len(vocab), "default_num_special_tokens": 4,
              "default_vocab_size": len(vocab) + 4, "version": "v3"}  # fmt: skip
    write_json(directory / "tekken.json", {"config": config, "vocab": vocab, "special_tokens": specials})
    with LoopbackHub() as hub:
        hub.add(REPO, directory)
        with FetcherChild(fetcher_environ(hub, tmp_path / "hf")) as fetcher:
            answer = fetcher.resolve(REPO, tmp_path / "m")
    assert not isinstance(answer, FetchFailed), answer
    made, manifest = Tokenizer.from_file(str(tmp_path / "m" / TOKENIZER)), read_manifest(tmp_path / "m")
    assert made.encode("in the", add_special_tokens=False).ids == [4 + ord("i"), 4 + ord("n"), 4 + 258]
    assert manifest is not None and manifest.made == [TOKENIZER, "tokenizer_config.json"]


@pytest.mark.slow
def test_a_vocabulary_that_cannot_be_converted_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    slow_repository(tmp_path / "hub")
    with LoopbackHub() as hub:
        hub.add(REPO, tmp_path / "hub")
        environ = fetcher_environ(hub, tmp_path / "hf", **with_transformers(tmp_path / "bad", FAILING))
        with FetcherChild(environ) as fetcher:
            answer = fetcher.resolve(REPO, tmp_path / "models" / "m")
        assert isinstance(answer, FetchFailed) and answer.is_final
        assert answer.message.endswith("cannot be converted: ValueError: merges.txt is no such thing"), answer
        assert hub.sent_of(".safetensors") == 0 and not list((tmp_path / "models").iterdir())
