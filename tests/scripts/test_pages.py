"""The pages name verbs, flags, files and figures that exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from exo_mesh.cli.main import VERBS
from exo_mesh.cli.model_verbs import module_of
from exo_mesh.cli.parser import Parser
from exo_mesh.domain.fitting import split_layers
from tools.bench.__main__ import main as bench_main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.glob("*/**/*.md"))
NAMES_OF_AN_OLDER_PLAN = "how-it-works/acceptance"
"""Names files and tests that do not exist here, beside those that do; tests/acceptance checks it."""
RIVALS = ("exo", "Skulk", "mesh-llm", "Parallax", "llama.cpp", "Ollama", "oMLX", "SwarmLLM", "ThunderMLX", "LM Studio")


def path_of(page: str) -> Path:
    return DOCS / f"{page}.md"


def text_of(page: str) -> str:
    return path_of(page).read_text()


def commands(page: str) -> list[list[str]]:
    """Every `exo-mesh …` of a page, in a block or in a sentence."""
    text = text_of(page).replace("\\\n", " ")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = []
    for line in (*lines, *inline):
        for part in re.split(r"&&|;|\|\|", line):
            is_whole = part.count("'") % 2 == part.count('"') % 2 == 0
            words = shlex.split(part.strip(), comments=True) if is_whole else []
            start = next((index for index, word in enumerate(words) if word == "exo-mesh"), None)
            if start is not None and words[:start] in ([], ["sudo"], ["until"]):
                found.append(words[start + 1 :])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_has_a_verb_and_flags_that_exist(page: str) -> None:
    for words in commands(page):
        verb, *rest = words if words and not words[0].startswith("-") else ["serve", *words]
        if verb in ("VERB", "help"):
            continue
        assert verb in VERBS, words
        parser = Parser(prog=verb)
        importlib.import_module(module_of(verb)).add_arguments(parser)
        known = set(parser._option_string_actions)
        for action in parser._actions:
            for part in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
                known |= set(part._option_string_actions)
        own = rest[: rest.index("--")] if "--" in rest else rest  # what follows is for another program
        flags = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert flags <= known, f"{page}.md: {words}: {flags - known}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != NAMES_OF_AN_OLDER_PLAN])
def test_every_test_script_and_tool_that_a_page_names_exists(page: str) -> None:
    text = text_of(page)
    for name in re.findall(r"\b((?:tests|scripts|hostfiles|systemd|monitoring)/[\w./-]*\w)", text):
        assert (ROOT / name).exists() or name in ("scripts/install.sh", "systemd/"), f"{page}.md: {name}"
    for module in re.findall(r"python -m (tools(?:\.\w+)*)", text):
        assert importlib.util.find_spec(module), f"{page}.md: {module}"


def test_each_figure_about_us_in_the_comparison_has_its_command() -> None:
    section = (
        text_of("how-it-works/comparison")
        .partition("## What exo-mesh does better")[2]
        .partition("What is not a figure")[0]
    )
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 6
    for what, ours, _, command in rows:
        assert re.search(r"\d", ours) or "bit-equal" in ours, what
        assert re.search(r"`(exo-mesh|pytest|python -m) ", command) or command.strip() == "the same", what


def test_the_comparison_names_each_program_with_its_source_and_gaps_on_both_sides() -> None:
    text = text_of("how-it-works/comparison")
    sources = text.partition("Sources:")[2].partition("\n\n")[0]
    assert all(rival in sources for rival in RIVALS) and sources.count("https://") >= len(RIVALS)
    assert re.search(r"As of \d+ \w+ 20\d\d", " ".join(text.split())), "a fact about another program ages"
    assert "## What others do better today" in text and "## What exo-mesh does better" in text
    table = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| one model over several")]
    assert len(table[0]) == len(RIVALS) + 2


def test_the_split_of_the_mixed_mesh_is_what_placement_computes() -> None:
    text = " ".join(text_of("start/mixed-mesh").split())
    memory_pattern = r"with ([\d.]+), ([\d.]+) and ([\d.]+) GB usable, "
    shown = re.search(memory_pattern + r"a model of (\d+) layers is cut about (\d+), (\d+) and (\d+)", text)
    assert shown is not None
    memory = [int(10**9 * float(gb)) for gb in shown.groups()[:3]]
    assert [len(part) for part in split_layers(int(shown[4]), memory)] == [int(n) for n in shown.groups()[4:]]


def test_sizes_of_the_sweep_are_read_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from tools.bench.collectives import parse_bytes

    assert [parse_bytes(text) for text in ("4", "4k", "16M", "1G")] == [4, 4096, 16 << 20, 1 << 30]
    assert bench_main(["collectives", "--sizes", "2G"]) == 1 and "is not a size" in capsys.readouterr().err
    assert bench_main(["collectives", "--ranks", "1"]) == 1 and "at least two ranks" in capsys.readouterr().err
