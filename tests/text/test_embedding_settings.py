"""How a model makes vectors, as the files of sentence-transformers say it; and what a model is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import BertProcessing

from exo_mesh.domain.embedding import find_tasks, why_not
from exo_mesh.errors import InputError, ModelError
from exo_mesh.text.embedding import EmbeddingSettings, read_embedding_settings
from exo_mesh.text.tokenizer import TextModel
from tests.text.text_models import word_piece

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}
BERT = {"model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 512}
STEPS = ["Transformer", "Pooling", "Normalize"]


def write(directory: Path, config: dict[str, Any], pooling: Any = None, steps: Any = STEPS, **files: Any) -> Path:
    """pooling: the content of 1_Pooling/config.json, with a modules.json. files: further ones, by their stem."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if pooling is not None:
        modules = [{"idx": i, "type": f"sentence_transformers.models.{step}"} for i, step in enumerate(steps)]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for stem, content in files.items():
        (directory / f"{stem}.json").write_text(json.dumps(content))
    return directory


def mode(name: str, **more: Any) -> dict[str, Any]:
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 64, **{f"pooling_mode_{one}": one == name for one in modes}, **more}


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (mode("cls_token"), "first"),
        (mode("mean_tokens"), "mean"),
        (mode("max_tokens"), "max"),
        (mode("lasttoken", include_prompt=True), "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "first"),
    ],
)
def test_the_pooling_is_that_of_its_config(tmp_path: Path, pooling: Any, expected: str) -> None:
    assert read_embedding_settings(write(tmp_path, LLAMA, pooling)).pooling == expected


def test_a_model_without_modules_takes_the_mean(tmp_path: Path) -> None:
    assert read_embedding_settings(write(tmp_path, LLAMA)) == EmbeddingSettings()


@pytest.mark.parametrize(
    ("pooling", "steps", "message"),
    [
        (mode("weightedmean_tokens"), STEPS, "turns on pooling_mode_weightedmean_tokens"),
        (mode("cls_token", pooling_mode_mean_tokens=True), STEPS, "exactly one of these is supported"),
        (mode(""), STEPS, "turns on no mode"),
        (mode("mean_tokens", include_prompt=False), STEPS, "include_prompt false"),
        ({"pooling_mode": "weightedmean"}, STEPS, 'pooling_mode "weightedmean" is not supported'),
        (mode("mean_tokens"), [*STEPS, "Dense"], 'the step "Dense" is not supported'),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, pooling: Any, steps: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_embedding_settings(write(tmp_path, LLAMA, pooling, steps))


def test_a_missing_pooling_is_an_error_and_no_guess(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, mode("mean_tokens"))
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"names 1_Pooling, but its config\.json is missing"):
        read_embedding_settings(tmp_path)
    (tmp_path / "1_Pooling").rmdir()
    (tmp_path / "1_Pooling.config.json").write_text(json.dumps(mode("cls_token")))  # as fetched models have it
    assert read_embedding_settings(tmp_path).pooling == "first"


@pytest.mark.parametrize("content", ["[1]", "{", '{"a": 1}'])
def test_modules_that_are_no_list_of_steps_are_refused(tmp_path: Path, content: str) -> None:
    write(tmp_path, LLAMA, mode("mean_tokens"))
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_embedding_settings(tmp_path)


@pytest.mark.parametrize(
    ("config", "length", "expected"),
    [
        (LLAMA, None, None),
        (LLAMA, 64, 64),
        (BERT, None, 512),
        (BERT, 256, 256),
        (BERT, 4096, 512),
        ({**BERT, "model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}, None, 512),
        ({**BERT, "model_type": "nomic_bert", "max_position_embeddings": None, "n_positions": 8192}, 2048, 2048),
    ],
)
def test_the_most_tokens_are_the_smallest_that_any_file_says(
    tmp_path: Path, config: dict[str, Any], length: int | None, expected: int | None
) -> None:
    files = {} if length is None else {"sentence_bert_config": {"max_seq_length": length}}
    assert read_embedding_settings(write(tmp_path, config, **files)).max_tokens == expected


def test_prompts_are_found_by_their_names(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Query: ", "document": "", "bad": 7}, "default_prompt_name": "query"}
    settings = read_embedding_settings(write(tmp_path, LLAMA, config_sentence_transformers=prompts))
    assert [settings.prompt(name, "p") for name in ("query", "document", None)] == ["Query: ", "", "Query: "]
    with pytest.raises(InputError, match=r'no prompt named "passage"; it has: document, query'):
        settings.prompt("passage", "p")
    assert EmbeddingSettings().prompt(None, "p") == ""


def test_a_classifier_gives_as_many_scores_as_it_has_labels(tmp_path: Path) -> None:
    config = {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    settings = read_embedding_settings(write(tmp_path, config))
    assert (settings.pooling, settings.num_scores, settings.whole) == ("score", 1, True)
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": None}))
    assert read_embedding_settings(tmp_path).num_scores == 2, "as transformers counts without labels"


@pytest.mark.parametrize(
    ("config", "steps", "tasks"),
    [
        (LLAMA, None, ("text_generation", "embeddings")),
        (LLAMA, ["Transformer", "LogitScore"], ("rerank",)),
        (LLAMA, STEPS, ("embeddings",)),
        ({**LLAMA, "architectures": ["LlamaModel"]}, None, ("embeddings",)),
        (BERT, None, ("embeddings",)),
        ({**BERT, "architectures": ["BertForSequenceClassification"]}, [], ("rerank",)),
        ({"model_type": ["x"], "architectures": 7}, None, ("text_generation", "embeddings")),
    ],
)
def test_the_tasks_of_a_model_follow_from_its_config(config: Any, steps: Any, tasks: tuple[str, ...]) -> None:
    assert find_tasks(config, steps) == tasks


def test_a_refused_task_is_named_with_those_that_work() -> None:
    assert why_not("m", ("embeddings",), "embeddings") == ""
    assert why_not("m", ("embeddings",), "text_generation") == "m cannot generate text; it can make embeddings"
    assert why_not("m", ("image_generation",), "rerank") == "m cannot rerank documents; it can image generation"


@pytest.fixture
def bert(tmp_path: Path) -> TextModel:
    tokenizer = word_piece()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = BertProcessing(("[SEP]", last), ("[CLS]", first))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextModel.open(tmp_path)


def test_a_pair_has_the_special_tokens_and_the_place_of_its_second_text(bert: TextModel) -> None:
    ids, second = bert.encode_for_vector("hello world", "do")
    assert [bert.tokenizer.id_to_token(one) for one in ids] == ["[CLS]", "hello", "world", "[SEP]", "do", "[SEP]"]
    assert second == 4
    assert bert.encode_for_vector("hello world") == (ids[:4], 0)


@pytest.mark.parametrize(
    ("first", "second", "limit", "left"),
    [
        ("hello " * 9, None, 5, (3, 0)),
        ("hello", "world " * 9, 7, (1, 3)),
        ("hello " * 9, "world " * 9, 9, (3, 3)),
        ("hello " * 9, "world", 8, (4, 1)),
        ("hello", "world", 64, (1, 1)),
        ("hello " * 9, None, 1, (1, 0)),
    ],
)
def test_the_longer_text_is_cut_and_the_special_tokens_stay(
    bert: TextModel, first: str, second: str | None, limit: int, left: tuple[int, int]
) -> None:
    ids, _ = bert.encode_for_vector(first, second, limit)
    tokens = [bert.tokenizer.id_to_token(one) for one in ids]
    assert (tokens.count("hello"), tokens.count("world")) == left
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"


def test_a_language_model_that_judges_has_the_tokens_of_its_answers(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, mode("mean_tokens"), ["Transformer", "LogitScore"])
    (tmp_path / "1_LogitScore").mkdir()
    score = tmp_path / "1_LogitScore" / "config.json"
    score.write_text('{"true_token_id": 9, "false_token_id": 2}')
    settings = read_embedding_settings(tmp_path)
    assert (settings.pooling, settings.choice, settings.num_scores, settings.whole) == ("score", (9, 2), 1, False)
    score.write_text('{"true_token_id": 9, "false_token_id": null}')
    assert read_embedding_settings(tmp_path).choice == (9,)
    score.write_text('{"true_token_id": "yes"}')
    with pytest.raises(ModelError, match="not token ids"):
        read_embedding_settings(tmp_path)


@pytest.mark.parametrize(
    ("prompts", "default", "use", "wanted"),
    [
        ({"query": "Q: ", "document": "D: "}, "", "query", "Q: "),
        ({"query": "Q: ", "document": "D: "}, "", "search_query", "Q: "),
        ({"query": "Q: ", "document": "D: "}, "", "search_document", "D: "),
        ({"query": "Q: ", "document": "D: "}, "", "passage", "D: "),
        ({"query": "Q: ", "passage": "P: "}, "query", "document", "P: "),
        ({"query": "Q: ", "clustering": "C: "}, "query", "clustering", "C: "),
        ({"query": "Q: "}, "query", "classification", "Q: "),
        ({"query": "Q: "}, "", "document", ""),
        ({}, "", "query", ""),
    ],
)
def test_a_use_of_texts_chooses_the_prompt(prompts: dict[str, str], default: str, use: str, wanted: str) -> None:
    assert EmbeddingSettings(prompts=prompts, default_prompt=default).prompt_for(use) == wanted
