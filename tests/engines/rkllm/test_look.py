"""What the provider finds: the board, the server with its models, and the directory of models."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from aiohttp import web
from exo_mesh_rkllm.board import describe_board
from exo_mesh_rkllm.look import LOOK_S, look, mesh_name, served_models
from exo_mesh_rkllm.modelfile import MAX_BYTES, ModelfileFacts, parse_modelfile, read_models
from exo_mesh_rkllm.options import MOST_MODELS, RkllmOptions, names_a_server, parse_options
from exo_mesh_rkllm.provider import RkllmProvider

from exo_mesh.domain.whole.served import ServedModel
from exo_mesh.errors import InputError
from tests.engines.rkllm.asking import DIALECTS
from tests.support.fake_rkllama import MODELS, TODAY, FakeRkllama, serving

MODELFILE = """
FROM="Qwen3-1.7B-w8a8.rkllm"

HUGGINGFACE_PATH="Qwen/Qwen3-1.7B"

SYSTEM="You are
NUM_CTX=1 of us"

TEMPERATURE=0.5   # lower is duller
NUM_CTX=4096
"""


def plant(folder: Path, name: str, modelfile: str | None = MODELFILE, weights: str = "model.rkllm") -> None:
    place = folder / name
    place.mkdir(parents=True)
    if weights:
        (place / weights).touch()
    if modelfile is not None:
        (place / "Modelfile").write_text(modelfile)


def device_tree(folder: Path, compatible: bytes) -> Path:
    (folder / "compatible").write_bytes(compatible)
    return folder


def options_of(address: str, **more: str) -> Mapping[str, str]:
    host, _, port = address.rpartition(":")
    return {"host": host, "port": port, "models_dir": "/nowhere", **more}


@pytest.mark.parametrize(
    ("compatible", "found"),
    [
        (b"radxa,rock-5b\0rockchip,rk3588\0", "NPU of the RK3588, 6 TOPS INT8"),
        (b"xunlong,orangepi-5\0rockchip,rk3588s\0", "NPU of the RK3588, 6 TOPS INT8"),
        (b"friendlyelec,nanopi-m5\0rockchip,rk3576\0", "NPU of the RK3576, 6 TOPS INT8"),
        (b"radxa,rock-3a\0rockchip,rk3568\0", ""),
        (b"raspberrypi,5-model-b\0brcm,bcm2712\0", ""),
    ],
)
def test_a_board_is_found_by_its_device_tree(tmp_path: Path, compatible: bytes, found: str) -> None:
    assert describe_board(device_tree(tmp_path, compatible), ()) == found


def test_a_board_without_a_device_tree_is_found_by_the_runtime_library(tmp_path: Path) -> None:
    assert describe_board(tmp_path, [tmp_path]) == ""
    (tmp_path / "librkllmrt.so").touch()
    assert (
        describe_board(tmp_path, [tmp_path / "other", tmp_path]) == f"RKLLM's runtime library {tmp_path}/librkllmrt.so"
    )


def test_the_provider_says_what_it_found_or_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh_rkllm.board.describe_board", lambda: "")
    monkeypatch.delenv("RKLLM_SERVER_HOST", raising=False)
    monkeypatch.delenv("RKLLM_SERVER_PORT", raising=False)
    own = RkllmProvider()
    look = own.availability()
    assert not look.available and "RK3588" in look.reason and "--rkllm-server-host" in look.remedy
    monkeypatch.setenv("RKLLM_SERVER_HOST", "board.lan")
    assert own.availability().available
    monkeypatch.setattr("exo_mesh_rkllm.board.describe_board", lambda: "NPU of the RK3588")
    look = own.availability()
    assert (look.reason, look.compute, look.preference, look.dtypes) == ("NPU of the RK3588", "npu", -1, ())


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_server_is_reported_with_its_models(dialect: str, tmp_path: Path) -> None:
    for name in MODELS:
        plant(tmp_path, name)
    async with serving(FakeRkllama(dialect=dialect)) as address:
        (report,) = await look(options_of(address, models_dir=str(tmp_path)))
    assert report.is_up and not report.error and report.server == address
    assert report.models == (
        ServedModel("Qwen3-1.7B", "rkllm", address, MODELS[0], "", 4096, 1),
        ServedModel("TinyLlama-1.1B", "rkllm", address, MODELS[1], "", 4096, 1),
    )


async def test_a_server_that_is_down_is_reported_and_found_again_when_it_is_back() -> None:
    async with serving(FakeRkllama()) as address:
        assert [report.is_up for report in await look(options_of(address))] == [True]
    (down,) = await look(options_of(address))
    assert not down.is_up and "rkllama_server" in down.error and not down.models
    async with serving(FakeRkllama(), int(address.rpartition(":")[2])):
        assert [report.is_up for report in await look(options_of(address))] == [True]


async def test_another_server_at_the_port_is_no_rkllama() -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.json_response({"message": "Ollama is running", "models": []})

    fake = FakeRkllama()
    fake.app = lambda: _app(hello)  # type: ignore[method-assign]
    async with serving(fake) as address:
        (report,) = await look(options_of(address))
    assert not report.is_up and "is no RKLLAMA" in report.error


def _app(handler: object) -> web.Application:
    app = web.Application()
    app.router.add_get("/{rest:.*}", handler)  # type: ignore[arg-type]
    return app


async def test_a_server_that_says_nothing_is_down_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh_rkllm.look.LOOK_S", 0.1)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        (report,) = await look(options_of(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    assert not report.is_up and "within 0.1 s" in report.error
    assert LOOK_S <= 2, "the contract's deadline"


async def test_elsewhere_the_engine_is_available_while_a_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh_rkllm.board.describe_board", lambda: "")
    monkeypatch.setattr("exo_mesh_rkllm.look.describe_board", lambda: "")
    own = RkllmProvider()
    async with serving(FakeRkllama()) as address:
        assert len(await own.look(options_of(address))) == 1
        assert own.availability().available
        assert not await own.look({}) and not own.availability().available


async def test_elsewhere_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh_rkllm.look.describe_board", lambda: "")
    monkeypatch.delenv("RKLLM_SERVER_HOST", raising=False)
    monkeypatch.delenv("RKLLM_SERVER_PORT", raising=False)
    assert await look({}) == ()


def test_a_modelfile_is_read_with_quotes_and_without() -> None:
    assert parse_modelfile(MODELFILE) == ModelfileFacts("Qwen3-1.7B-w8a8.rkllm", "Qwen/Qwen3-1.7B", 4096)
    assert parse_modelfile("FROM a.rkllm\nHUGGINGFACE_PATH='org/m'\nNUM_CTX=many") == ModelfileFacts(
        "a.rkllm", "org/m", 0
    )
    assert parse_modelfile("") == parse_modelfile('FROM="') == parse_modelfile("{json: 1}") == ModelfileFacts()
    assert parse_modelfile("NUM_CTX=99999999999").context_limit == 0


def test_a_directory_of_models_lists_those_with_weights(tmp_path: Path) -> None:
    plant(tmp_path, "b")
    plant(tmp_path, "a", None)
    plant(tmp_path, "empty", weights="")
    plant(tmp_path, "other", weights="model.gguf")
    plant(tmp_path, "huge", "#" * MAX_BYTES + "\nNUM_CTX=1")
    (tmp_path / "file.rkllm").touch()
    assert {name: facts.context_limit for name, facts in read_models(tmp_path).items()} == {
        "a": 0,
        "b": 4096,
        "huge": 0,
    }
    assert read_models(tmp_path / "nowhere") == {}


def test_a_modelfile_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    plant(tmp_path, "a", None)
    os.mkfifo(tmp_path / "a" / "Modelfile")
    assert read_models(tmp_path) == {"a": ModelfileFacts()}


def test_models_get_names_that_the_mesh_allows_and_stand_for_others_only_if_told() -> None:
    local = {"dir one": ModelfileFacts(tokenizer="Qwen/Qwen3-1.7B", context_limit=7)}
    options = RkllmOptions(names={"x": "org/own"}, stands_for={"Qwen/Qwen3-1.7B": "qwen3-1.7b", "org/own": "other"})
    models = {one.served_name: one for one in served_models(["dir one", "x", "???", "dir-one"], local, options)}
    assert {name: (one.name, one.stands_for) for name, one in models.items()} == {
        "dir one": ("dir-one", "qwen3-1.7b"),
        "x": ("org/own", "other"),
    }, "of two models with one name the first counts, and a name of which nothing remains has none"
    assert models["dir one"].context_limit == 7
    assert served_models(["dir one"], local, RkllmOptions())[0].stands_for == "", "a tokenizer alone proves nothing"


@pytest.mark.parametrize(
    ("served", "name"), [("a b/c", "a-b-c"), ("..", ""), ("ü", ""), ("x" * 201, ""), ("a_b.c", "a_b.c")]
)
def test_a_directory_becomes_a_name(served: str, name: str) -> None:
    assert mesh_name(served) == name


def test_the_environment_has_the_defaults_and_options_win() -> None:
    assert parse_options({}, {}).server == "localhost:8080"
    environ = {"RKLLM_SERVER_HOST": "board.lan", "RKLLM_SERVER_PORT": "8081"}
    assert parse_options({}, environ).server == "board.lan:8081"
    assert parse_options({"host": "::1"}, environ).server == "[::1]:8081"
    assert names_a_server({}, environ) and names_a_server({"port": "1"}, {}) and not names_a_server({}, {"OTHER": "x"})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("host", "http://board"), ("host", "a/b"), ("host", "user@host"), ("host", ""), ("port", "0"),
        ("port", "99999"), ("port", "²"), ("models_dir", "models"), ("names", "[]"), ("names", "{"),
        ("names", '{"a": "../b"}'),
        ("names", '{"a": 1}'), ("stands_for", '"x"'), ("first_token_s", "0"), ("answer_s", "nan"), ("no_such", "1"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_by_name(option: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_options({option: value}, {})
    assert caught.value.param == option


async def test_a_server_with_a_flood_of_models_reports_a_bounded_number() -> None:
    names = tuple(f"model-{index}" for index in range(2 * MOST_MODELS))
    async with serving(FakeRkllama(TODAY, models=(*names, "x" * 500, "\x1b"))) as address:
        (report,) = await look(options_of(address))
    assert len(report.models) == MOST_MODELS
