"""What a look at a model server finds: its kind, its models, their context and slots, or why it is not up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from exo_mesh_openai import provider
from exo_mesh_openai.look import Onlooker
from exo_mesh_openai.options import read_options
from exo_mesh_openai.probing import MAX_MODELS
from exo_mesh_openai.provider import OpenAiProvider

from exo_mesh.domain.whole.served import ServedModel, ServerReport
from tests.support.fake_openai import CONTEXT, KEY, FakeModelServer, serving_fake


async def look(server: FakeModelServer, **options: str) -> ServerReport:
    async with serving_fake(server) as url:
        (report,) = await provider.look({"servers": url, **options})
    assert report.server == url.removeprefix("http://")
    return report


@pytest.mark.parametrize(
    ("kind", "context", "slots"),
    [
        ("llama-server", CONTEXT, 3),
        ("vllm", CONTEXT, 0),
        ("sglang", CONTEXT, 0),
        ("ollama", 4096, 0),
        ("lm-studio", 32768, 0),
        ("other", 0, 0),
    ],
)
async def test_each_kind_of_server_says_its_context_in_its_own_way(kind: str, context: int, slots: int) -> None:
    report = await look(FakeModelServer(kind))
    model = ServedModel("fake-model", "openai", report.server, "fake-model", context_limit=context, slots=slots)
    assert report == ServerReport(report.server, True, (model,))


async def test_names_and_twins_are_as_the_operator_says() -> None:
    report = await look(
        FakeModelServer("other", models=("one:8b", "two", "three")),
        names='{"two": "mine"}',
        stands_for='{"one:8b": "org/one", "mine": "org/two"}',
    )
    found = [(model.served_name, model.name, model.stands_for) for model in report.models]
    assert found == [("one:8b", "one-8b", "org/one"), ("two", "mine", "org/two"), ("three", "three", "")]


async def test_ollama_models_have_the_context_they_get_and_embedders_are_left_out() -> None:
    report = await look(FakeModelServer("ollama", models=("loaded:8b", "chosen:8b", "plain:8b", "embedder")))
    limits = {model.served_name: model.context_limit for model in report.models}
    assert limits == {"loaded:8b": 16384, "chosen:8b": 8192, "plain:8b": 4096}


async def test_models_of_lm_studio_have_the_context_they_are_loaded_with() -> None:
    report = await look(FakeModelServer("lm-studio", models=("loaded", "resting", "embedder")))
    assert {model.served_name: model.context_limit for model in report.models} == {"loaded": 4096, "resting": 32768}


@pytest.mark.parametrize(
    ("switch", "says"),
    [("needs-key", "--openai-key-file"), ("redirect", "redirects"), ("no-such-path", "no OpenAI-style server"),
     ("loading", "loading its model")],
)  # fmt: skip
async def test_a_server_that_gives_no_models_is_down_for_a_reason(switch: str, says: str) -> None:
    report = await look(FakeModelServer("llama-server", frozenset({switch})))
    assert not report.is_up and not report.models
    assert says in report.error


async def test_the_key_of_the_key_file_opens_a_server(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    report = await look(FakeModelServer("vllm", frozenset({"needs-key"})), key_file=str(path))
    assert report.is_up


async def test_a_server_that_is_not_there_is_down() -> None:
    (report,) = await provider.look({"servers": "http://127.0.0.1:9"})
    assert not report.is_up and "cannot be reached" in report.error


async def test_a_server_that_does_not_answer_in_time_is_down() -> None:
    server = FakeModelServer("other", frozenset({"silent"}))
    async with serving_fake(server) as url:
        (report,) = await Onlooker(look_s=0.05).look(read_options({"servers": url}))
    assert not report.is_up and "does not answer within 0.05 s" in report.error


async def test_without_servers_nothing_is_reported() -> None:
    assert not await provider.look({})


async def test_a_catalogue_is_cut_at_a_bound() -> None:
    report = await look(FakeModelServer("vllm", models=[f"model-{number}" for number in range(MAX_MODELS + 50)]))
    assert len(report.models) == MAX_MODELS


@pytest.mark.parametrize("data", [None, "text", {"data": "x"}, {"data": [1, {"id": 7}, {"id": ""}, {"id": "x" * 999}]}])
async def test_a_strange_list_of_models_is_no_reason_to_fail(data: Any) -> None:
    report = await look(FakeModelServer("other", listed=data))
    assert report.models == ()
    assert report.is_up == (isinstance(data, dict) and isinstance(data["data"], list))


async def test_what_ollama_shows_of_a_model_is_asked_once() -> None:
    server = FakeModelServer("ollama", models=("plain:8b",))
    onlooker = Onlooker()
    async with serving_fake(server) as url:
        options = read_options({"servers": url})
        assert await onlooker.look(options) == await onlooker.look(options)
    assert server.num_shown == 1


def gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF")
    return path


async def test_gguf_files_are_models_of_a_llama_server_to_be_started(tmp_path: Path) -> None:
    names = ("b.gguf", "a.GGUF", "mmproj-a.gguf", "x.txt", "org/d/d.gguf", "too/deep/to/e.gguf")
    for name in (*names, "sub/c-00001-of-00002.gguf", "sub/c-00002-of-00002.gguf"):
        gguf(tmp_path / "models" / name)
    (report,) = await provider.look(
        {"binary": "/bin/true", "models_dir": f"{tmp_path}/models, {tmp_path}/none", "context": "512", "slots": "2"}
    )
    assert report.is_up and report.server == "127.0.0.1:0"
    assert [model.served_name for model in report.models] == [
        "a.GGUF",
        "b.gguf",
        "org/d/d.gguf",
        "sub/c-00001-of-00002.gguf",
    ]
    assert {(model.context_limit, model.slots) for model in report.models} == {(512, 2)}


async def test_one_gguf_file_can_be_named_alone(tmp_path: Path) -> None:
    file = gguf(tmp_path / "tiny.gguf")
    (report,) = await provider.look({"binary": "/bin/true", "model": str(file)})
    assert [(model.name, model.served_name) for model in report.models] == [("tiny", "tiny.gguf")]


@pytest.mark.parametrize("exists", [False, True], ids=["no program", "not executable"])
async def test_without_a_program_that_can_run_no_model_is_advertised(tmp_path: Path, exists: bool) -> None:
    binary = tmp_path / "llama-server"
    if exists:
        binary.write_text("")
    (report,) = await provider.look({"binary": str(binary), "model": str(gguf(tmp_path / "tiny.gguf"))})
    assert not report.is_up and str(binary) in report.error


async def test_a_directory_of_models_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    (report,) = await provider.look({"binary": "/bin/true", "models_dir": str(tmp_path / "none")})
    assert not report.is_up and "cannot be read" in report.error


async def test_the_engine_is_available_only_when_something_is_named(tmp_path: Path) -> None:
    fresh = OpenAiProvider()
    before = fresh.availability()
    assert not before.available and "servers" in before.remedy and before.preference < 0
    await fresh.look({})
    assert not fresh.availability().available
    await fresh.look({"servers": "http://127.0.0.1:9"})
    assert (fresh.availability().available, fresh.availability().compute) == (True, "cpu")
    await fresh.look({"binary": "/bin/true", "models_dir": str(tmp_path), "backends": "rocm,cpu"})
    assert (fresh.availability().available, fresh.availability().compute) == (True, "rocm")
