"""Every page can be reached from the index, every link leads to a place that exists, and errors are documented."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from exo_mesh import errors
from exo_mesh.api.errors import _RULES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
PARTS = ("start", "tasks", "reference", "how-it-works", "measurements")
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *sorted(ROOT.glob("*/README.md"))]
DOCUMENTS += [path for folder in ("engines", "examples") for path in sorted((ROOT / folder).glob("*/README.md"))]


def text_without_code(document: Path) -> str:
    """The text of a page without its code blocks, in which neither links nor headings count."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(document: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of each link to a file of this repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text_without_code(document))
    pairs = [target.partition("#")[::2] for target in targets if not re.match(r"[a-z]+:", target)]
    return [((document.parent / path).resolve() if path else document, anchor) for path, anchor in pairs]


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", text_without_code(document), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_exist(document: Path) -> None:
    for target, anchor in links(document):
        assert target.exists(), f"{document.name}: {target}"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{target.name}#{anchor}"


MODULE = re.compile(r"(?<![\w/.~$-])((?:[a-z_][a-z0-9_]*/)+[a-z0-9_]+\.(?:py|proto))\b|`((?:[a-z_]+/){2,})`")
"""A module or a folder of the code that a page names: from the root, a wing's parent, `tests`, or the page's folder."""

OTHER_PROJECTS = {"acceptance.md"}
"""Pages that name files of other projects too."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_that_a_page_names_exists(document: Path) -> None:
    roots = [ROOT, ROOT / "exo_mesh", ROOT / "engines", ROOT / "tests", document.parent]
    named = {module or folder for module, folder in MODULE.findall(document.read_text())}
    gone = [name for name in sorted(named) if not any((root / name).exists() for root in roots)]
    assert not gone or document.name in OTHER_PROJECTS, gone


def test_every_page_that_a_message_a_comment_or_a_test_names_exists() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"this is no git checkout: {listed.stderr.strip()}")
    named = re.compile(r"(?<![\w/.-])docs/[a-z0-9/-]+\.md\b")
    found: dict[str, str] = {}
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if path.is_file() and path.suffix not in (".webp", ".safetensors", ".woff2", ".gz"):
            text = path.read_text(encoding="utf-8", errors="ignore")
            found |= {page: name for page in named.findall(text) if not (ROOT / page).exists()}
    assert not found


def test_the_index_has_a_line_for_every_page() -> None:
    rows = [line for line in INDEX.read_text().splitlines() if line.startswith("| [")]
    described = {(DOCS / target).resolve() for row in rows for target in re.findall(r"\]\(([^)#\s]+)\)", row)[:1]}
    assert {*PAGES} - {INDEX} <= described, "docs/README.md: a row for each page"


def test_every_page_belongs_to_a_part() -> None:
    loose = {path.name for path in DOCS.glob("*.md")}
    assert loose == {"README.md", "glossary.md"}
    assert {path.relative_to(DOCS).parts[0] for path in PAGES if path.parent != DOCS} == {*PARTS}


def test_the_page_for_contributors_leads_to_the_index() -> None:
    assert INDEX in {target for target, _ in links(ROOT / "CONTRIBUTING.md")}


def test_pages_use_no_words_of_our_dialect() -> None:
    """Words in code style, such as names of tests, do not count."""
    dialect = re.compile(r"\b(told|whoever|anew|of late)\b", re.IGNORECASE)
    found = [
        f"{page.relative_to(ROOT)}: {line.strip()[:80]}"
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for line in text_without_code(page).splitlines()
        if dialect.search(re.sub(r"`[^`]*`", "", line))
    ]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_begins_with_its_title_and_has_one(page: Path) -> None:
    assert page.read_text().startswith("# ")
    assert len(re.findall(r"^# ", text_without_code(page), re.MULTILINE)) == 1


def test_every_error_code_is_documented_with_its_status() -> None:
    page = (DOCS / "reference" / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE))
    assert rows == {code: str(rule.status) for code, rule in _RULES.items()}, "docs/reference/errors.md, api/errors.py"
    codes = {cls.code for cls in vars(errors).values() if isinstance(cls, type)}
    assert codes <= rows.keys(), "give the code a status in api/errors.py and a row in docs/reference/errors.md"


def test_the_readme_has_one_test_command_between_its_markers() -> None:
    marked = re.search(r"<!-- test-command -->\n```sh\n(.*)\n```\n<!-- end -->", (ROOT / "README.md").read_text())
    assert marked is not None
    assert marked[1] == 'pip install ".[mlx,test]" && pytest -n 2'


def test_every_current_figure_has_a_command_a_date_and_says_whether_the_machine_was_quiet() -> None:
    page = (DOCS / "how-it-works" / "benchmarks.md").read_text()
    table = page.partition("## Current figures")[2].partition("\n\nAims")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")][
        1:
    ]
    assert len(rows) >= 15 and len(page.splitlines()) <= 120, "explanations and older figures: docs/measurements"
    for what, figure, _, command, recorded, quiet in rows:
        assert re.search(r"\d", figure), what
        assert re.match(r"`(exo-mesh|pytest|python -m) |\[log\]|the same$", command), what
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", recorded), what
        assert quiet in ("yes", "no", "not recorded"), what


def test_the_log_of_measurements_has_a_date_for_every_section_the_newest_first() -> None:
    log = DOCS / "measurements" / "README.md"
    rows = re.findall(
        r"^\| (\d{4}-\d\d-\d\d) \| (\d{4}-\d\d-\d\d) \| \[.*\]\((.*)\) \|$", log.read_text(), re.MULTILINE
    )
    last = [row[0] for row in rows]
    assert last == sorted(last, reverse=True) and all(first <= newest for newest, first, _ in rows)
    sections = {f"{page.name}#{anchor}" for page in log.parent.glob("*.md") if page != log for anchor in anchors(page)}
    assert {row[2] for row in rows} == sections


def test_the_glossary_defines_each_term_once() -> None:
    terms = re.findall(r"^\| ([\w -]+) \| (?!meaning)", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    wanted = """ballot stage driver reserve hop lap rank ring frame plan seat owner runner peer node placement instance
    namespace engine card survey continuation drain fence row op chunk journal view mesh home"""
    assert {*wanted.split(), "entry peer", "tensor group"} <= {*terms}
    assert len(terms) == len({*terms})


def test_no_page_has_marks_of_a_merge() -> None:
    found = [str(page) for page in PAGES if "\n<<<<<<< " in page.read_text()]
    assert not found


def test_the_page_about_architecture_can_be_read_in_minutes() -> None:
    words = (DOCS / "how-it-works" / "architecture.md").read_text().split()
    assert len(words) <= 900, "one line per wing; details belong into the pages that it links"
