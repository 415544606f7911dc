"""Templates are rendered in processes of their own: a hostile one fails there and costs nobody else anything."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from exo_mesh.api.core import templates
from exo_mesh.api.core.child_processes import IDLE_S, NUM_PROCESSES
from exo_mesh.api.core.renderer_process import RendererLostError, RendererProcess, renderer_environment
from exo_mesh.api.core.templates import TemplateRenderer
from exo_mesh.api.core.texts import TextModels
from exo_mesh.base import long_texts
from exo_mesh.base.tasks import Watchdog
from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import InputError, ModelError, NotReadyError
from exo_mesh.text.recent_failures import KEPT_S, RecentFailures
from exo_mesh.text.template import ChatTemplate, TemplateTraits
from exo_mesh.text.template_wire import CompileTemplate, RenderTemplate, TemplateCompiled, frame
from tests.text.text_models import write_text_model

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
GREETING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MUCH = "{% set a = 'a' * 4000000 %}"
FLOOD = "{% for i in range(1000) %}{{ a }}{% endfor %}"

LONG = "{{ x }}" * 140_000
"""It takes longer to compile than the limit is."""

HOSTILE = {
    "block set": MUCH + "{% set b %}" + FLOOD + "{% endset %}ok",
    "macro": MUCH + "{% macro m() %}" + FLOOD + "{% endmacro %}{% set b = m() %}ok",
    "filter block": MUCH + "{% filter upper %}" + FLOOD + "{% endfilter %}",
    "indent": r"{{ ('a\n' * 4000) | indent(1000000) }}",
    "indent with a text": MUCH + r"{{ ('a\n' * 1000) | indent(a) }}",
    "tojson with indent": "{{ range(4000) | list | tojson(indent=1000000) }}",
    "tojson with separators": MUCH + "{{ range(1000) | list | tojson(separators=[a, a]) }}",
    "translate": MUCH + "{{ ('y' * 1000).translate({121: a}) }}",
    "expandtabs": r"{{ ('\t' * 4000).expandtabs(1000000) }}",
    "percent": "{{ ('%(a)9999d' * 400000) % {'a': 1} }}",
    "format": "{{ ('{0:9999}' * 400000).format(1) }}",
    "strftime": "{{ strftime_now('%c' * 2000000) }}",
}
"""The templates of an audit that passed the limits of the sandbox; each wants gigabytes or many seconds."""

MIB = 2**20


@pytest.fixture
async def renderer() -> AsyncIterator[TemplateRenderer]:
    made = TemplateRenderer()
    yield made
    pids = made.pids
    await made.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def template(source: str) -> ChatTemplate:
    return ChatTemplate.found(source, "model-dir/chat_template.jinja")


async def warm(renderer: TemplateRenderer) -> int:
    """Start a process; its id."""
    await renderer.compile(template(GREETING))
    (pid,) = renderer.pids
    return pid


async def test_what_a_template_is_given_and_what_it_makes(renderer: TemplateRenderer) -> None:
    compiled = await renderer.compile(template("{{ huge }}{{ messages[0].content }}{{ bos_token }}"))
    assert compiled.variables >= {"huge", "messages", "bos_token"}
    variables = {"huge": 10**30, "bos_token": "<s>"}
    content = "grüße 日本 🙂 \x00\n" * 30_000
    text = await renderer.render(compiled, [{"role": "user", "content": content}], variables=variables)
    assert text == f"{10**30}{content}<s>"


async def test_long_texts_reach_a_template_from_any_place(renderer: TemplateRenderer) -> None:
    source = (
        "{{ messages[0].content }}{{ messages[0].parts[1] }}{{ notes.a }}{% for name in notes %}{{ name }}{% endfor %}"
    )
    compiled = await renderer.compile(template(source))
    first, second, third, name = ("".join((char, "x" * long_texts.LONG)) for char in "abcd")
    message = {"role": "user", "content": first, "parts": ["-", second]}
    text = await renderer.render(compiled, [message], variables={"notes": {"a": third, name: ""}})
    assert text == first + second + third + "a" + name


async def test_a_lone_surrogate_behind_a_long_text_is_a_refusal_and_the_process_goes_on(
    renderer: TemplateRenderer,
) -> None:
    compiled = await renderer.compile(template(r"{{ messages[0].content }}{{ '\ud83d' }}{{ messages[0].content }}"))
    pid = next(iter(renderer.pids))
    for _ in range(2):
        with pytest.raises(InputError, match="lone surrogate"):
            await renderer.render(compiled, [{"role": "user", "content": "x" * long_texts.LONG}])
    assert await renderer.render(template(GREETING), HI) == "<user>Hi"
    assert renderer.pids == {pid}


async def test_a_template_is_sent_to_each_process_once_and_again_after_it_was_forgotten(
    renderer: TemplateRenderer,
) -> None:
    templates = [template(f"{GREETING}{number}") for number in range(20)]
    for _ in range(2):
        for number, one in enumerate(templates):
            assert await renderer.render(one, HI) == f"<user>Hi{number}"
    assert len(renderer.pids) == 1


@pytest.mark.parametrize(
    "name", [name if name == "block set" else pytest.param(name, marks=pytest.mark.extended) for name in HOSTILE]
)
async def test_a_hostile_template_is_refused_and_costs_this_process_nothing(
    renderer: TemplateRenderer, name: str
) -> None:
    await warm(renderer)
    this = psutil.Process()
    before = this.memory_info().rss
    with pytest.raises(InputError, match=r"too much memory|too long|more than") as caught:
        await renderer.render(template(HOSTILE[name]), HI)
    assert caught.value.param == "messages"
    assert this.memory_info().rss - before < 64 * MIB
    assert await renderer.render(template(GREETING), HI) == "<user>Hi"


async def test_a_question_that_cost_a_process_costs_no_other_one_within_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(templates, "KILL_GRACE_S", 0.1)  # a fast process would answer within the usual time
    now = 0.0
    renderer, patient = TemplateRenderer(0.2, clock=lambda: now), TemplateRenderer(clock=lambda: now)
    for one in (renderer, patient):
        one._failures = RecentFailures(lambda: now)
    slow = template("{{ ('{0}' * 1390000).format(messages[0].content) }}")
    grammar = GrammarSpec("regex", "[")
    try:
        for text in ("Hi", "Ho"):
            pid = await warm(renderer)
            asked: list[dict[str, Any]] = [{"role": "user", "content": text}]
            with pytest.raises(InputError, match="too long") as first:
                await renderer.render(slow, asked)
            await until(lambda: not renderer.pids)
            with pytest.raises(InputError, match="too long") as again:
                await renderer.render(slow, asked)
            assert not renderer.pids, "no process was started for it"
            assert (str(again.value), again.value.param) == (str(first.value), "messages") and pid
        for _ in range(2):
            with pytest.raises(InputError, match="the regex grammar cannot be used"):
                await patient.check_grammar(grammar, "guided_regex")
            await patient.close()
        now += KEPT_S + 1
        with pytest.raises(NotReadyError, match="stopping"):
            await patient.check_grammar(grammar, "guided_regex")
    finally:
        await renderer.close()


async def test_a_process_that_ran_out_of_memory_answers_no_other_question(renderer: TemplateRenderer) -> None:
    pid = await warm(renderer)
    with pytest.raises(InputError, match="too much memory"):
        await renderer.render(template(HOSTILE["percent"]), HI)
    assert await renderer.render(template(GREETING), HI) == "<user>Hi"
    await until(lambda: pid not in renderer.pids)


async def test_others_are_served_while_requests_for_one_template_run_and_queue(renderer: TemplateRenderer) -> None:
    hostile = [asyncio.create_task(renderer.render(template(ENDLESS), HI)) for _ in range(2 * NUM_PROCESSES)]
    for _ in range(20):
        assert await renderer.render(template(GREETING), HI) == "<user>Hi"
    assert not [task for task in hostile if task.done()]
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)


async def test_a_cancelled_request_ends_its_process_and_no_other(renderer: TemplateRenderer) -> None:
    pid = await warm(renderer)
    task = asyncio.create_task(renderer.render(template(ENDLESS), HI))
    await asyncio.sleep(0)  # it has asked the process
    other = asyncio.create_task(renderer.render(template(GREETING), HI))
    task.cancel()
    assert await other == "<user>Hi"
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: pid not in renderer.pids)
    assert len(renderer.pids) == 1


async def test_a_process_that_is_killed_is_replaced(renderer: TemplateRenderer) -> None:
    idle = await warm(renderer)
    os.kill(idle, signal.SIGKILL)
    await until(lambda: renderer.end_idle(0.0) == math.inf)
    assert await renderer.render(template(GREETING), HI) == "<user>Hi"
    await until(lambda: idle not in renderer.pids)
    (busy,) = renderer.pids
    began = sum(psutil.Process(busy).cpu_times())
    task = asyncio.create_task(renderer.render(template(ENDLESS), HI))
    await until(lambda: sum(psutil.Process(busy).cpu_times()) > began + 0.05)
    os.kill(busy, signal.SIGKILL)
    with pytest.raises(InputError, match="signal 9"):
        await task
    assert await renderer.render(template(GREETING), HI) == "<user>Hi"


@pytest.mark.extended
async def test_a_process_ends_once_it_was_idle_for_long() -> None:
    now = [0.0]
    renderer = TemplateRenderer(clock=lambda: now[0])
    greeting, _ = await asyncio.gather(*(renderer.compile(template(source)) for source in (GREETING, "x")))
    assert len(renderer.pids) == NUM_PROCESSES
    now[0] = 100.0
    await renderer.render(greeting, HI)  # the process that was used last; the other one stays idle
    assert renderer.end_idle(IDLE_S) == IDLE_S + 100.0
    await until(lambda: len(renderer.pids) == 1)
    assert renderer.end_idle(IDLE_S + 100.0) == math.inf
    await until(lambda: not renderer.pids)
    assert await renderer.render(greeting, HI) == "<user>Hi"
    await renderer.close()


async def test_no_process_is_left_by_a_renderer_that_closes_in_the_middle() -> None:
    renderer = TemplateRenderer()
    pid = await warm(renderer)
    task = asyncio.create_task(renderer.render(template(ENDLESS), HI))
    await asyncio.sleep(0)
    await renderer.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(InputError):
        await task
    with pytest.raises(NotReadyError, match="stopping"):
        await renderer.render(template(GREETING), HI)


@pytest.mark.parametrize(
    ("script", "words"),
    [(None, "cannot be started.*No such file"), ("echo 'No module named jinja2' >&2; exit 1", "No module named")],
)
async def test_a_machine_that_cannot_start_a_process_says_so(
    renderer: TemplateRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, words: str
) -> None:
    executable = tmp_path / "python"
    if script is not None:
        executable.write_text(f"#!/bin/sh\n{script}\n")
        executable.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(executable))
        with pytest.raises(NotReadyError, match=words):
            await renderer.compile(template(GREETING))
    assert await renderer.render(template(GREETING), HI) == "<user>Hi"


@asynccontextmanager
async def compiled_in_process(source: str, growth_bytes: int, most_bytes: int) -> AsyncIterator[RendererProcess]:
    """A process that has one template, "t"."""
    process = await RendererProcess.spawn(growth_bytes, most_bytes)
    await process.ready()
    answer = await process.ask(frame(CompileTemplate("t", source, "here", 30.0)), 30.0)
    assert isinstance(answer, TemplateCompiled)
    yield process
    process.kill()
    await process.closed()


ASK = frame(RenderTemplate("t", HI, True, False, {}, 30.0))
SLOW = "{{ ('{0}' * 1390000).format(1) }}"
"""One call of many seconds, in which the sandbox never looks at the clock."""


@pytest.mark.extended
async def test_a_process_that_does_not_answer_in_time_is_lost() -> None:
    async with compiled_in_process(SLOW, 1 << 30, 1 << 30) as process:
        with pytest.raises(RendererLostError, match=r"too long: it was stopped after 0\.1 s"):
            await process.ask(ASK, 0.1)
        assert not process.is_usable


async def test_a_process_that_was_stopped_by_a_signal_goes_on_with_the_next_question(
    renderer: TemplateRenderer,
) -> None:
    pid = await warm(renderer)
    os.kill(pid, signal.SIGSTOP)
    assert await renderer.render(template(GREETING), HI)
    assert renderer.pids == {pid}


async def test_a_process_that_is_stopped_during_a_question_is_not_the_fault_of_the_template() -> None:
    async with compiled_in_process(SLOW, 1 << 30, 1 << 30) as process:
        asked = asyncio.create_task(process.ask(ASK, 0.1))
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(NotReadyError, match="stopped by a signal; try again"):
            await asked
        assert not process.is_usable


@pytest.mark.extended
async def test_a_process_that_the_system_does_not_limit_is_ended_when_it_is_too_large() -> None:
    watchdog = Watchdog(0.05)
    async with compiled_in_process(HOSTILE["block set"], 4 << 30, 200 * MIB) as process:
        watchdog.watch(process.watch_memory)
        with pytest.raises(RendererLostError, match="needs too much memory"):
            await process.ask(ASK, 30.0)
        watchdog.forget(process.watch_memory)


def test_a_process_ends_with_its_standard_input_and_has_nothing_of_a_node() -> None:
    code = "import sys; from exo_mesh.text.template_child import main; main(['0']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], input=b"", capture_output=True, timeout=60, check=True)
    modules = {name.partition(".")[0] for name in done.stdout.decode().partition("}")[2].split()}
    assert "jinja2" in modules
    assert not modules & {"grpc", "aiohttp", "numpy", "tokenizers", "google", "asyncio", "psutil"}


def test_secrets_and_tokens_stay_out_of_its_environment() -> None:
    given = {"EXO_MESH_SECRET": "s", "HF_TOKEN": "t", "PATH": "/bin", "PYTHONPATH": ".", "LC_ALL": "C", "TZ": "UTC"}
    assert renderer_environment(given) == {"PATH": "/bin", "PYTHONPATH": ".", "LC_ALL": "C", "TZ": "UTC"}


@pytest.mark.extended
def test_a_process_whose_node_has_died_in_the_middle_ends_by_its_limit_of_cpu_time() -> None:
    code = "from exo_mesh.base.process_limits import limit_cpu\nlimit_cpu(-1.5)\nwhile True: pass"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGXCPU


@pytest.fixture
async def texts() -> AsyncIterator[TextModels]:
    made = TextModels(TemplateRenderer())
    yield made
    await made.close()


async def test_a_model_is_opened_once_for_all_who_ask_and_outlives_the_first(texts: TextModels, tmp_path: Path) -> None:
    directory = write_text_model(tmp_path, GREETING)
    askers = [asyncio.create_task(texts.get(directory)) for _ in range(5)]
    await until(lambda: bool(texts._opening))
    askers[0].cancel()
    opened = await asyncio.gather(*askers[1:])
    assert len({id(text) for text in opened}) == 1
    assert await texts.get(directory) is opened[0]
    assert opened[0].template is not None
    assert "messages" in opened[0].template.variables


@pytest.mark.extended
async def test_a_template_that_cannot_be_compiled_holds_up_no_other_model(texts: TextModels, tmp_path: Path) -> None:
    hostile = write_text_model(tmp_path / "hostile", LONG)
    opening = [asyncio.create_task(texts.get(hostile)) for _ in range(3)]
    text = await texts.get(write_text_model(tmp_path / "good", GREETING))
    assert await texts.render(text, text.chat_template, HI, variables={})
    assert not [task for task in opening if task.done()]
    for task in opening:
        task.cancel()
    await asyncio.gather(*opening, return_exceptions=True)


async def test_what_a_template_can_do_is_found_in_a_process(renderer: TemplateRenderer) -> None:
    found = await renderer.try_out(await renderer.compile(template(GREETING)), {"bos_token": "<s>"})
    assert (found.traits.shows_system, found.traits.shows_tools) == (True, False)
    assert "<user>" in found.traits.written


async def test_a_template_that_cannot_be_tried_is_taken_as_one_that_can_do_all() -> None:
    renderer = TemplateRenderer(limit_s=0.3)
    for source in (ENDLESS, HOSTILE["percent"]):
        assert (await renderer.try_out(template(source), {})).traits == TemplateTraits()
    assert (await renderer.try_out(template(GREETING), {})).traits.written
    await renderer.close()


async def test_a_model_whose_template_could_not_be_tried_is_tried_again(tmp_path: Path) -> None:
    texts = TextModels(TemplateRenderer(limit_s=0.3))
    for name, source in (("endless", ENDLESS), ("greeting", GREETING)):
        directory = write_text_model(tmp_path / name, source)
        first, second = [await texts.get(directory) for _ in range(2)]
        assert (first is second) == first.chat_template.is_tried == (name == "greeting")
    await texts.close()


@pytest.mark.extended
async def test_a_template_that_takes_too_long_to_compile_makes_its_model_unusable() -> None:
    renderer = TemplateRenderer(limit_s=0.5)
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template (runs too long|needs too much)"):
        await renderer.compile(template(LONG))
    await renderer.close()


async def test_a_model_without_a_template_says_what_to_use_instead(texts: TextModels, tmp_path: Path) -> None:
    text = await texts.get(write_text_model(tmp_path, None))
    with pytest.raises(InputError, match="no chat template; use /v1/completions"):
        await texts.render(text, text.chat_template, HI, variables={})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)
