"""The prose of the project uses plain words: these rules keep old habits from coming back."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

DIALECT = re.compile(r"\b(told|whoever|anew|of\s+late)\b", re.IGNORECASE)
MOST_DIALECT = 25
"""Occurrences in README, docs, exo_mesh and engines together. Write "sent", "reported", "any", "again", "recently"."""

ANAPHORA = re.compile(
    r"\b(those\s+(?:of|that|which|who)|one\s+(?:that|which)|the\s+one|what\s+(?:it|is)|that\s+of|of\s+which|in\s+which\s+case)\b",
    re.IGNORECASE,
)
"""Stands for a noun that the reader must look for."""
MOST_ANAPHORA = 60
"""First lines of docstrings in exo_mesh and engines with such a phrase. Name the thing again ("the peers that want it")
or use the genitive ("the driver's address")."""

_MAY_REFER = re.compile(rf'"""\s*[^\n]*{ANAPHORA.pattern}', re.IGNORECASE)
"""A module without this has no such first line, and need not be parsed."""

_PROSE = {".py", ".pyi", ".md", ".js", ".html", ".css", ".json", ".toml", ".conf"}
_NOT_OURS = {"vendor", "shipped"}
"""Folders with libraries for the page, and with the files of the demo model and the model cards."""

_GENERATED = "proto"
"""The folder of modules whose docstrings are comments of `protos`."""

_FIRST_SENTENCE = re.compile(r"(.*?[.?!])(?=\s|$)", re.DOTALL)
_MAY_ASK = re.compile(r'\?(\s|""")')
"""A module without this has no docstring that is a question, and need not be parsed."""


def prose_files() -> list[Path]:
    folders = [ROOT / name for name in ("docs", "exo_mesh", "engines")]
    found = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in _PROSE]
    return [ROOT / "README.md", *(path for path in found if _NOT_OURS.isdisjoint(path.parts))]


def is_question(docstring: str) -> bool:
    """The first sentence ends with a question mark."""
    first = _FIRST_SENTENCE.match(docstring.strip())
    return first is not None and first[1].endswith("?")


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring, those of constants and fields too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def referring_lines(folder: Path) -> Iterator[str]:
    """`path:line: text` of each docstring below a folder whose first line refers back, without generated modules."""
    for path in sorted(folder.rglob("*.py")):
        if {*_NOT_OURS, _GENERATED}.isdisjoint(path.parts) and _MAY_REFER.search(text := path.read_text()):
            for line, doc in docstrings(text):
                if refers_back(doc):
                    yield f"{path.relative_to(ROOT)}:{line}: {doc.strip().splitlines()[0]}"


def refers_back(docstring: str) -> bool:
    """The first line has a phrase of ANAPHORA."""
    return ANAPHORA.search(docstring.strip().partition("\n")[0]) is not None


def test_words_of_our_own_dialect_are_rare() -> None:
    counts = Counter({path: len(DIALECT.findall(path.read_text())) for path in prose_files()})
    worst = [f"{path.relative_to(ROOT)}: {count}" for path, count in counts.most_common(10) if count]
    assert counts.total() <= MOST_DIALECT, worst


def test_few_docstrings_begin_with_a_reference_instead_of_a_noun() -> None:
    found = [line for name in ("exo_mesh", "engines") for line in referring_lines(ROOT / name)]
    assert len(found) <= MOST_ANAPHORA, "\n".join([f"{len(found)} first lines:", *found])


def test_no_docstring_is_a_question() -> None:
    found = []
    for folder in ("exo_mesh", "engines", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if _MAY_ASK.search(text := path.read_text()):
                found += [f"{path.relative_to(ROOT)}:{line}" for line, doc in docstrings(text) if is_question(doc)]
    assert not found, "state what the function answers: 'Whether …', 'Checks …', 'Returns …'"


@pytest.mark.parametrize("text", ["Is it alive?", "Can this engine\nrun here? It says why.", "Who has it? Pure."])
def test_the_rule_sees_questions(text: str) -> None:
    assert is_question(text)


@pytest.mark.parametrize("text", ["`did you mean X?` for a word.", "Answers `?` to all. Why? Because.", "A value"])
def test_the_rule_lets_statements_pass(text: str) -> None:
    assert not is_question(text)


@pytest.mark.parametrize(
    "text",
    ["Ends those of this node.", "The one that is best.", "One which fits", "What it holds", "Returns what is left",
     "Its size, that of\tthe first", "A file of which a part is here", "An error, in which case it ends", "THE ONE"],
)  # fmt: skip
def test_the_rule_sees_references(text: str) -> None:
    assert refers_back(text)


@pytest.mark.parametrize(
    "text",
    ["The peers that want it", "One thing", "Whatever it costs", "That often", "Which one?\nThe one that is best."],
)
def test_the_rule_lets_nouns_pass(text: str) -> None:
    assert not refers_back(text)
